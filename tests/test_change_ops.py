"""The operators of changes: against comparing byte by byte, under opcheck and torch.compile, and every refusal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_ops import RAW_OVERFLOW, RAW_REFUSAL
from test_ops import DEVICES, DTYPES, TWO_CHUNKS, WHOLE, bits, random_tensor, reference_pack, shards
from torch import Tensor

from torchtitan_ext import ops
from torchtitan_ext.layout.layout import Chunk, LocalShard

MASK = 2**64 - 1


def hash_word(word: int, position: int) -> int:
    """As ``csrc/core/element_hash.h`` defines it."""
    number = word ^ ((position + 1) * 0x9E3779B97F4A7C15 & MASK)
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & MASK
    number = (number ^ number >> 27) * 0x94D049BB133111EB & MASK
    return number ^ number >> 31


def hash_element(value: bytes, position: int) -> int:
    if len(value) < 16:
        return hash_word(int.from_bytes(value, "little"), position)
    low, high = (int.from_bytes(part, "little") for part in (value[:8], value[8:]))
    return (hash_word(low, 2 * position) + hash_word(high, 2 * position + 1)) & MASK


def items(tensor: Tensor) -> list[bytes]:
    """The bits of each element in row-major order."""
    flat = bytes(bits(tensor.cpu()).tolist())
    size = tensor.element_size()
    return [flat[at : at + size] for at in range(0, len(flat), size)]


def positions_of(shard: LocalShard, sizes: Sequence[int]) -> list[int]:
    """Of each element of the local tensor in the global one."""
    places = torch.arange(torch.Size(sizes).numel()).view(tuple(sizes))
    return [int(place) for place in reference_pack(places, shard).reshape(-1)]


class Changes(NamedTuple):
    positions: Tensor
    values: Tensor
    counts: list[int]
    sums: Tensor


def found_changes(
    new: list[Tensor], base: list[Tensor], of: list[LocalShard], sizes: list[Any], leave_out: Sequence[int] = ()
) -> Changes:
    mask, marked = ops.mark_changes(new, base)
    counts = [0 if index in leave_out else count for index, count in enumerate(marked.tolist())]
    num_bytes = ops.change_offsets([tensor.element_size() for tensor in new], counts)[-1]
    positions = torch.full((sum(counts),), -1, dtype=torch.int64, device=mask.device)
    values = torch.full((num_bytes,), 7, dtype=torch.uint8, device=mask.device)
    sums = ops.changed_elements_(new, base, of, sizes, mask, counts, positions, values)
    return Changes(positions, values, counts, sums)


def check_changes(
    changes: Changes, new: list[Tensor], base: list[Tensor], of: list[LocalShard], sizes: list[Any]
) -> None:
    """Against comparing element by element; tensors of count 0 may have been left out."""
    starts = ops.change_offsets([tensor.element_size() for tensor in new], changes.counts)
    values = bytes(changes.values.tolist())
    at = 0
    for index, (left, right) in enumerate(zip(new, base, strict=True)):
        count = changes.counts[index]
        places = positions_of(of[index], sizes[index])
        differing = [
            (place, now, before)
            for place, now, before in zip(places, items(left), items(right), strict=True)
            if now != before and count > 0
        ]
        differing.sort()
        assert changes.positions[at : at + count].tolist() == [place for place, _, _ in differing]
        size, start = left.element_size(), starts[index]
        assert values[start : start + size * count] == b"".join(now for _, now, _ in differing)
        for row, column in ((0, 2), (1, 1)):
            total = sum(hash_element(each[column], each[0]) for each in differing) & MASK  # type: ignore[arg-type]
            assert int(changes.sums[row, index]) & MASK == total
        at += count


def some_bits_flipped(tensor: Tensor, share: float) -> Tensor:
    """A copy, contiguous, of which about this share of the elements differs, each in one byte."""
    copy = tensor.clone(memory_format=torch.contiguous_format)
    flat = copy.view(-1).view(torch.uint8).view(tensor.numel(), tensor.element_size())
    rows = torch.rand(tensor.numel()) < share
    columns = torch.randint(0, flat.shape[1], (tensor.numel(),))
    flat[rows.to(flat.device), columns[rows].to(flat.device)] ^= 1
    return copy


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e8m0fnu], ids=str)
def test_every_dtype(dtype: torch.dtype, device: str) -> None:
    whole = LocalShard((1000,), (Chunk((0,), (1000,), (0,)),))
    base = [
        random_tensor((3, 2), dtype, device),
        random_tensor((1000,), dtype, device),
        random_tensor((), dtype, device),
    ]
    new = [some_bits_flipped(base[0], 0.5), some_bits_flipped(base[1], 0.1), base[2].clone()]
    of, sizes = [TWO_CHUNKS, whole, LocalShard((), (Chunk((), (), ()),))], [(6, 8), (1000,), ()]
    mask, counts = ops.mark_changes(new, base)
    assert mask.dtype == counts.dtype == torch.int64 and mask.device == counts.device == new[0].device
    starts = ops.mask_words(new)
    assert starts == [0, 1, 17, 18] and mask.shape == (18,)
    for index, (left, right) in enumerate(zip(new, base, strict=True)):
        words = [word & MASK for word in mask[starts[index] : starts[index + 1]].tolist()]
        differs = [one != other for one, other in zip(items(left), items(right), strict=True)]
        assert [bool(words[at // 64] >> at % 64 & 1) for at in range(64 * len(words))] == (
            differs + [False] * (64 * len(words) - len(differs))
        )
        assert int(counts[index]) == sum(differs)
    changes = found_changes(new, base, of, sizes)
    check_changes(changes, new, base, of, sizes)

    target = [tensor.clone() for tensor in base]
    found, held = ops.sum_elements(target, of, sizes, changes.positions, changes.counts)
    assert torch.equal(found, changes.sums[0]) and held.tolist() == changes.counts
    versions = [tensor._version for tensor in target]
    ops.apply_changes_(target, of, sizes, changes.positions, changes.values, changes.counts)
    assert [tensor._version for tensor in target] == [version + 1 for version in versions]
    assert all(torch.equal(bits(left), bits(right)) for left, right in zip(target, new, strict=True))
    assert torch.equal(ops.sum_elements(target, of, sizes, changes.positions, changes.counts)[0], changes.sums[1])


@settings(deadline=None)
@given(
    shards(),
    shards(),
    st.sampled_from([torch.int16, torch.float32, torch.complex128, torch.uint8, torch.bool, torch.float64]),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    st.randoms(),
)
def test_changes_of_shards_match_indexing(
    case: tuple[tuple[int, ...], LocalShard],
    other: tuple[tuple[int, ...], LocalShard],
    dtype: torch.dtype,
    share: float,
    random: Any,
) -> None:
    of, sizes = [case[1], other[1], case[1]], [case[0], other[0], case[0]]
    new, base = [], []
    for shard in of:
        tensor = random_tensor(shard.sizes, dtype)
        base.append(tensor)
        new.append(some_bits_flipped(tensor, share))
        for versions in (new, base):
            order = list(range(len(shard.sizes)))
            random.shuffle(order)
            inverse = [order.index(dim) for dim in range(len(order))]
            versions[-1] = versions[-1].permute(order).contiguous().permute(inverse)
    leave_out = [1] if random.random() < 0.3 else []
    changes = found_changes(new, base, of, sizes, leave_out)
    check_changes(changes, new, base, of, sizes)
    at_once = ops.find_changes(new, base, of, sizes, [0 if index in leave_out else 2**40 for index in range(3)])
    kept = [0 if index in leave_out else count for index, count in enumerate(at_once[2].tolist())]
    assert kept == changes.counts
    check_changes(Changes(*at_once[:2], kept, at_once[3]), new, base, of, sizes)
    before = [ops.fingerprint_shard(*each) for each in zip(base, of, sizes, strict=True)]
    after = [ops.fingerprint_shard(*each) for each in zip(new, of, sizes, strict=True)]
    for index in (0, 2):
        assert torch.equal(before[index] - changes.sums[0, index] + changes.sums[1, index], after[index])

    # Onto the whole tensors and onto other shards of the same tensors.
    wholes = [random_tensor(size, dtype) for size in sizes]
    shard_of_whole = [LocalShard(size, (Chunk((0,) * len(size), size, (0,) * len(size)),)) for size in sizes]
    before_changes = [tensor.clone() for tensor in wholes]
    expected = [tensor.clone() for tensor in wholes]
    for index, shard in enumerate(of):
        if index in leave_out:
            continue
        places = torch.tensor(positions_of(shard, sizes[index]), dtype=torch.int64)
        differs = torch.tensor(
            [one != two for one, two in zip(items(new[index]), items(base[index]), strict=True)], dtype=torch.bool
        )
        expected[index].view(-1)[places[differs]] = new[index].reshape(-1)[differs]
    ops.apply_changes_(wholes, shard_of_whole, sizes, changes.positions, changes.values, changes.counts)
    assert all(torch.equal(bits(one), bits(two)) for one, two in zip(wholes, expected, strict=True))
    _, found = ops.sum_elements(wholes, shard_of_whole, sizes, changes.positions, changes.counts)
    assert found.tolist() == changes.counts

    # Onto the last part of each dim.
    last = [tuple(length // 2 for length in size) for size in sizes]
    rest = [tuple(length - length // 2 for length in size) for size in sizes]
    parts = [
        LocalShard(of_rest, (Chunk(begin, of_rest, (0,) * len(begin)),))
        for begin, of_rest in zip(last, rest, strict=True)
    ]
    stale = [ops.pack_shard(tensor, part) for tensor, part in zip(before_changes, parts, strict=True)]
    ops.apply_changes_(stale, parts, sizes, changes.positions, changes.values, changes.counts)
    for tensor, whole, part in zip(stale, expected, parts, strict=True):
        assert torch.equal(bits(tensor), bits(ops.pack_shard(whole, part)))


GRID = [(row, column) for row in range(2) for column in range(3)]


def interleaved(sizes: tuple[int, int], order: Sequence[int]) -> LocalShard:
    """Boxes of 2 x 3 side by side, in another order than in the global tensor."""
    chunks = []
    for place, source in enumerate(order):
        row, column = GRID[source]
        here_row, here_column = GRID[place]
        chunks.append(Chunk((2 * row, 5 * column), (2, 3), (2 * here_row, 3 * here_column)))
    return LocalShard(sizes, tuple(chunks))


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5), (5, 3, 1, 0, 2, 4), (2, 1, 0, 5, 4, 3)], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_chunks_side_by_side_are_listed_in_the_order_of_the_global_tensor(order: tuple[int, ...], device: str) -> None:
    shard = interleaved((4, 9), order)
    base = random_tensor((4, 9), torch.bfloat16, device)
    for share in (0.3, 1.0):
        new = some_bits_flipped(base, share)
        changes = found_changes([new], [base], [shard], [(4, 20)])
        check_changes(changes, [new], [base], [shard], [(4, 20)])
        target = base.clone()
        ops.apply_changes_([target], [shard], [(4, 20)], changes.positions, changes.values, changes.counts)
        assert torch.equal(bits(target), bits(new))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.complex128], ids=str)
@pytest.mark.parametrize("columns", [1, 5, 64, 1000])
@pytest.mark.parametrize("device", DEVICES)
def test_many_elements(dtype: torch.dtype, columns: int, device: str) -> None:
    """On several threads, and in many tiles of a kernel."""
    rows = 400_000 // columns
    shape = (rows, 2 * columns)
    whole = LocalShard(shape, (Chunk((0, 0), shape, (0, 0)),))
    half = LocalShard((rows, columns), (Chunk((0, columns), (rows, columns), (0, 0)),))
    base = random_tensor(shape, dtype, device)
    new = some_bits_flipped(base, 0.05)
    changes = found_changes([new, new[:, columns:]], [base, base[:, columns:]], [whole, half], [shape, shape])
    at_once = ops.find_changes([new, base], [base, new], [whole, whole], [shape, shape], [changes.counts[0], 9])
    assert at_once[2].tolist() == [changes.counts[0]] * 2 and at_once[0].numel() == changes.counts[0]
    assert torch.equal(at_once[0], changes.positions[: changes.counts[0]])
    assert torch.equal(at_once[3][:, 0], changes.sums[:, 0]) and not at_once[3][:, 1].any()
    assert torch.equal(
        at_once[1][: changes.counts[0] * dtype.itemsize],
        changes.values[: at_once[1].numel()][: changes.counts[0] * dtype.itemsize],
    )
    differs = (bits(new).view(-1, dtype.itemsize) != bits(base).view(-1, dtype.itemsize)).any(1)
    expected = differs.nonzero().view(-1)
    assert torch.equal(changes.positions[: changes.counts[0]], expected)
    inside = expected[expected % (2 * columns) >= columns]
    assert torch.equal(changes.positions[changes.counts[0] :], inside)
    starts = ops.change_offsets([dtype.itemsize] * 2, changes.counts)
    values = bits(new).view(-1, dtype.itemsize)[inside].view(-1)
    assert torch.equal(changes.values[starts[1] :], values)
    before, after = (ops.fingerprint_shard(tensor, whole, shape) for tensor in (base, new))
    assert torch.equal(before - changes.sums[0, 0] + changes.sums[1, 0], after)

    target = [base.clone(), base[:, columns:].t().contiguous().t()]
    found, held = ops.sum_elements(target, [whole, half], [shape, shape], changes.positions, changes.counts)
    assert torch.equal(found, changes.sums[0]) and held.tolist() == changes.counts
    ops.apply_changes_(target, [whole, half], [shape, shape], changes.positions, changes.values, changes.counts)
    assert torch.equal(bits(target[0]), bits(new)) and torch.equal(bits(target[1]), bits(new[:, columns:]))


def test_nothing_changed_and_no_tensors() -> None:
    tensor = torch.tensor([0.0, float("nan"), 1.0])
    changes = found_changes([tensor], [tensor.clone()], [LocalShard((3,), (Chunk((0,), (3,), (0,)),))], [(3,)])
    assert changes.counts == [0] and not changes.sums.any()
    assert ops.mark_changes([torch.tensor([-0.0])], [torch.tensor([0.0])])[1].tolist() == [1]
    mask, counts = ops.mark_changes([], [])
    assert mask.shape == counts.shape == (0,)
    empty = torch.empty(0, dtype=torch.int64)
    assert ops.changed_elements_([], [], [], [], mask, [], empty, empty).shape == (2, 0)
    assert [each.shape for each in ops.sum_elements([], [], [], empty, [])] == [(0,), (0,)]
    ops.apply_changes_([], [], [], empty, empty.byte(), [])
    none = LocalShard((0, 8), ())
    of_none = found_changes([torch.empty(0, 8)], [torch.empty(0, 8)], [none], [(6, 8)])
    assert of_none.counts == [0]
    ops.apply_changes_([torch.empty(0, 8)], [none], [(6, 8)], torch.tensor([3]), torch.zeros(4, dtype=torch.uint8), [1])


def raw_case() -> tuple[Any, ...]:
    base, new = torch.randn(3, 2), torch.randn(3, 2)
    table = [2, 6, 8, 3, 2, 1, 2, 2, 2, 0, 0, 5, 2, 1, 2, 2, 0]
    mask, counts = ops.mark_changes([new], [base])
    positions, values = torch.zeros(6, dtype=torch.int64), torch.zeros(24, dtype=torch.uint8)
    torch.ops.torchtitan_ext.changed_elements_([new], [base], table, mask, counts.tolist(), positions, values)
    return base, new, table, mask, counts.tolist(), positions, values


def test_opcheck() -> None:
    raw = torch.ops.torchtitan_ext
    base, new, table, mask, counts, positions, values = raw_case()
    torch.library.opcheck(raw.mark_changes.default, ([new, new], [base, base]))
    torch.library.opcheck(raw.mark_changes.default, ([new.requires_grad_()], [base]))
    new.requires_grad_(False)
    torch.library.opcheck(raw.changed_elements_.default, ([new], [base], table, mask, counts, positions, values))
    torch.library.opcheck(raw.find_changes.default, ([new], [base], table, [6]))
    torch.library.opcheck(raw.sum_elements.default, ([new], table, positions, counts))
    torch.library.opcheck(raw.apply_changes_.default, ([base], table, positions, counts, values))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(backend: str) -> None:
    _, new, _, _, counts, positions, values = raw_case()

    def step(local: Tensor, listed: Tensor, bits_listed: Tensor) -> tuple[Tensor, ...]:
        target = local * 2
        before = ops.sum_elements([target], [TWO_CHUNKS], [(6, 8)], listed, counts)[0]
        ops.apply_changes_([target], [TWO_CHUNKS], [(6, 8)], listed, bits_listed, counts)
        mask, marked = ops.mark_changes([target], [local])
        found, found_values = torch.zeros_like(listed), torch.zeros_like(bits_listed)
        return target + 1, before, mask, marked, found, found_values

    local = torch.randn(3, 2)
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for got, wanted in zip(compiled(local, positions, values), step(local, positions, values), strict=True):
        assert torch.equal(got, wanted)
    assert torch.equal(compiled(local, positions, values)[0], new + 1)

    def find(local: Tensor, base: Tensor) -> tuple[Tensor, ...]:
        listed, bits_listed = torch.zeros(6, dtype=torch.int64), torch.zeros(24, dtype=torch.uint8)
        mask, _ = ops.mark_changes([local], [base])
        sums = ops.changed_elements_([local], [base], [TWO_CHUNKS], [(6, 8)], mask, [6], listed, bits_listed)
        return listed + 0, bits_listed + 0, sums

    compiled_find = torch.compile(find, fullgraph=True, backend=backend)
    for got, wanted in zip(compiled_find(local, local + 1), find(local, local + 1), strict=True):
        assert torch.equal(got, wanted)


# ---- refusals ----


def test_tensors_that_do_not_fit_are_refused() -> None:
    one = torch.zeros(3)
    with pytest.raises(ValueError, match="mark_changes: got 1 tensors and 2 to compare them with"):
        ops.mark_changes([one], [one, one])
    with pytest.raises(ValueError, match=r"new\[0\] and base\[0\] have different dtypes"):
        ops.mark_changes([one], [one.double()])
    with pytest.raises(ValueError, match=r"new\[0\] has the shape \[3\], base\[0\] \[1, 3\]"):
        ops.mark_changes([one], [one.view(1, 3)])
    with pytest.raises(TypeError, match="^mark_changes: got new=a Tensor, expected a list of tensors$"):
        ops.mark_changes(one, [one])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="base.* is sparse"):
        ops.mark_changes([one], [one.to_sparse()])


def test_lists_that_do_not_fit_are_refused_and_nothing_is_written() -> None:
    raw = torch.ops.torchtitan_ext
    base, new, table, mask, _, _, _ = raw_case()
    positions, values = torch.full((6,), -1), torch.zeros(24, dtype=torch.uint8)

    both = torch.zeros(64, dtype=torch.uint8)

    def find(**other: Any) -> None:
        arguments = {"mask": mask, "counts": [6], "positions": positions, "values": values, "tables": table, **other}
        raw.changed_elements_([new], [base], **arguments)

    refusals: list[tuple[str, dict[str, Any]]] = [
        (r"counts\[0\] is 5, but the mask has 6 changed elements", {"counts": [5]}),
        (r"counts\[0\] is -1", {"counts": [-1]}),
        ("got 1 tensors and 2 counts", {"counts": [6, 0]}),
        ("positions has 6 elements, expected at least 7", {"counts": [7]}),
        ("values has 23 elements, expected at least 24", {"values": values[1:]}),
        ("values is not a contiguous uint8 tensor of 1 dim", {"values": values.view(2, 12)}),
        ("positions is not a contiguous int64 tensor of 1 dim", {"positions": positions.double()}),
        ("mask has 2 words, the tensors 1", {"mask": torch.zeros(2, dtype=torch.int64)}),
        ("mask has 0 elements, expected at least 1", {"mask": mask[1:]}),
        ("the table ends too early", {"tables": table[:-1]}),
        (r"new\[0\] has another shape than the table says", {"tables": [*table[:3], 4, *table[4:]]}),
        ("overlap in the global tensor", {"tables": [*table[:-6], 2, 2, 1, 2, 2, 0]}),
        ("share memory", {"positions": both[:48].view(torch.int64), "values": both[40:64]}),
    ]
    for message, other in refusals:
        with pytest.raises(RAW_REFUSAL, match=message):
            find(**other)
    with pytest.raises(RAW_OVERFLOW, match="overflows int64"):
        find(counts=[2**62])
    assert positions.eq(-1).all() and not values.any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [3, 40_001])
def test_mask_bits_behind_the_last_element_stand_for_none(rows: int, device: str) -> None:
    """In the last of one word, and of the words of several threads; rows of 3, so that no tensor fills its words."""
    shape = (rows, 3)
    base, whole = torch.zeros(shape, device=device), LocalShard(shape, (Chunk((0, 0), shape, (0, 0)),))
    new = base.clone()
    new[-1] = 1
    mask, counts = ops.mark_changes([new], [base])
    mask[-1] |= -1 << 3 * rows % 64
    positions = torch.full((4,), -1, dtype=torch.int64, device=device)
    values = torch.zeros(16, dtype=torch.uint8, device=device)
    ops.changed_elements_([new], [base], [whole], [shape], mask, counts.tolist(), positions, values)
    assert positions.tolist() == [*range(3 * rows - 3, 3 * rows), -1]
    if device == "cpu":
        with pytest.raises(ValueError, match=r"counts\[0\] is 4, but the mask has 3 changed elements"):
            ops.changed_elements_([new], [base], [whole], [shape], mask, [4], positions, values)


@pytest.mark.parametrize("listed", [[3, 2], [2, 2], [-1, 2], [2, 48], [2**63 - 1, 3], [-(2**63), 3]], ids=str)
def test_positions_that_do_not_ascend_are_refused_and_nothing_is_written(listed: list[int]) -> None:
    target, positions, values = torch.zeros(6, 8), torch.tensor(listed), torch.ones(8, dtype=torch.uint8)
    for call in (
        lambda: ops.apply_changes_([target], [WHOLE], [(6, 8)], positions, values, [2]),
        lambda: ops.sum_elements([target], [WHOLE], [(6, 8)], positions, [2]),
    ):
        with pytest.raises(ValueError, match="the positions of tensor 0 do not ascend, or are not inside"):
            call()
    assert not target.any()


def test_changes_that_do_not_fit_are_refused() -> None:
    target, positions, values = torch.zeros(6, 8), torch.tensor([1, 2]), torch.ones(20, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"shards\[0\] and shards\[1\] share memory"):
        ops.apply_changes_([target, target], [WHOLE, WHOLE], [(6, 8)] * 2, positions, values, [1, 1])
    with pytest.raises(ValueError, match="source and destination share memory"):
        ops.apply_changes_([target], [WHOLE], [(6, 8)], target.view(-1)[:4].view(torch.int64), values, [2])
    with pytest.raises(ValueError, match="several of its elements share memory"):
        ops.apply_changes_([torch.zeros(8).expand(6, 8)], [WHOLE], [(6, 8)], positions, values, [2])
    with pytest.raises(ValueError, match=r"local tensor of shape \(6, 8\), expected the shard's \(3, 2\)"):
        ops.apply_changes_([target], [TWO_CHUNKS], [(6, 8)], positions, values, [2])
    with pytest.raises(RuntimeError, match="apply_changes_ is not differentiable"):
        ops.apply_changes_([torch.nn.Parameter(target)], [WHOLE], [(6, 8)], positions, values, [2])
    with pytest.raises(ValueError, match="got 1 tensors and 2 shards"):
        ops.apply_changes_([target], [WHOLE, WHOLE], [(6, 8)], positions, values, [2])
    with torch.no_grad():
        parameter = torch.nn.Parameter(torch.zeros(6, 8))
        ops.apply_changes_([parameter], [WHOLE], [(6, 8)], positions, values, [2])
    assert parameter.ne(0).sum() == 2 and not target.any()
