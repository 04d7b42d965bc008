"""What is read: the wanted runs only, into targets of any strides, in the order of calls that planners know."""

import io
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from states import blank, differences, load, mixed_state, random_tensor, save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from torchtitan_ext import _core
from torchtitan_ext.errors import SavedOverError
from torchtitan_ext.storage import FileReader, FileWriter
from torchtitan_ext.storage.native.file_reader import MetadataMark

# Short runs, runs longer than a page, rows longer than a block of checksums.
SHAPES = [(7,), (300, 5), (20, 3, 4, 5), (64, 3000), (3, 400_000), (900, 1300)]


class OneBox(dcp.DefaultLoadPlanner):
    """Reads one box of one key into a given tensor."""

    def __init__(self, key: str, offsets: list[int], sizes: list[int], target: torch.Tensor) -> None:
        super().__init__()
        self.item = ReadItem(
            LoadItemType.TENSOR,
            MetadataIndex(key),
            torch.Size([0] * len(sizes)),
            MetadataIndex(key, [0] * len(sizes)),
            torch.Size(offsets),
            torch.Size(sizes),
        )
        self.target = target

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([self.item])

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self.target


def random_target(sizes: list[int], dtype: torch.dtype, random_source: random.Random) -> torch.Tensor:
    """A tensor of these sizes whose dims lie in memory in a random order, with gaps of random steps."""
    order = list(range(len(sizes)))
    random_source.shuffle(order)
    steps = [random_source.choice([1, 1, 2]) for _ in sizes]
    larger = torch.zeros([sizes[dim] * steps[dim] for dim in order], dtype=dtype)
    part = larger[tuple(slice(None, None, steps[dim]) for dim in order)]
    return part.permute([order.index(dim) for dim in range(len(sizes))])


@pytest.mark.parametrize("writer", [FileWriter, dcp.FileSystemWriter])
def test_random_boxes_into_random_strides(tmp_path: Path, writer: Any) -> None:
    source = random.Random(0)
    state = {
        str(shape): random_tensor(shape, source.choice([torch.float32, torch.int8, torch.complex128]), seed)
        for seed, shape in enumerate(SHAPES)
    }
    state["transposed"] = random_tensor((200, 350), torch.float32).t()
    # Stock writes the strides of what takes no more memory than its storage has.
    memory = random_tensor((10_000,), torch.float32, 1)
    state["in common"] = memory.as_strided((100, 100), (1, 50))
    state["repeated"] = memory.as_strided((100, 4, 25), (1, 0, 300))
    save(state, writer(tmp_path))
    for _ in range(150):
        key, saved = source.choice(list(state.items()))
        offsets = [source.randrange(size) for size in saved.shape]
        sizes = [source.randint(1, size - offset) for size, offset in zip(saved.shape, offsets, strict=True)]
        is_plain = source.random() < 0.5
        target = torch.zeros(sizes, dtype=saved.dtype) if is_plain else random_target(sizes, saved.dtype, source)
        reader = FileReader(
            tmp_path,
            source.choice(["auto", "none"]) if writer is not FileWriter else source.choice(["auto", "none", "all"]),
            thread_count=source.choice([1, 2, 5]),
        )
        load({}, reader, OneBox(key, offsets, sizes, target))
        box = saved[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))]
        assert differences({key: target}, {key: box}) == [], (key, offsets, sizes, target.stride(), reader.verify)


def test_many_small_tensors_in_an_order_of_their_own(tmp_path: Path) -> None:
    state = {f"t{index}": random_tensor((index % 37,), torch.float32, index) for index in range(600)}
    save(state, FileWriter(tmp_path))
    for writer_keys in (list(state), list(reversed(state)), [key for key in state if key.endswith("7")]):
        wanted = {key: state[key] for key in writer_keys}
        assert differences(load(blank(wanted), FileReader(tmp_path, "all")), wanted) == []


def test_a_box_outside_of_its_record_is_refused(tmp_path: Path) -> None:
    save({"w": torch.zeros(4, 5)}, FileWriter(tmp_path))
    target = torch.zeros(2, 5)
    with pytest.raises(CheckpointException, match=r"2 elements from 3 on of dim 0 are wanted, the record has 4"):
        load({}, FileReader(tmp_path), OneBox("w", [3, 0], [2, 5], target))
    with pytest.raises(CheckpointException, match="mismatch sizes"):
        load({}, FileReader(tmp_path), OneBox("w", [0, 0], [1, 5], target))


@pytest.mark.parametrize("writer", [FileWriter, dcp.FileSystemWriter])
def test_a_target_of_another_dtype_is_cast_as_with_stock(tmp_path: Path, writer: Any) -> None:
    saved = torch.randn(40, 30)
    save({"w": saved}, writer(tmp_path))
    target = torch.zeros(40, 30, dtype=torch.bfloat16)
    load({"w": target}, FileReader(tmp_path), dcp.DefaultLoadPlanner())
    assert torch.equal(target, saved.to(torch.bfloat16))


