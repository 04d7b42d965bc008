"""What a transform says: JSON, the way back, and refusals that name keys and boxes before anything is read."""

import json
from pathlib import Path

import pytest

from torchtitan_ext import _core, transforms
from torchtitan_ext.errors import WrongValueError
from torchtitan_ext.transforms import Rule, Transform, ready, ready_models

Sources = list[tuple[str, str, tuple[int, ...]]]

ATTENTION: Sources = [
    (f"model.layers.{layer}.self_attn.{name}.weight", "float32", (rows, 6))
    for layer in range(3)
    for name, rows in (("q_proj", 8), ("k_proj", 4), ("v_proj", 4))
]
FUSED = Transform(
    [
        Rule(
            [f"model.layers.*.self_attn.{name}_proj.weight" for name in "qkv"],
            "layers.*.attention.wqkv.weight",
            [transforms.concat(0, sizes=[8, 4, 4])],
        )
    ]
)
EXPERTS: Sources = [
    (f"layers.{layer}.experts.{expert}.{name}.weight", "bfloat16", (5, 3))
    for layer in range(2)
    for expert in range(12)
    for name in ("w1", "w3")
]
GROUPED = Transform(
    [
        Rule(
            ["layers.*.experts.#.w1.weight", "layers.*.experts.#.w3.weight"],
            "layers.*.moe.w13",
            [transforms.stack(0), transforms.transpose(1, 2), transforms.concat(2, parts=2)],
        )
    ]
)


def problems_of(transform: Transform, sources: Sources) -> list[tuple[str, str]]:
    return _core.resolve_transform(transform.encoded(), sources).problems


def targets_of(transform: Transform, sources: Sources) -> dict[str, _core.MappedTensor]:
    resolved = _core.resolve_transform(transform.encoded(), sources)
    assert resolved.problems == []
    return {target.name: target for target in resolved.targets}


def test_a_rule_is_followed_for_each_layer() -> None:
    targets = targets_of(FUSED, ATTENTION)
    assert list(targets) == [f"layers.{layer}.attention.wqkv.weight" for layer in range(3)]
    assert {(tuple(one.values.shape), tuple(one.dtypes)) for one in targets.values()} == {((16, 6), ("float32",))}


def test_a_series_goes_by_number() -> None:
    target = targets_of(GROUPED, EXPERTS)["layers.1.moe.w13"]
    assert target.values.shape == (12, 3, 10)
    names = [name for name, _, _ in EXPERTS]
    source, position = target.values.enumerate()[(10 * 3 + 2) * 10 + 6]  # expert 10, column 2, row 1 of w3
    assert (names[source], position) == ("layers.1.experts.10.w3.weight", 1 * 3 + 2)


@pytest.mark.parametrize(("transform", "sources"), [(FUSED, ATTENTION), (GROUPED, EXPERTS)])
def test_there_and_back_is_where_one_was(transform: Transform, sources: Sources) -> None:
    both = transform.then(transform.inverse())
    targets = targets_of(Transform.from_json(both.to_json()), sources)
    assert list(targets) != [] and targets.keys() == {name for name, _, _ in sources}
    for number, (name, dtype, shape) in enumerate(sources):
        target = targets[name]
        assert (tuple(target.values.shape), target.dtypes) == (shape, [dtype])
        assert target.values.enumerate() == [(number, position) for position in range(shape[0] * shape[1])]
        assert target.values.num_pieces == 1


def test_a_pad_and_a_crop_lead_there_and_back() -> None:
    wide = Transform([Rule("w", "v", [transforms.pad(-1, 8, value=2, was=5)])])
    sources: Sources = [("w", "float32", (3, 5))]
    assert targets_of(wide, sources)["v"].values.shape == (3, 8)
    assert wide.inverse().inverse().to_json() == Transform([Rule("w", "v", [transforms.pad(-1, 8, was=5)])]).to_json()
    both = targets_of(wide.then(wide.inverse()), sources)["w"].values
    assert both.source_in_place() == 0 and not both.has_fills
    cropped = Transform([Rule("w", "v", [transforms.crop(0, 2)])])
    assert targets_of(cropped, sources)["v"].values.shape == (2, 5), "what is cut off needs no drop"
    only = Transform([Rule("w", "v", [transforms.pad(1, 6), transforms.slice_dim(1, 5, 6)])], drop=["w"])
    assert targets_of(only, sources)["v"].values.sources == []
    with pytest.raises(WrongValueError, match="value of the step pad, expected a number"):
        transforms.pad(0, 3, value="x")  # type: ignore[arg-type]


