"""torchao's float8 weights and AdamW8bit; what four processes have saved, two or three go on with.
torchrun --nproc-per-node 4 examples/torchao_float8.py /tmp/run; torchrun --nproc-per-node 3 ... /tmp/run"""

import os
import sys

try:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.optim import AdamW8bit
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}: `make clients` installs what this example needs")

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torchtitan_ext as tte

if __name__ == "__main__":
    tte.install()  # the one line
    torch.compiler.set_stance("force_eager")  # torchao compiles its steps; this needs no compiler
    torch.manual_seed(1)
    path, num_ranks = sys.argv[1], int(os.environ["WORLD_SIZE"])
    model = nn.Sequential(nn.Linear(512, 48, bias=False))
    # gloo has no float8, so that weights are gathered as they are; on GPUs: enable_fsdp_float8_all_gather=True
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
    fully_shard(model, mesh=init_device_mesh("cpu", (num_ranks,)))
    optimizer = AdamW8bit(model.parameters(), lr=0.01)
    state = {"step": 0}
    if os.path.exists(path):
        weights, moments = states.get_state_dict(model, optimizer)  # only to load: it steps a new optimizer
        state |= {"model": weights, "optimizer": moments}
        dcp.load(state, checkpoint_id=path)
        states.set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    for _ in range(3):
        state["step"] += 1
        loss = model(torch.ones(8, 512)).square().mean()
        loss.backward(), optimizer.step(), optimizer.zero_grad()
        print(f"step {state['step']}: loss {loss:.4f}")
    state["model"], state["optimizer"] = states.get_state_dict(model, optimizer)
    dcp.save(state, checkpoint_id=path)
