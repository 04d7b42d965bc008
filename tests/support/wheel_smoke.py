"""Saves and loads with an installed wheel: `make wheel` runs it in an environment beside a torch."""

import sys
from pathlib import Path

import torch

import torchtitan_ext as tte

assert Path(tte.__file__).is_relative_to(sys.prefix), f"not the wheel: {tte.__file__}"
run = sys.argv[1]
model, again = torch.nn.Linear(64, 10), torch.nn.Linear(64, 10)
tte.save({"model": model, "step": 100}, f"{run}/step-100")
state = {"model": again, "step": 0}
tte.load(state, run, step="latest")
assert state["step"] == 100 and torch.equal(again.weight, model.weight)
assert torch.equal(tte.ops.flatten_tensors([model.weight.detach()]), model.weight.detach().flatten().view(torch.uint8))
print("saved and loaded")