def test_json_says_the_same_transform() -> None:
    transform = FUSED.then(Transform([Rule("layers.**", "**")], drop=["other.*"]))
    again = Transform.from_json(transform.to_json())
    assert (again, repr(again)) == (transform, repr(transform)) and again != FUSED
    short = '{"rules": [{"from": "a.*", "to": "b.*", "steps": [{"op": "transpose", "dims": [0, 1]}]}], "drop": ["c"]}'
    expected = Transform([Rule("a.*", "b.*", [transforms.transpose(0, 1)])], drop=["c"])
    assert Transform.from_json(short) == expected


def test_names_below_a_key() -> None:
    sources = [(f"hf.{name}", dtype, shape) for name, dtype, shape in ATTENTION]
    assert "model.layers.2.attention.wqkv.weight" in targets_of(FUSED.below(source="hf", target="model"), sources)


def test_values_that_are_no_tensors_are_passed_on() -> None:
    transform = Transform([Rule("w", "v"), Rule("extra.**", "old.**")])
    targets = targets_of(transform, [("w", "float32", (2,)), ("extra.step.0", "", ())])
    assert targets["old.step.0"].dtypes == [] and targets["old.step.0"].value == 1
    cut = Transform([Rule("w", "w"), Rule("extra.**", "old.**", [transforms.transpose(0, 0)])])
    ((key, detail),) = problems_of(cut, [("w", "float32", (2,)), ("extra.step", "", ())])
    assert key == "old.step" and "extra.step: it is no tensor, and can only be renamed" in detail


def test_rules_that_take_nothing_are_named() -> None:
    misspelt = Transform([Rule("wieght", "w"), Rule("bias", "b")])
    first, second = problems_of(misspelt, [(name, "float32", (2,)) for name in ("weight", "bias", "step")])
    told = "no rule takes it; give it a rule, or name it in drop"
    assert (first, second) == (("weight", f"{told}; the rule from 'wieght' takes nothing"), ("step", told))


def test_a_forgotten_layer_is_named() -> None:
    (problem,) = problems_of(FUSED, [*ATTENTION, ("model.layers.3.mlp.weight", "float32", (2,))])
    assert problem == ("model.layers.3.mlp.weight", "no rule takes it; give it a rule, or name it in drop")
    lacking = [one for one in ATTENTION if one[0] != "model.layers.1.self_attn.k_proj.weight"]
    ((key, detail),) = problems_of(FUSED, lacking)
    assert key == "layers.1.attention.wqkv.weight" and detail.startswith("model.layers.1.self_attn.k_proj.weight: ")


def test_a_lost_expert_is_named() -> None:
    lacking = [one for one in EXPERTS if one[0] != "layers.0.experts.7.w3.weight"]
    ((key, detail),) = problems_of(GROUPED, lacking)
    assert key == "layers.0.moe.w13" and detail.startswith("layers.0.experts.7.w3.weight: ")
    lacking = [one for one in EXPERTS if one[0] != "layers.0.experts.11.w3.weight"]
    ((key, detail),) = problems_of(GROUPED, lacking)
    assert key == "layers.0.moe.w13" and "differ in other dims" in detail


def test_a_target_that_two_rules_fill_is_named() -> None:
    twice = Transform([Rule("a", "w"), Rule("b", "w")])
    (problem,) = problems_of(twice, [("a", "float32", (2,)), ("b", "float32", (2,))])
    assert problem == ("w", "several rules fill it; leave one of them")


def test_a_tensor_between_two_stages_that_two_rules_fill_is_named() -> None:
    twice = Transform([Rule("a", "w"), Rule("b", "w"), Rule("a", "v")]).then(Transform([Rule("*", "*")]))
    (problem,) = problems_of(twice, [("a", "float32", (2,)), ("b", "float32", (2,))])
    assert problem == ("w", "several rules fill it; leave one of them")


