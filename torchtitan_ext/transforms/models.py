"""Ready transforms: from checkpoints of Hugging Face's hub to the models of torchtitan and transformers.

``inverse()`` goes back. Tied weights are in the state twice and in the checkpoint once: then there is no way back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torchtitan_ext.errors import WrongValueError
from torchtitan_ext.transforms.rules import (
    Rule,
    Step,
    Transform,
    concat,
    dequantize,
    reshape,
    split,
    stack,
    transpose,
)

__all__ = [
    "fused_projections",
    "torchtitan_deepseek_v3",
    "torchtitan_llama3",
    "torchtitan_qwen3",
    "transformers_gpt2",
    "transformers_mixtral",
]

_TITAN_NAMES = {
    "self_attn.o_proj.weight": "attention.wo.weight",
    "mlp.gate_proj.weight": "feed_forward.w1.weight",
    "mlp.up_proj.weight": "feed_forward.w3.weight",
    "mlp.down_proj.weight": "feed_forward.w2.weight",
    "input_layernorm.weight": "attention_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
}
_TITAN_EXPERTS = {"gate_proj": "w1_EFD", "up_proj": "w3_EFD", "down_proj": "w2_EDF"}
_MTP_COPIES = ("model.layers.*.embed_tokens.weight", "model.layers.*.shared_head.head.weight")
_NO_WEIGHTS = ("model.layers.*.self_attn.rotary_emb.inv_freq",)


def torchtitan_llama3(
    *, num_heads: int, num_kv_heads: int | None = None, head_dim: int, dim: int, tied: bool = False
) -> Transform:
    """torchtitan's Llama 3. Its rotary embedding turns pairs of rows of wq and wk, that of the hub halves of a head.

    Args:
        num_heads, num_kv_heads, head_dim, dim: Of the model's attention; without ``num_kv_heads`` as many as heads.
        tied: The checkpoint has no ``lm_head.weight``, which is the embedding.
    """

    def paired(heads: int) -> list[Step]:
        rows = (heads * head_dim, dim)
        halves, pairs = (heads, 2, head_dim // 2, dim), (heads, head_dim // 2, 2, dim)
        return [reshape(halves, was=rows), transpose(1, 2), reshape(rows, was=pairs)]

    steps = {"q": paired(num_heads), "k": paired(num_kv_heads or num_heads), "v": []}
    rules = [
        Rule(f"model.layers.*.self_attn.{name}_proj.weight", f"layers.*.attention.qkv_linear.w{name}.weight", turned)
        for name, turned in steps.items()
    ]
    return Transform([*rules, *_layers(_TITAN_NAMES), *_titan_ends(tied)], drop=_NO_WEIGHTS)


def torchtitan_qwen3(*, tied: bool = False) -> Transform:
    """torchtitan's Qwen 3, dense or with experts, which it has stacked. ``tied`` as in ``torchtitan_llama3``."""
    names = {f"self_attn.{name}_proj.weight": f"attention.qkv_linear.w{name}.weight" for name in "qkv"}
    names |= {f"self_attn.{name}_norm.weight": f"attention.{name}_norm.weight" for name in "qk"}
    names["mlp.gate.weight"] = "moe.router.gate.weight"
    return Transform(
        [*_layers(names | _TITAN_NAMES), *_titan_experts([]), *_titan_ends(tied)],
        drop=_NO_WEIGHTS,
    )


