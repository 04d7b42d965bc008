# 6 processes; stock: overlapping chunks
import torch.distributed.checkpoint as dcp
from preamble import fsdp_over_tp

dcp.save(fsdp_over_tp(13).state_dict(), checkpoint_id="/tmp/thirteen_rows")