def test_autograd_sees_that_targets_changed(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, FileWriter(tmp_path))
    weight = torch.zeros(3, requires_grad=True)
    product = (weight * weight).sum()
    version = weight._version
    load({"w": weight}, FileReader(tmp_path), dcp.DefaultLoadPlanner())
    assert weight._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_plans_of_two_ranks_that_read_other_metadata_are_refused(tmp_path: Path) -> None:
    plans = [LoadPlan([], storage_data=MetadataMark(digest)) for digest in ("a", "b")]
    with pytest.raises(SavedOverError, match="the metadata of different saves"):
        FileReader(tmp_path).prepare_global_plan(plans)


def test_inference_tensors_are_filled(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, FileWriter(tmp_path))
    with torch.inference_mode():
        target = torch.zeros(3)
        load({"w": target}, FileReader(tmp_path), dcp.DefaultLoadPlanner())
        assert target.tolist() == [1, 1, 1]


def test_a_target_that_shares_memory_with_itself_fails_as_with_stock(tmp_path: Path) -> None:
    save({"w": torch.ones(3, 4)}, FileWriter(tmp_path))
    for reader in (FileReader(tmp_path), dcp.FileSystemReader(tmp_path)):
        with pytest.raises(CheckpointException, match="single memory location"):
            load({"w": torch.zeros(4).expand(3, 4)}, reader, dcp.DefaultLoadPlanner())


class Recording(dcp.DefaultLoadPlanner):
    """Notes the calls, and lets tensors be filled in memory that only ``commit_tensor`` copies to the targets."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str]] = []
        self.filled: dict[str, torch.Tensor] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.calls.append(("load_bytes", read_item.dest_index.fqn))
        super().load_bytes(read_item, value)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        self.calls.append(("resolve", read_item.dest_index.fqn))
        self.filled[read_item.dest_index.fqn] = torch.zeros_like(super().resolve_tensor(read_item))
        return self.filled[read_item.dest_index.fqn]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.calls.append(("commit", read_item.dest_index.fqn))
        filled = self.filled[read_item.dest_index.fqn]
        assert filled.data_ptr() == tensor.data_ptr()
        super().resolve_tensor(read_item).copy_(filled)


def test_planners_hear_of_each_item_in_stocks_order(tmp_path: Path) -> None:
    state = mixed_state()
    save(state, FileWriter(tmp_path))
    ours, stock = Recording(), Recording()
    assert differences(load(blank(state), FileReader(tmp_path), ours), state) == []
    load(blank(state), dcp.FileSystemReader(tmp_path), stock)
    assert sorted(ours.calls) == sorted(stock.calls)
    for name in {name for _, name in stock.calls}:
        assert [call for call, fqn in ours.calls if fqn == name] == [call for call, fqn in stock.calls if fqn == name]


def test_a_failing_planner_is_the_error(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, FileWriter(tmp_path))

    class Failing(dcp.DefaultLoadPlanner):
        def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
            raise KeyError("no room")

    with pytest.raises(CheckpointException, match="no room"):
        load({"w": torch.zeros(3)}, FileReader(tmp_path), Failing())


def test_records_above_4_gib(tmp_path: Path) -> None:
    """A sparse file: the zeros take no room. Sizes and offsets are beyond what 32 bits hold."""
    num_rows = (4 << 30) // 4096 + 5
    path = str(tmp_path / "file")
    head, tail = _core.frame_tensor(_core.ElementType("ByteStorage", "", 1), (num_rows, 4096), 0, 4096)
    assert len(head) % 4096 == 0
    with open(path, "wb") as stream:
        stream.write(head)
        stream.truncate(len(head) + num_rows * 4096)
        stream.seek(len(head) + (num_rows - 1) * 4096)
        stream.write(bytes(range(256)) * 16)
        stream.write(tail)
    length = (tmp_path / "file").stat().st_size
    (found,) = _core.find_tensors(path, [(0, length)], 1)
    assert found is not None
    assert (found.dtype, found.sizes, found.strides) == ("uint8", (num_rows, 4096), (4096, 1))
    last = torch.zeros(4096, dtype=torch.uint8)
    reader = _core.RunReader()
    file = reader.add_file(path, length)
    reader.add_box(file, found, (num_rows - 1, 0), (1, 4096), last.data_ptr(), (4096, 1))
    reader.read(1, "none")
    assert torch.equal(last, torch.arange(256).to(torch.uint8).repeat(16))
    # torch reads the same archive.
    whole = torch.load(path, mmap=True, weights_only=True)
    assert whole.shape == (num_rows, 4096) and torch.equal(whole[-1], last) and whole[0].sum() == 0