def torchtitan_deepseek_v3(
    *,
    dtype: str | None = None,
    block: Sequence[int] = (128, 128),
    num_layers: int | None = None,
    num_mtp_layers: int = 0,
) -> Transform:
    """torchtitan's DeepSeek V3.

    Args:
        dtype: The checkpoint has fp8 weights with a scale per block (``weight_scale_inv``): what becomes of them.
            There is no way back then.
        num_layers: The layers of the model without those of its multi-token prediction; must be given with these.
        num_mtp_layers: The layers of its multi-token prediction, which the hub counts behind the others. Their own
            copies of the embedding and of the head are dropped.

    Raises:
        WrongValueError: Layers of multi-token prediction, and no ``num_layers``.
    """
    if num_mtp_layers and num_layers is None:
        raise WrongValueError(f"got num_mtp_layers={num_mtp_layers}, expected num_layers beside it", "num_layers")
    names = {
        "self_attn.kv_a_proj_with_mqa.weight": "attention.wkv_a.weight",
        "self_attn.kv_b_proj.weight": "attention.wkv_b.weight",
        "self_attn.q_a_proj.weight": "attention.wq_a.weight",
        "self_attn.q_b_proj.weight": "attention.wq_b.weight",
        "self_attn.q_proj.weight": "attention.wq.weight",
        "mlp.shared_experts.gate_proj.weight": "moe.shared_experts.w1.weight",
        "mlp.shared_experts.up_proj.weight": "moe.shared_experts.w3.weight",
        "mlp.shared_experts.down_proj.weight": "moe.shared_experts.w2.weight",
        **{name: target for name, target in _TITAN_NAMES.items() if "norm" not in name},
    }
    plain = {
        "self_attn.kv_a_layernorm.weight": "attention.kv_norm.weight",
        "self_attn.q_a_layernorm.weight": "attention.q_norm.weight",
        "mlp.gate.weight": "moe.router.gate.weight",
        "mlp.gate.e_score_correction_bias": "moe.expert_bias_E",
        **{name: target for name, target in _TITAN_NAMES.items() if "norm" in name},
    }
    scaled = [] if dtype is None else [dequantize(block, dtype=dtype)]
    if num_mtp_layers:
        plain |= {name: name for name in ("enorm.weight", "hnorm.weight", "eh_proj.weight")}
        plain["shared_head.norm.weight"] = "mtp_norm.weight"
    drop = (*_NO_WEIGHTS, *(_MTP_COPIES if num_mtp_layers else ()))
    rules = [*_layers(names, scaled), *_layers(plain), *_titan_experts(scaled), *_titan_ends(False)]
    transform = Transform(rules, drop=drop)
    if not num_mtp_layers or num_layers is None:
        return transform
    same = [*(rule.targets[0] for rule in _titan_ends(False)), *(f"layers.{layer}.**" for layer in range(num_layers))]
    mtp = [Rule(f"layers.{num_layers + layer}.**", f"mtp_layers.{layer}.**") for layer in range(num_mtp_layers)]
    return transform.then(Transform([*(Rule(name, name) for name in same), *mtp]))


def transformers_mixtral() -> Transform:
    """transformers' Mixtral, from version 5 on, which has its experts stacked, gate and up in one."""
    experts = "model.layers.*.block_sparse_moe.experts.#"
    return Transform(
        [
            Rule(
                [f"{experts}.w1.weight", f"{experts}.w3.weight"],
                "model.layers.*.mlp.experts.gate_up_proj",
                [stack(0), concat(1, parts=2)],
            ),
            Rule(f"{experts}.w2.weight", "model.layers.*.mlp.experts.down_proj", [stack(0)]),
            Rule("model.layers.*.block_sparse_moe.gate.weight", "model.layers.*.mlp.gate.weight"),
            *(
                Rule(f"model.layers.*.{name}.weight", f"model.layers.*.{name}.weight")
                for name in (
                    *(f"self_attn.{letter}_proj" for letter in "qkvo"),
                    "input_layernorm",
                    "post_attention_layernorm",
                )
            ),
            *(Rule(name, name) for name in _ENDS),
        ]
    )