def test_a_tensor_that_a_later_stage_drops_excuses_no_other_elements_of_its_source() -> None:
    cut = Transform([Rule("w", ["a", "b"], [transforms.split(0, sizes=[1, 3])])])
    source: Sources = [("w", "float32", (4, 2))]
    assert problems_of(cut.then(Transform([Rule("b", "b")], drop=["a"])), source) == []
    rest = Transform([Rule("b", "b", [transforms.slice_dim(0, 0, 2)])], drop=["a"])
    (problem,) = problems_of(cut.then(rest), source)
    assert problem == ("w", "its element [3, 0] of shape [4, 2] goes nowhere; use it, or name the key in drop")
    scaled = Transform([Rule(["w", "s"], "w", [transforms.dequantize([2, 2], dtype="float32")])])
    dropped = scaled.then(Transform([], drop=["w"]))
    assert problems_of(dropped, [("w", "float8_e4m3fn", (4, 2)), ("s", "float32", (2, 1))]) == []


def test_a_wrong_split_is_named() -> None:
    rule = Rule("qkv.*", ["q.*", "kv.*"], [transforms.split(0, sizes=[8, 4])])
    ((key, detail),) = problems_of(Transform([rule]), [("qkv.0", "float32", (16, 2))])
    assert key == "q.0"
    assert detail == "step 1, split, of the rule from qkv.*: sizes: got [8, 4], 12 in all, for dim 0 of shape [16, 2]"
    uneven = Transform([Rule("qkv.*", ["q.*", "k.*", "v.*"], [transforms.split(0, parts=3)])])
    assert "cannot be cut into 3 equal parts" in problems_of(uneven, [("qkv.0", "float32", (16, 2))])[0][1]


@pytest.mark.parametrize("shape", [(0, 4), (2**40, 0)])
def test_cuts_into_more_tensors_than_can_be_are_refused(shape: tuple[int, ...]) -> None:
    """Where there are no elements, a dim can be cut into any number of parts: they must not fill the memory."""
    rule = Rule("w", ["a", "b"], [transforms.split(0, parts=2**40)])
    ((_, detail),) = problems_of(Transform([rule]), [("w", "float32", shape)])
    assert f"dim 0 of shape {list(shape)} would be cut into {2**40} tensors, expected at most 65536 in all" in detail
    twice = Rule("w", "a", [transforms.split(0, parts=2**10)] * 2)
    assert "would be cut into 1024 tensors" in problems_of(Transform([twice]), [("w", "float32", shape)])[0][1]
    if shape[0]:
        ((_, detail),) = problems_of(Transform([Rule("w", "a.#", [transforms.unstack(0)])]), [("w", "float32", shape)])
        assert f"would be cut into {2**40} tensors" in detail
    quarters = [transforms.split(0, parts=4), transforms.concat(0), transforms.split(0, parts=4)]
    thirds = Rule("w", ["a", "b", "c"], quarters)
    assert problems_of(Transform([thirds]), [("w", "float32", shape)])[0][1].endswith("4 tensors for 3 names, a, b, c")


def test_elements_that_go_nowhere_or_twice_to_one_place_are_named() -> None:
    source: Sources = [("w", "float32", (4, 2))]
    rule = Rule("w", "v", [transforms.slice_dim(0, 0, 3)])
    (problem,) = problems_of(Transform([rule]), source)
    assert problem == ("w", "its element [3, 0] of shape [4, 2] goes nowhere; use it, or name the key in drop")
    assert problems_of(Transform([rule], drop=["w"]), source) == []
    pair: Sources = [("a", "float32", (2, 2)), ("b", "float32", (2, 2))]
    overlapping = Transform([Rule(["a", "b"], "w", [transforms.place([3, 2], [[0, 0], [1, 0]])])])
    (problem,) = problems_of(overlapping, pair)
    assert problem == ("w", "is filled twice at element [1, 0] of its shape [3, 2], from a, b")
    gap = Transform([Rule(["a", "b"], "w", [transforms.place([5, 2], [[0, 0], [3, 0]])])])
    assert problems_of(gap, pair) == [("w", "nothing fills element [2, 0] of its shape [5, 2]")]


