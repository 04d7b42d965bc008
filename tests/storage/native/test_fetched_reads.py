"""Reads by requests, and files in parts, as object stores need them: the same bytes and damages as of files."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from fetched_reads import fetch
from tier import num_cases

import torchtitan_ext as tte
from torchtitan_ext import _core
from torchtitan_ext.storage.native.file_reader import FileReader
from torchtitan_ext.storage.raw_tensor import ELEMENT_TYPES, NAMES

BLOCK = 1 << 20


def saved(path: Path) -> FileReader:
    state = {f"w{number}": torch.arange(number * 200_000 + 5.0) for number in range(6)}
    tte.save(state, path, no_dist=True)
    reader = FileReader(path)
    reader.set_up_storage_reader(reader.read_metadata(), True)
    return reader


@pytest.mark.parametrize("verify", ["none", "mostly", "once", "all"])
def test_requests_find_what_reads_find(tmp_path: Path, verify: str) -> None:
    """Random parts, of a file in which random blocks are damaged."""
    reader = saved(tmp_path)
    (name,) = reader._index.files if reader._index is not None else ()
    whole = bytearray((tmp_path / name).read_bytes())
    drawn = random.Random(verify)
    for _ in range(num_cases(40)):
        content = bytearray(whole)
        for _ in range(drawn.randrange(4)):
            content[drawn.randrange(len(content) - 1000)] ^= 1
        (tmp_path / name).write_bytes(content)
        parts = [(begin, drawn.randrange(1, 3 * BLOCK)) for begin in drawn.sample(range(len(content) // 2), 5)]
        blocks = sorted(drawn.sample(range(len(whole) // BLOCK), drawn.randrange(3)))
        found = []
        for is_fetched in (False, True):
            reader._blocks = _core.BlockLedger()
            reader._opened = None
            runs = _core.RunReader()
            file = reader.open_file(runs, name)
            targets = [np.zeros(num_bytes, dtype=np.uint8) for _, num_bytes in parts]
            for (begin, num_bytes), target in zip(parts, targets, strict=True):
                runs.add_bytes(file, begin, num_bytes, target.ctypes.data)
            for block in blocks:
                runs.add_blocks(file, block, block + 1)
            if is_fetched:
                damaged = fetch(runs, [tmp_path / name], verify, drawn)
            else:
                damaged = [(one.file, one.begin, one.end) for one in runs.read(2, verify)]
            assert all(
                bytes(target) == content[begin : begin + n] for target, (begin, n) in zip(targets, parts, strict=True)
            )
            found.append((damaged, reader.describe_blocks()))
        assert found[0] == found[1]


def test_answers_that_do_not_fit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1000))
    runs = _core.RunReader()
    file = runs.add_file(str(tmp_path / "file"), -1)
    target = np.ones(10, dtype=np.uint8)
    with pytest.raises(ValueError, match="no read was begun"):
        runs.take(0, b"")
    with pytest.raises(ValueError, match="no read was begun"):
        runs.finish()
    runs.add_bytes(file, 5, 10, target.ctypes.data)
    assert runs.requests("none", 0, BLOCK) == [(0, 5, 15)]
    for content in (bytes(9), bytes(11)):
        with pytest.raises(_core.FormatError, match=f"got {len(content)} bytes, expected 10"):
            runs.take(0, content)
    with pytest.raises(IndexError):
        runs.take(1, bytes(10))
    with pytest.raises(ValueError, match="not contiguous"):
        runs.take(0, np.zeros(20, dtype=np.uint8)[::2])
    assert runs.finish() == [] and target.tolist() == [1] * 10
    # Nothing of a read that has failed is left.
    assert runs.requests("none", 0, BLOCK) == [] and runs.finish() == []


def test_parts_are_what_the_file_is(tmp_path: Path) -> None:
    drawn = random.Random(3)
    for case in range(num_cases(30)):
        tensors = {
            f"w{number}": torch.randint(256, (drawn.choice([0, 1, 77, 5 * BLOCK // 3]), 3), dtype=torch.uint8)
            for number in range(drawn.randrange(5))
        }
        turned = {name: one.t() if drawn.random() < 0.5 else one for name, one in tensors.items()}
        contents, files = [], []
        for to_memory in (False, True):
            path = tmp_path / f"{case}-{to_memory}"
            records = _core.RecordWriter(bytes(path), BLOCK, 2, False, to_memory)
            content = bytearray()
            room = np.empty(drawn.choice([1, 3]) * BLOCK, dtype=np.uint8)
            for number, (name, one) in enumerate(turned.items()):
                key = (name, (0,) * one.dim(), None)
                types = (NAMES[one.dtype], one.shape, ELEMENT_TYPES[one.dtype])
                records.add_tensor(key, *types, one.data_ptr(), one.stride(), one.shape)
                if number % 2 and not to_memory:
                    records.write_queued()
                while number % 2 and to_memory and (n := records.write_part(room.ctypes.data, room.nbytes)):
                    content += room[:n].tobytes()
            files.append(records.finish("name", bytes(16), 0))
            contents.append(bytes(content) + records.rest if to_memory else path.read_bytes())
        assert contents[0] == contents[1] and len(contents[0]) == files[0].num_bytes
        assert [(one.footer_digest, one.records, one.sums) for one in files[:1]] == [
            (one.footer_digest, one.records, one.sums) for one in files[1:]
        ]
