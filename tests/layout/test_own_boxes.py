"""Tensors whose attributes say which boxes they hold: what is read of them, what is refused, and through planners."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from boxed_tensors import CASES, boxed, cut, states_of, whole_of
from reference import same_bits
from simulated_ranks import load, save, shards
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.two_tensor import TwoTensor

import torchtitan_ext as tte
from torchtitan_ext.checkpoint.staging.stager import CpuStager
from torchtitan_ext.checkpoint.tables import key_table
from torchtitan_ext.errors import LayoutError, ReshardError
from torchtitan_ext.layout.layout import Chunk
from torchtitan_ext.layout.own_boxes import has_own_boxes, own_boxes

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.int64]


def plain_state(whole: torch.Tensor) -> dict[str, Any]:
    return {"w": torch.empty_like(whole)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_every_box_is_written_once_and_read_by_any_layout(case: str, dtype: torch.dtype) -> None:
    whole, states = states_of(case, dtype)
    saved = save(states)
    entry = saved.metadata.state_dict_metadata["w"]
    assert entry.size == whole.shape and entry.properties.dtype == dtype
    boxes = {box for held in CASES[case][1] for box in held if torch.Size(box[1]).numel() > 0 or whole.numel() == 0}
    assert {(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks} == boxes
    assert len(saved.values) == len(boxes)
    plain = plain_state(whole)
    load(saved, [plain])
    assert same_bits(plain["w"], whole)
    for dim in range(whole.dim()):
        targets = shards(torch.empty_like(whole), (3,), Shard(dim))
        load(saved, targets)
        wanted = shards(whole, (3,), Shard(dim))
        for target, other in zip(targets, wanted, strict=True):
            assert same_bits(target["w"].to_local(), other["w"].to_local())


@pytest.mark.parametrize("case", CASES)
def test_boxes_are_filled_and_padding_stays(case: str) -> None:
    whole, wanted = states_of(case)
    sources = [[{"w": whole}], states_of(case)[1]]
    sources += [shards(whole, (3,), Shard(0))] if whole.dim() else []
    for source in sources:
        targets = [{"w": cut(torch.zeros_like(whole), boxes)} for boxes in CASES[case][1]]
        load(save(source), targets)
        for target, other in zip(targets, wanted, strict=True):
            assert same_bits(target["w"].detach(), other["w"].detach())


def test_meta_targets_get_memory_and_keep_their_boxes() -> None:
    whole, states = states_of("several boxes")
    saved = save(states)
    targets = [{"w": cut(whole, boxes)} for boxes in CASES["several boxes"][1]]
    for target in targets:
        meta = target["w"].to("meta")
        target["w"] = boxed(
            meta, whole.shape, [(box.offsets, box.local_offsets, box.sizes) for box in own_boxes(target["w"])[1]]
        )
    load(saved, targets)
    assert all(target["w"].device.type == "cpu" and has_own_boxes(target["w"]) for target in targets)
    again = plain_state(whole)
    load(save(targets), [again])
    assert same_bits(again["w"], whole)


def test_meta_tensors_are_not_saved() -> None:
    meta = boxed(torch.empty(4, device="meta"), (4,), [((0,), (0,), (4,))])
    with pytest.raises(LayoutError, match="w: is on the meta device and holds no data"):
        save([{"w": meta}])


def test_a_load_may_want_a_part_only() -> None:
    whole = whole_of((8,))
    target = {"w": cut(torch.zeros(8), [((4,), (2,)), ((4,), (3,))])}
    load(save([{"w": whole}]), [target])
    assert same_bits(target["w"].detach(), cut(whole, [((4,), (2,)), ((4,), (3,))]).detach())


def test_boxes_without_elements_are_left_out() -> None:
    tensor = boxed(torch.zeros(2), (4,), [((1,), (0,), (0,)), ((2,), (0,), (2,)), ((4,), (2,), (0,))])
    assert own_boxes(tensor) == ((4,), [Chunk((2,), (2,), (0,))])


def test_views_keep_their_strides_and_their_bits() -> None:
    whole = (torch.arange(12) * (1 + 2j)).view(3, 4)
    local = torch.zeros(8, 4, dtype=torch.complex64)[1::2].conj()
    local[:3].copy_(whole)
    saved = save([{"w": boxed(local, (3, 4), [((0, 0), (0, 0), (3, 4))])}])
    assert torch.equal(saved.values[MetadataIndex("w", (0, 0), 0)], whole)
    target = torch.zeros(4, 6)[:, 1:5].t()
    load(save([{"w": whole.real.contiguous().t()}]), [{"w": boxed(target, (4, 3), [((0, 0), (0, 1), (4, 3))])}])
    assert torch.equal(target[:, 1:], whole.real.t()) and not target[:, 0].any()


def test_tied_tensors_and_one_memory_with_two_descriptions() -> None:
    memory = torch.arange(8.0)
    first = boxed(memory[:], (4,), [((0,), (0,), (4,))])
    second = boxed(memory[:], (4,), [((0,), (4,), (4,))])
    state = {"a": first, "tied": first, "b": second, "plain": memory}
    for source in (state, CpuStager().stage(state)):
        targets = {"a": torch.zeros(4), "tied": torch.zeros(4), "b": torch.zeros(4), "plain": torch.zeros(8)}
        load(save([source]), [targets])
        assert torch.equal(targets["a"], memory[:4]) and torch.equal(targets["tied"], memory[:4])
        assert torch.equal(targets["b"], memory[4:]) and torch.equal(targets["plain"], memory)


def test_staged_copies_keep_their_boxes() -> None:
    whole, states = states_of("several boxes", torch.bfloat16)
    staged = [CpuStager().stage({"nested": [state["w"]], "pair": (state["w"], 1)}) for state in states]
    for state, copy in zip(states, staged, strict=True):
        assert copy["nested"][0] is copy["pair"][0] and has_own_boxes(copy["nested"][0])
        assert same_bits(copy["nested"][0].detach(), state["w"].detach())
        state["w"].zero_()
    target = {"nested": [torch.empty_like(whole)], "pair": (torch.empty_like(whole), 0)}
    load(save(staged), [target])
    assert same_bits(target["nested"][0], whole) and same_bits(target["pair"][0], whole)


@pytest.mark.parametrize("missing", ["global_shape", "global_offsets", "local_offsets", "local_sizes"])
def test_a_tensor_with_some_of_the_attributes_is_a_plain_one(missing: str) -> None:
    tensor = boxed(torch.arange(4.0), (8,), [((0,), (0,), (4,))])
    delattr(tensor, missing)
    assert not has_own_boxes(tensor)
    assert save([{"w": tensor}]).metadata.state_dict_metadata["w"].size == (4,)


def test_other_descriptions_come_first() -> None:
    (state,) = shards(torch.arange(4.0), (1,), Shard(0))
    boxed(state["w"], (8,), [((0,), (0,), (4,))])
    assert isinstance(state["w"], DTensor) and not has_own_boxes(state["w"])
    no_tensor = SimpleNamespace(**vars(boxed(torch.zeros(1), (1,), [])))
    assert not has_own_boxes(no_tensor)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "lengths": (
        {"local_sizes": ()},
        "global_offsets has 1, local_offsets has 1, local_sizes has 0; each needs one entry",
    ),
    "outside": (
        {"global_offsets": ((5,),)},
        r"box at global_offsets \(5,\) of local_sizes \(4,\) is not inside global_shape \(8,\)",
    ),
    "negative": ({"global_offsets": ((-1,),)}, r"box at global_offsets \(-1,\) .* is not inside global_shape"),
    "outside the local tensor": (
        {"local_offsets": ((3,),)},
        r"local_offsets \(3,\) .* its local tensor of shape \(6,\)",
    ),
    "dims of a box": (
        {"local_sizes": ((4, 1),)},
        r"box at global_offsets \(0,\) of local_sizes \(4, 1\) is not inside",
    ),
    "dims of the shape": ({"global_shape": (8, 1)}, r"global_shape is \(8, 1\), its local tensor has shape \(6,\)"),
    "no numbers": ({"global_shape": None}, "global_shape is None, expected a tuple of ints"),
    "one box without its tuple": ({"local_offsets": (1,)}, r"local_offsets\[0\] is 1, expected a tuple of ints"),
    "no list": ({"global_offsets": 3}, "global_offsets is 3, expected one tuple of ints per box"),
}


@pytest.mark.parametrize("case", WRONG)
def test_attributes_that_make_no_sense_are_refused(case: str) -> None:
    attributes, message = WRONG[case]
    tensor = boxed(torch.zeros(6), (8,), [((0,), (1,), (4,))])
    for name, value in attributes.items():
        setattr(tensor, name, value)
    saved = save([{"w": torch.zeros(8)}])
    for refused in (
        lambda: save([{"w": tensor}, {"w": cut(torch.zeros(8), [((4,), (4,))])}]),
        lambda: load(saved, [{"w": tensor}]),
        lambda: tte.full_tensor(tensor),
        lambda: tte.fingerprint({"w": tensor}),
    ):
        with pytest.raises(
            LayoutError, match=f"describes its own boxes, and on this rank these make no sense: .*{message}"
        ):
            refused()


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        (
            [[((0,), (4,))], [((3,), (5,))]],
            r"w: overlap in shape \(8,\): element \(3,\) .*\(0,\)\+\(4,\) of rank 0; .* of rank 1",
        ),
        ([[((0,), (4,))], [((5,), (3,))]], r"w: gap in shape \(8,\): element \(4,\) is held by no rank"),
        ([[((0,), (4,)), ((2,), (6,))], []], r"w: overlap in shape \(8,\): element \(2,\)"),
    ],
)
def test_boxes_that_are_no_exact_cover_are_refused(boxes: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        save([{"w": cut(torch.zeros(8), held)} for held in boxes])


def test_ranks_that_disagree_are_refused() -> None:
    with pytest.raises(
        tte.errors.ReplicaMismatchError, match="rank 0 has a tensor that describes itself, rank 1 has a tensor"
    ):
        save([states_of("halves")[1][0], {"w": torch.zeros(8)}])
    with pytest.raises(
        ReshardError, match=r"Size mismatch between saved torch.Size\(\[4\]\) and current: torch.Size\(\[8\]\)"
    ):
        load(save([{"w": torch.zeros(4)}]), states_of("halves")[1])


def test_memory_that_has_no_boxes_is_refused() -> None:
    sparse = boxed(torch.zeros(4).to_sparse(), (4,), [((0,), (0,), (4,))])
    wrapper = boxed(TwoTensor(torch.zeros(4), torch.zeros(4)), (4,), [((0,), (0,), (4,))])
    with pytest.raises(LayoutError, match="w: is torch.sparse_coo; convert it with .to_dense"):
        save([{"w": sparse}])
    with pytest.raises(LayoutError, match="w: its local tensor is a TwoTensor, which is not one block of memory"):
        save([{"w": wrapper}])
    overlapping = boxed(torch.zeros(1).expand(4), (4,), [((0,), (0,), (4,))])
    with pytest.raises(LayoutError, match="w: cannot be filled: several elements of the target share memory"):
        load(save([{"w": torch.zeros(4)}]), [{"w": overlapping}])


def test_fingerprints_and_full_tensors_of_one_process() -> None:
    for case in CASES:
        whole, _ = states_of(case, torch.bfloat16)
        every = list(dict.fromkeys(box for held in CASES[case][1] for box in held))
        tensor = cut(whole, every)
        assert tte.fingerprint({"w": tensor}) == tte.fingerprint({"w": whole})
        assert same_bits(tte.full_tensor(tensor), whole)


def test_a_dry_run_says_that_it_does_not_know_the_boxes_of_other_ranks() -> None:
    whole, (state, _) = states_of("halves")
    report = tte.dry_run({**state, "other": whole}, mesh={"dp": 2})
    (problem,) = report.problems
    assert str(problem) == (
        "w: describes its own boxes, and nothing tells those of other ranks; leave it out of the dry run"
    )


def test_what_only_a_later_torch_takes_for_shards_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = key_table.create_chunk_list

    def later(tensor: Any) -> Any:
        return stock(tensor[:1]) if hasattr(tensor, "newly_described") else stock(tensor)

    monkeypatch.setattr(key_table, "create_chunk_list", later)
    tensor: Any = torch.zeros(4)
    tensor.other_attribute = 1
    save([{"w": tensor}])
    tensor.newly_described = 1
    with pytest.raises(
        LayoutError, match=r"w: torch .* takes it for shards, of which this rank holds \(0,\)\+\(1,\), by a"
    ):
        save([{"w": tensor}])