def test_layers_of_multi_token_prediction() -> None:
    hub = [f"model.layers.{layer}.input_layernorm.weight" for layer in range(12)]
    hub += ["model.layers.11.shared_head.norm.weight", "model.layers.11.embed_tokens.weight", "model.norm.weight"]
    transform = ready("torchtitan_deepseek_v3", mtp_layers=[11])
    titan = {*(f"layers.{layer}.attention_norm.weight" for layer in range(11)), "norm.weight"}
    titan |= {"mtp_layers.0.attention_norm.weight", "mtp_layers.0.mtp_norm.weight"}
    assert targets_of(transform, [(name, "bfloat16", (4,)) for name in hub]).keys() == titan


@pytest.mark.parametrize("model", ready_models())
def test_ready_transforms_need_their_parameters_and_no_others(model: str) -> None:
    sizes = {"num_heads": 4, "dim": 8, "q_rows": 8, "kv_rows": 4, "q_a_rows": 8, "kv_a_rows": 4}
    known = json.loads((Path(transforms.__file__).parent / "ready_models" / f"{model}.json").read_text())["parameters"]
    needed = {name: sizes[name] for name, default in known.items() if default is None}
    made = ready(model, **needed)
    assert Transform.from_json(made.to_json()) == made
    assert made.inverse().rules
    with pytest.raises(WrongValueError, match=f"{model} knows no nothing; its parameters are: {', '.join(known)}"):
        ready(model, **needed, nothing=1)
    for name in needed:
        with pytest.raises(WrongValueError, match=f"{model} lacks {name}"):
            ready(model, **{other: size for other, size in needed.items() if other != name})


def test_a_ready_transform_that_is_none() -> None:
    with pytest.raises(WrongValueError, match="got 'llama', expected one of .*torchtitan_llama3, .*transformers_gpt2"):
        ready("llama")


def test_names_alone_are_short_in_json() -> None:
    text = '{"rules": [{"rename": {"a.*": "b.*", "c": "d"}}, {"from": "e", "to": "f"}]}'
    assert Transform.from_json(text) == Transform([Rule("a.*", "b.*"), Rule("c", "d"), Rule("e", "f")])
    with pytest.raises(WrongValueError, match="got steps, expected rename"):
        Transform.from_json('{"rules": [{"rename": {}, "steps": []}]}')


def test_a_tied_tensor_may_go_to_several_targets() -> None:
    tied = Transform([Rule("embed", "tok_embeddings"), Rule("embed", "output", [transforms.transpose(0, 1)])])
    assert targets_of(tied, [("embed", "float32", (3, 2))]).keys() == {"tok_embeddings", "output"}


def test_dtypes_are_not_mixed() -> None:
    pair: Sources = [("a", "float32", (2,)), ("b", "bfloat16", (2,))]
    ((_, detail),) = problems_of(Transform([Rule(["a", "b"], "w", [transforms.concat(0)])]), pair)
    assert "got float32 of a and bfloat16 of b; cast them to one dtype first" in detail
    cast = Transform([Rule("a", "x", [transforms.cast("bfloat16")]), Rule("b", "y", [transforms.cast("bfloat16")])])
    assert [one.dtypes for one in targets_of(cast, pair).values()] == [["float32", "bfloat16"], ["bfloat16"]]


def test_scales_must_be_those_of_the_blocks() -> None:
    rule = Rule(["w", "s"], "t", [transforms.dequantize([128, 128], dtype="bfloat16")])
    ((_, detail),) = problems_of(Transform([rule]), [("w", "float8_e4m3fn", (300, 100)), ("s", "float32", (2, 1))])
    assert "scales of shape [2, 1] are not those of blocks [128, 128] of a tensor of shape [300, 100]" in detail
    scaled = Transform([Rule(["w", "s"], "t", [transforms.dequantize([2, 2], dtype="float32")])])
    values: Sources = [("w", "float8_e4m3fn", (4, 2)), ("s", "float32", (1, 1))]
    gap = Transform([Rule("w", "w"), Rule("s", "s", [transforms.place([2, 1], [[0, 0]])])]).then(scaled)
    assert problems_of(gap, values) == [("t", "nothing fills element [2, 0] of its scales, for shape [4, 2]")]


