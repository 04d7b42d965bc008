"""Every kind of tensor through our files and stock's, with every pair of writer, reader and planners."""

import io
import pickletools
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from states import DTYPES, blank, differences, load, mixed_state, random_tensor, save
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import torchtitan_ext as tte
from torchtitan_ext import _core
from torchtitan_ext.storage import FileReader, FileWriter

WRITERS = {"ours": FileWriter, "stock": dcp.FileSystemWriter}
READERS = {"ours": FileReader, "stock": dcp.FileSystemReader}


@pytest.mark.filterwarnings("ignore:.*has no checksums")
@pytest.mark.parametrize("planners", ["our_planners", "stock_planners"])
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("writer", WRITERS)
def test_every_kind_of_tensor(tmp_path: Path, writer: str, reader: str, planners: str) -> None:
    is_ours = planners == "our_planners"
    state = mixed_state()
    save(state, WRITERS[writer](tmp_path), tte.SavePlanner() if is_ours else dcp.DefaultSavePlanner())
    options = {"verify": "all"} if reader == "ours" else {}
    loaded = load(
        blank(state), READERS[reader](tmp_path, **options), tte.LoadPlanner() if is_ours else dcp.DefaultLoadPlanner()
    )
    assert differences(loaded, state) == []


def strided_targets(state: dict[str, Any]) -> dict[str, Any]:
    """Targets of other strides than what is saved: transposed, and every second element of a larger tensor."""
    targets: dict[str, Any] = {}
    for key, value in blank(state).items():
        if isinstance(value, torch.Tensor) and value.dim() >= 2:
            targets[key] = value.transpose(0, 1).contiguous().transpose(0, 1)
        elif isinstance(value, torch.Tensor) and value.dim() == 1:
            targets[key] = value.repeat_interleave(2)[::2]
        else:
            targets[key] = value
    return targets


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("writer", WRITERS)
def test_keys_that_are_no_text(tmp_path: Path, writer: str, reader: str) -> None:
    """A file name that is no UTF-8 is a str with lone surrogates in Python."""
    state = {"\udc80": torch.arange(3), "step \udc81": 2, "": "empty", "\n\0": True}
    save(state, WRITERS[writer](tmp_path))
    assert differences(load(blank(state), READERS[reader](tmp_path)), state) == []


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("verify", ["auto", "none"])
def test_strided_targets(tmp_path: Path, writer: str, verify: Any) -> None:
    state = mixed_state()
    save(state, WRITERS[writer](tmp_path))
    targets = strided_targets(state)
    strides = {key: value.stride() for key, value in targets.items() if isinstance(value, torch.Tensor)}
    loaded = load(targets, FileReader(tmp_path, verify))
    assert differences(loaded, state) == []
    assert strides == {key: value.stride() for key, value in loaded.items() if isinstance(value, torch.Tensor)}


def test_dcp_to_torch_save_reads_ours(tmp_path: Path) -> None:
    state = mixed_state()
    save(state, FileWriter(tmp_path / "ours"))
    dcp_to_torch_save(tmp_path / "ours", tmp_path / "one_file.pt")
    assert differences(torch.load(tmp_path / "one_file.pt"), state) == []