def fused_projections(*, q_rows: int, kv_rows: int, bias: bool = False, heads_normed: bool = False) -> Transform:
    """Weights of transformers' Llama, Qwen 2 (``bias``) and Qwen 3 (``heads_normed``) as engines for serving have them.

    ``q_proj``, ``k_proj`` and ``v_proj`` become ``qkv_proj``; ``gate_proj`` and ``up_proj`` become ``gate_up_proj``.

    Args:
        q_rows, kv_rows: The rows of ``q_proj``, and of ``k_proj`` and ``v_proj``: heads times their size.
    """
    layer = "model.layers.*"
    fused = [concat(0, sizes=[q_rows, kv_rows, kv_rows])]
    kinds = ("weight", "bias") if bias else ("weight",)
    rules = [
        Rule([f"{layer}.self_attn.{name}_proj.{kind}" for name in "qkv"], f"{layer}.self_attn.qkv_proj.{kind}", fused)
        for kind in kinds
    ]
    rules.append(
        Rule(
            [f"{layer}.mlp.{name}_proj.weight" for name in ("gate", "up")],
            f"{layer}.mlp.gate_up_proj.weight",
            [concat(0, parts=2)],
        )
    )
    same = ["self_attn.o_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"]
    same += ["self_attn.q_norm", "self_attn.k_norm"] if heads_normed else []
    rules += [Rule(f"{layer}.{name}.weight", f"{layer}.{name}.weight") for name in same]
    return Transform([*rules, *(Rule(name, name) for name in _ENDS)], drop=_NO_WEIGHTS)


def transformers_gpt2(*, dim: int, below: str = "transformer.") -> Transform:
    """GPT-2 with weights that have a row per output, as all others: those of its ``Conv1D`` have a column.

    The projections of attention become ``q_proj``, ``k_proj`` and ``v_proj``.

    Args:
        dim: The size of its embedding.
        below: What the names begin with; the hub's oldest checkpoints have ``""``.
    """
    layer = f"{below}h.*"
    parts = [f"{layer}.attn.{name}_proj" for name in "qkv"]
    thirds = split(0, sizes=[dim, dim, dim])
    rules = [
        Rule(f"{layer}.attn.c_attn.weight", [f"{part}.weight" for part in parts], [transpose(0, 1), thirds]),
        Rule(f"{layer}.attn.c_attn.bias", [f"{part}.bias" for part in parts], [thirds]),
    ]
    for name in ("attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
        rules.append(Rule(f"{layer}.{name}.weight", f"{layer}.{name}.weight", [transpose(0, 1)]))
        rules.append(Rule(f"{layer}.{name}.bias", f"{layer}.{name}.bias"))
    same = [f"{layer}.{norm}.{kind}" for norm in ("ln_1", "ln_2") for kind in ("weight", "bias")]
    same += [f"{below}{name}" for name in ("wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias")]
    rules += [Rule(name, name) for name in (*same, "lm_head.weight")]
    return Transform(rules, drop=[f"{layer}.attn.bias", f"{layer}.attn.masked_bias"])


_ENDS = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")


def _layers(names: Mapping[str, str], scaled: Sequence[Step] = ()) -> list[Rule]:
    rules = []
    for name, target in names.items():
        source = f"model.layers.*.{name}"
        rules.append(Rule([source, f"{source}_scale_inv"] if scaled else source, f"layers.*.{target}", scaled))
    return rules


def _titan_experts(scaled: Sequence[Step]) -> list[Rule]:
    rules = []
    for name, target in _TITAN_EXPERTS.items():
        source = f"model.layers.*.mlp.experts.#.{name}.weight"
        sources = [source, f"{source}_scale_inv"] if scaled else [source]
        to = f"layers.*.moe.routed_experts.inner_experts.{target}"
        rules.append(Rule(sources, to, [*scaled, stack(0)]))
    return rules


def _titan_ends(tied: bool) -> list[Rule]:
    embedding = "model.embed_tokens.weight"
    rules = [Rule(embedding, "tok_embeddings.weight"), Rule("model.norm.weight", "norm.weight")]
    return [*rules, Rule(embedding if tied else "lm_head.weight", "lm_head.weight")]