@pytest.mark.parametrize(
    ("steps", "advice"),
    [
        ([transforms.slice_dim(0, 0, 1)], "slice has no inverse"),
        ([transforms.concat(0)], "concat has no inverse; give it sizes= or parts="),
        ([transforms.reshape([-1])], "reshape has no inverse; give it was="),
        ([transforms.cast("float32")], "cast has no inverse; give it was="),
        ([transforms.permute([0, 0])], "permute has no inverse"),
        ([transforms.dequantize([1], dtype="float32")], "dequantize has no inverse"),
    ],
)
def test_a_step_without_an_inverse_is_named(steps: list[transforms.Step], advice: str) -> None:
    with pytest.raises(WrongValueError, match=advice):
        Transform([Rule("a", "b", steps)]).inverse()


def test_dims_from_the_end_have_an_inverse() -> None:
    assert transforms.permute([-1, 0, -2]).inverse() == transforms.permute([1, 2, 0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "is no transform"),
        ('{"stages": []}', "has no stage"),
        ('{"stages": [{"rules": []}], "drop": ["a"]}', "got drop, expected stages"),
        ('{"rules": [{"from": "a"}]}', "is no transform"),
        ('{"rules": [{"from": "a.*", "to": "b"}]}', "several numbers of stars"),
        ('{"rules": [{"from": "a.#.#", "to": "b"}]}', "more than one '#'"),
        ('{"rules": [{"from": ["a", "b"], "to": "c"}]}', "no steps that join or split"),
        ('{"rules": [{"from": "a", "to": "b", "steps": [{"op": "rotate"}]}]}', "got the step 'rotate'"),
        ('{"rules": [{"from": "a", "to": "b", "steps": [{"op": "concat"}]}]}', "concat lacks dim"),
        ('{"rules": [{"from": "a", "to": "b", "steps": [{"op": "stack", "dim": 0, "x": 1}]}]}', "stack knows no x"),
        ('{"rules": [{"from": "a", "to": "b", "steps": [{"op": "stack", "dim": "0"}]}]}', "got '0' for dim"),
        ('{"rules": [{"from": "a", "to": "b", "steps": [{"op": "cast", "dtype": "bf16"}]}]}', "got 'bf16' for dtype"),
        ('{"rules": [{"from": "a", "to": "b", "steps": [{"op": "split", "dim": 0}]}]}', "either sizes or parts"),
        ('{"rules": [{"from": "a", "to": "b", "step": []}]}', "got step, expected from, to, steps"),
    ],
)
def test_a_text_that_is_no_transform_is_refused(text: str, message: str) -> None:
    with pytest.raises(WrongValueError, match=message):
        Transform.from_json(text)


@pytest.mark.parametrize(
    ("step", "detail"),
    [
        (transforms.permute([0, 0]), "a dim twice"),
        (transforms.permute([0]), "got [0] for a tensor of 2 dims"),
        (transforms.transpose(0, 2), "got 2 for a tensor of 2 dims"),
        (transforms.reshape([5, -1]), "got [5, -1] for 8 elements of shape [4, 2]"),
        (transforms.reshape([3, 3]), "got [3, 3] for 8 elements of shape [4, 2]"),
        (transforms.reshape([2**62, 4]), "overflows int64"),
        (transforms.slice_dim(1, 1, 3), "elements 1 to 3 of dim 1 do not lie in shape [4, 2]"),
        (transforms.unstack(0), "its steps leave 4 tensors for 1 names"),
        (transforms.place([3, 2], [[0, 0]]), "a box at [0, 0] of sizes [4, 2] does not lie in [3, 2]"),
        (transforms.concat(0, parts=2), "got 2 for 1 tensors"),
    ],
)
def test_a_step_that_does_not_fit_is_named(step: transforms.Step, detail: str) -> None:
    ((key, text),) = problems_of(Transform([Rule("w", "v", [step])]), [("w", "float32", (4, 2))])
    assert key == "v" and detail in text


def test_views_that_leave_no_rows_together_are_refused() -> None:
    first, second = 3001, 3011  # primes: no box of one shape is a box of the other
    scattered = [transforms.reshape([second, first]), transforms.transpose(0, 1)] * 3
    ((key, detail),) = problems_of(Transform([Rule("w", "v", scattered)]), [("w", "float32", (first, second))])
    assert key == "v" and "neither boxes nor rows of a tensor" in detail
    rows = targets_of(Transform([Rule("w", "v", scattered[:4])]), [("w", "float32", (first, second))])
    assert rows["v"].values.num_pieces < 3 * second
