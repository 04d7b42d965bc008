"""transformers' Trainer with FSDP2: what four processes have saved, three go on with, over the same batches.

torchrun --nproc-per-node 4 examples/transformers_trainer.py /tmp/run; torchrun --nproc-per-node 3 ... /tmp/run"""

import os
import sys

try:
    from accelerate import PartialState
    from accelerate.utils import DistributedType
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}: `make clients` installs what this example needs")

import torch

import torchtitan_ext as tte

if __name__ == "__main__":
    tte.install()  # the one line
    path = sys.argv[1]
    start = 3 if os.path.exists(f"{path}/checkpoint-3") else 0
    arguments = TrainingArguments(
        path,
        fsdp=True,
        fsdp_config={"state_dict_type": "SHARDED_STATE_DICT"},  # Trainer's default gathers the whole model
        per_device_train_batch_size=12 // int(os.environ["WORLD_SIZE"]),
        **{"max_steps": start + 3, "save_steps": 3, "logging_steps": 1, "lr_scheduler_type": "constant"},
        **{"report_to": "none", "disable_tqdm": True, "use_cpu": not torch.cuda.is_available()},
    )
    if arguments.use_cpu:  # accelerate has FSDP for GPUs only: let it take these processes for some
        PartialState().distributed_type = DistributedType.MULTI_GPU
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=26, num_hidden_layers=2, num_attention_heads=4
    )
    rows = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(50, (72, 8))]
    trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows)
    trainer.train(resume_from_checkpoint=start > 0)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if trainer.is_world_process_zero():
        for step in range(start + 1, start + 4):
            print(f"step {step}: loss {losses[step - 1]:.4f}")