@pytest.mark.parametrize("writer", WRITERS)
def test_our_reader_rebuilds_a_state_dict_from_nothing(tmp_path: Path, writer: str) -> None:
    state = mixed_state()
    save(state, WRITERS[writer](tmp_path))
    rebuilt: dict[str, Any] = {}
    _load_state_dict(rebuilt, FileReader(tmp_path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    assert differences(rebuilt, state) == []


def whole_records() -> dict[str, Any]:
    """Tensors that are not plain memory: they travel as whole torch.save records."""
    return {
        "quantised": torch.quantize_per_tensor(torch.arange(12.0).view(3, 4), 0.5, 2, torch.quint8),
        "quantised_part": torch.quantize_per_tensor(torch.arange(12.0).view(3, 4), 0.5, 2, torch.quint8)[1:],
        "complex32": random_tensor((4,), torch.int32).view(torch.complex32),
    }


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("writer", WRITERS)
def test_tensors_that_are_not_plain_memory(tmp_path: Path, writer: str, reader: str) -> None:
    state = whole_records()
    save(state, WRITERS[writer](tmp_path))
    targets = {
        key: torch.quantize_per_tensor(torch.zeros(value.shape), 0.5, 2, torch.quint8)
        if value.is_quantized
        else torch.zeros_like(value)
        for key, value in state.items()
    }
    loaded = load(targets, READERS[reader](tmp_path))
    assert all(torch.equal(loaded[key].int_repr(), state[key].int_repr()) for key in ("quantised", "quantised_part"))
    assert torch.equal(loaded["complex32"].view(torch.int32), state["complex32"].view(torch.int32))


class Tagged(torch.Tensor):
    """A subclass without storage of its own kind."""


@pytest.mark.parametrize("writer", WRITERS)
def test_subclasses_are_whole_records(tmp_path: Path, writer: str) -> None:
    state = {"tagged": torch.arange(6.0).view(2, 3).as_subclass(Tagged), "plain": torch.arange(3)}
    save(state, WRITERS[writer](tmp_path))
    with torch.serialization.safe_globals([Tagged]):
        loaded = load({"tagged": torch.zeros(2, 3), "plain": torch.zeros(3, dtype=torch.int64)}, FileReader(tmp_path))
    assert differences(loaded, {"tagged": torch.arange(6.0).view(2, 3), "plain": torch.arange(3)}) == []


def test_what_a_record_says_is_what_torch_writes(tmp_path: Path) -> None:
    """Opcode by opcode, but for the memo, which nothing refers to; and the names of dtypes."""
    for dtype in DTYPES:
        for shape in [(), (0,), (3,), (2, 300), (1, 70000), (2, 1, 1, 3), (1,) * 9]:
            tensor = random_tensor(shape, dtype)
            save({"t": tensor}, FileWriter(tmp_path))
            ours = pickle_opcodes(first_record(tmp_path / "__0_0.distcp"))
            stream = io.BytesIO()
            torch.save(tensor, stream)
            assert ours == pickle_opcodes(stream.getvalue()), (dtype, shape)


def first_record(path: Path) -> bytes:
    """A torch.save archive at the beginning of a file, with what follows cut off."""
    content = path.read_bytes()
    return content[: content.index(b"PK\x05\x06") + 22]


def pickle_opcodes(record: bytes) -> list[Any]:
    # zipfile wants CRCs, which we do not write; it finds the entries all the same.
    with zipfile.ZipFile(io.BytesIO(record)) as archive:
        entry = archive.getinfo("archive/data.pkl")
    begin = entry.header_offset + 30
    header = record[entry.header_offset : begin]
    begin += int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    opcodes = pickletools.genops(record[begin : begin + entry.file_size])
    return [(code.name, argument) for code, argument, _ in opcodes if "PUT" not in code.name]


def test_tensors_begin_at_aligned_bytes(tmp_path: Path) -> None:
    state = {"a": torch.arange(5), "large": torch.zeros(100_000), "b": torch.arange(3.0), "larger": torch.ones(90_001)}
    save(state, FileWriter(tmp_path))
    reader = FileReader(tmp_path)
    reader.set_up_storage_reader(reader.read_metadata(), True)
    assert reader._index is not None
    (file,) = reader._index.files.values()
    content = (tmp_path / "__0_0.distcp").read_bytes()
    for one in _core.parse_records(file):
        assert one.data_offset % (4096 if one.fqn.startswith("large") else 64) == 0
        dtype, count = state[one.fqn].dtype, one.sizes[0]
        stored = torch.frombuffer(bytearray(content), dtype=dtype, count=count, offset=one.data_offset)
        assert torch.equal(stored, state[one.fqn])
