# 6 processes; stock: AssertionError
import torch
from preamble import fsdp_over_tp
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

model = fsdp_over_tp(13)
whole = {"0.weight": torch.arange(39.0).view(13, 3)}
set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True))
