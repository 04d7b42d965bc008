"""peft's LoRA under FSDP2: adapters alone, saved by four processes, three go on with.

torchrun --nproc-per-node 4 examples/peft_lora.py /tmp/run; torchrun --nproc-per-node 3 ... /tmp/run"""

import os
import sys

try:
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
    from transformers import LlamaConfig, LlamaForCausalLM
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}: `make clients` installs what this example needs")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

import torchtitan_ext as tte

if __name__ == "__main__":
    tte.install()  # the one line
    torch.manual_seed(1)  # in the place of pretrained weights
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=26, num_hidden_layers=2, num_attention_heads=4
    )
    model = fully_shard(get_peft_model(LlamaForCausalLM(config), LoraConfig(r=5, target_modules=["q_proj", "up_proj"])))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    start = 3 if os.path.exists(sys.argv[1]) else 0
    if start:
        state = {"adapter": get_peft_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=sys.argv[1])
        set_peft_model_state_dict(model, state["adapter"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    for step, batch in list(enumerate(torch.randint(50, (6, 12, 8)), 1))[start : start + 3]:
        tokens = batch.chunk(dist.get_world_size())[dist.get_rank()]
        (loss := model(input_ids=tokens, labels=tokens).loss).backward()
        optimizer.step(), optimizer.zero_grad()
        dist.all_reduce(total := loss.detach() / dist.get_world_size())
        if dist.get_rank() == 0:
            print(f"step {step}: loss {total:.4f}")
    state = {"adapter": get_peft_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=sys.argv[1])
