"""A state as it is saved, what it becomes by a transform, and the same by torch on whole tensors."""

import torch

from torchtitan_ext import transforms
from torchtitan_ext.transforms import Rule, Transform

HEADS, HEAD_DIM, DIM, EXPERTS = 4, 6, 20, 5
BLOCK = [5, 3]
ROWS = [HEADS * HEAD_DIM, DIM]
TRANSFORM = Transform(
    [
        Rule("embed", "model.tok_embeddings"),
        Rule(
            "layers.*.q",
            "model.layers.*.wq",
            [
                transforms.reshape([HEADS, 2, HEAD_DIM // 2, DIM], was=ROWS),
                transforms.transpose(1, 2),
                transforms.reshape(ROWS, was=[HEADS, HEAD_DIM // 2, 2, DIM]),
            ],
        ),
        Rule("layers.*.kv", ["model.layers.*.wk", "model.layers.*.wv"], [transforms.split(0, sizes=[7, 11])]),
        Rule("layers.*.conv", "model.layers.*.linear", [transforms.transpose(0, 1)]),
        Rule(
            ["layers.*.experts.#.w1", "layers.*.experts.#.w3"],
            "model.layers.*.w13",
            [transforms.stack(0), transforms.transpose(1, 2), transforms.concat(1, parts=2)],
        ),
        Rule("layers.*.norm", "model.layers.*.norm", [transforms.cast("bfloat16")]),
        Rule(
            ["layers.*.fp8", "layers.*.fp8_scale"],
            "model.layers.*.dense",
            [transforms.dequantize(BLOCK, dtype="bfloat16"), transforms.transpose(0, 1)],
        ),
        Rule("step", "step"),
    ],
    drop=["optimizer.**"],
)


def saved_state() -> dict[str, torch.Tensor]:
    """What a checkpoint has, whole."""
    generator = torch.Generator().manual_seed(29)

    def of(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    state = {"embed": of(33, DIM), "optimizer.exp_avg": of(3)}
    for layer in range(2):
        name = f"layers.{layer}"
        state |= {
            f"{name}.q": of(*ROWS),
            f"{name}.kv": of(18, DIM),
            f"{name}.conv": of(DIM, 70),
            f"{name}.norm": of(DIM),
        }
        state |= {f"{name}.experts.{one}.{part}": of(9, 4) for one in range(EXPERTS) for part in ("w1", "w3")}
        state |= {f"{name}.fp8": of(24, 17).to(torch.float8_e4m3fn), f"{name}.fp8_scale": of(5, 6)}
    return state


def wanted_state() -> dict[str, torch.Tensor]:
    """The same by torch, on whole tensors."""
    saved = saved_state()
    wanted = {"tok_embeddings": saved["embed"]}
    for layer in range(2):
        name = f"layers.{layer}"
        wanted[f"{name}.wq"] = saved[f"{name}.q"].view(HEADS, 2, HEAD_DIM // 2, DIM).transpose(1, 2).reshape(ROWS)
        wanted[f"{name}.wk"], wanted[f"{name}.wv"] = saved[f"{name}.kv"].split([7, 11])
        wanted[f"{name}.linear"] = saved[f"{name}.conv"].T.contiguous()
        parts = [
            torch.stack([saved[f"{name}.experts.{one}.{part}"] for one in range(EXPERTS)]).transpose(1, 2)
            for part in ("w1", "w3")
        ]
        wanted[f"{name}.w13"] = torch.cat(parts, 1)
        wanted[f"{name}.norm"] = saved[f"{name}.norm"].to(torch.bfloat16)
        scales = saved[f"{name}.fp8_scale"].repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)[:24, :17]
        wanted[f"{name}.dense"] = (saved[f"{name}.fp8"].float() * scales).to(torch.bfloat16).T.contiguous()
    return wanted
