"""Hostile `.metadata` and indexes: nothing in them is run, nothing outside is read, and they cost what their size says.

A thousand of each with `make soak`, a tenth in the suite.
"""

import dataclasses
import io
import pickle
import pickletools
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import without_metadata
from limits import in_limits
from states import save
from test_metadata_file import stock_file, with_names, with_properties
from tier import num_cases
from torch.distributed.checkpoint.metadata import MetadataIndex

import torchtitan_ext as tte
from torchtitan_ext import _core
from torchtitan_ext.checkpoint.operation.component_plans import paths_below
from torchtitan_ext.errors import CheckpointFailedError, DamagedCheckpointError
from torchtitan_ext.offline.sources import open_source, read_record
from torchtitan_ext.storage import FileReader, FileWriter
from torchtitan_ext.storage.inspect.verify import verify
from torchtitan_ext.storage.metadata.metadata_file import parse_metadata
from torchtitan_ext.storage.metadata.saved_metadata import recorded_path

NUM_FILES = min(1000, num_cases(100))
CALLEES = ["os.system", "builtins.eval", "subprocess.Popen", "builtins.getattr", "torch.load", "shutil.rmtree"]
CALLEES += [
    "torch.Size.__init__",
    "pathlib.Path.unlink",
    "operator.attrgetter",
    "builtins.dict",
    "copyreg._reconstructor",
]
PATHS = ["../secret", "/etc/passwd", "a/../../secret", "..", "", "./../secret", "x\0y", "//etc/passwd"]


class Call:
    """Pickles as a call of something, by a stream of its own."""

    def __init__(self, name: str, argument: str) -> None:
        self.name = name
        self.argument = argument

    def __reduce__(self) -> Any:
        return _Name(self.name), (self.argument,)


class _Name:
    """Pickled as a global of another name by `dumps`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any) -> Any:
        raise AssertionError("it was run")


class Raw:
    """Pickled as a stream of its own."""

    def __init__(self, stream: bytes) -> None:
        self.stream = stream


class Pickler(pickle._Pickler):  # type: ignore[name-defined,misc]
    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if isinstance(obj, Raw):
            self.write(obj.stream)
            return
        if isinstance(obj, _Name):
            module, _, name = obj.name.rpartition(".")
            self.write(b"c" + module.encode() + b"\n" + name.encode() + b"\n")
            return
        super().save(obj, save_persistent_id)


def dumps(value: Any, protocol: int) -> bytes:
    stream = io.BytesIO()
    Pickler(stream, protocol).dump(value)
    return stream.getvalue()


def hostile_pickles(data: bytes, source: random.Random) -> Iterator[bytes]:
    """The metadata with a call in some place, with a path that leads out, or with bytes that are something else."""
    while True:
        metadata = pickle.loads(data)
        call = Call(source.choice(CALLEES), "touch was-run")
        places = list(metadata.storage_data)
        kind = source.randrange(8)
        if kind == 0:
            field = source.choice(["state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"])
            setattr(metadata, field, call)
        elif kind == 1:
            metadata.planner_data["w"] = source.choice([[call], (1, [call]), {"x": call}])
        elif kind == 2:
            metadata.storage_data[source.choice(places)].relative_path = source.choice(PATHS)
        elif kind == 3:
            info = metadata.storage_data[source.choice(places)]
            setattr(info, source.choice(["offset", "length"]), source.choice([-1, 2**63 - 1, call, "x"]))
            if info.offset == 2**63 - 1 or info.length == 2**63 - 1:
                info.offset, info.length = 2**63 - 1, 1
        elif kind == 4:
            entry = metadata.state_dict_metadata["w"]
            setattr(entry, source.choice(["size", "chunks", "properties"]), source.choice([call, 7, [call]]))
        elif kind == 5:
            metadata.storage_data[call] = metadata.storage_data[places[0]]
        elif kind == 6:
            metadata.state_dict_metadata["w"].chunks[0].sizes = source.choice([call, (3, 4), torch.Size([1] * 65)])
        else:
            yield b"\x80\x04" + source.randbytes(source.randrange(200)) + b"."
            continue
        yield dumps(metadata, source.choice([2, 4]))


def test_hostile_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint"
    data = stock_file(path, {"w": torch.ones(3), "step": 1})
    (tmp_path / "secret").write_bytes((path / "__0_0.distcp").read_bytes())
    monkeypatch.chdir(tmp_path)
    files = hostile_pickles(data, random.Random(1))
    for number in range(NUM_FILES):
        (path / ".metadata").write_bytes(next(files))
        with pytest.raises(DamagedCheckpointError) as caught:
            FileReader(path).read_metadata()
        assert len(str(caught.value).splitlines()) <= 5, number
        assert not Path("was-run").exists(), number


def reseal(index: bytes) -> bytes:
    """With the size and digest that belong to the bytes, so that the parser behind them is reached."""
    index = index[:24] + struct.pack("<Q", len(index)) + index[32:]
    return index[:-8] + struct.pack("<Q", _core.digest(index[:-8]))


def test_hostile_indexes(tmp_path: Path) -> None:
    save({"w": torch.ones(4, 8), "step": 3}, FileWriter(tmp_path, sync=False), tte.SavePlanner())
    without_metadata(tmp_path)
    content = (tmp_path / ".tte_index").read_bytes()
    source = random.Random(2)
    num_refused = 0
    for _ in range(10 * NUM_FILES):
        damaged = bytearray(content)
        for _ in range(source.randint(1, 3)):
            # Where numbers of eight and four bytes stand: counts, lengths, offsets, numbers of names.
            at = source.randrange(32, len(content) - 16)
            value = source.choice([0, 1, 255, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1, source.getrandbits(16)])
            damaged[at : at + 8] = struct.pack("<Q", value)
        (tmp_path / ".tte_index").write_bytes(reseal(bytes(damaged)))
        try:
            metadata = FileReader(tmp_path).read_metadata()
            assert len(list(metadata.storage_data.items())) + len(list(metadata.state_dict_metadata.items())) < 10
        except (DamagedCheckpointError, FileNotFoundError):  # or the index says that there is a .metadata
            num_refused += 1
    assert num_refused > 5 * NUM_FILES


def test_links_out_of_the_checkpoint_are_refused(tmp_path: Path) -> None:
    for name, writer in (("ours", FileWriter), ("stock", dcp.FileSystemWriter)):
        path = tmp_path / name
        save({"w": torch.ones(3)}, writer(path), tte.SavePlanner())
        (path / "__0_0.distcp").rename(tmp_path / f"{name}.distcp")
        (path / "__0_0.distcp").symlink_to(tmp_path / f"{name}.distcp")
        with pytest.raises(CheckpointFailedError, match="names the file '__0_0.distcp', which is outside"):
            tte.load({"w": torch.zeros(3)}, storage_reader=FileReader(path), no_dist=True)
        # A link that stays inside is no harm, nor is one to the checkpoint itself.
        (path / "__0_0.distcp").unlink()
        (tmp_path / f"{name}.distcp").rename(path / "data")
        (path / "__0_0.distcp").symlink_to("data")
        (tmp_path / f"link-{name}").symlink_to(path)
        state = {"w": torch.zeros(3)}
        tte.load(state, storage_reader=FileReader(tmp_path / f"link-{name}"), no_dist=True)
        assert state["w"].sum() == 3


def repeated_chunks(metadata: Any) -> None:
    """A hundred thousand chunks that are all the same one, of sixty dims: two bytes each."""
    chunk = metadata.state_dict_metadata["w"].chunks[0]
    chunk.offsets = chunk.sizes = metadata.state_dict_metadata["w"].size = torch.Size(range(60))
    metadata.state_dict_metadata["w"].chunks = [chunk] * 100_000


def repeated_list(metadata: Any) -> None:
    """Ten thousand keys with one list of ten thousand chunks."""
    entry = metadata.state_dict_metadata["w"]
    entry.chunks = entry.chunks * 10_000
    metadata.state_dict_metadata.update({f"w{number}": entry for number in range(10_000)})


def many_fields(metadata: Any) -> None:
    """A place of a hundred thousand fields."""
    vars(next(iter(metadata.storage_data))).update({f"x{number}": number for number in range(100_000)})


def doubling_key(metadata: Any) -> None:
    """A dict's key that takes 2^60 steps to hash: each tuple holds the one before twice."""
    stream = b"}(X\x04\0\0\0leaftr\x00\x10\0\0"
    for number in range(0x1000, 0x103C):
        old, new = struct.pack("<I", number), struct.pack("<I", number + 1)
        stream += b"0j" + old + b"j" + old + b"\x86r" + new
    metadata.planner_data = Raw(stream + b"Ns")


def doubling_value(metadata: Any) -> None:
    value: Any = ["leaf"]
    for _ in range(60):
        value = [value, value]
    metadata.planner_data = value


def long_memo(metadata: Any) -> None:
    metadata.planner_data = Raw(b"Nr" + struct.pack("<I", 2**32 - 1))


def long_text(metadata: Any) -> None:
    metadata.planner_data = Raw(b"\x8d" + struct.pack("<Q", 2**63) + b"x")


@pytest.mark.parametrize(
    "make", [repeated_chunks, repeated_list, many_fields, doubling_key, doubling_value, long_memo, long_text]
)
def test_a_small_file_does_not_become_large(tmp_path: Path, make: Callable[[Any], None]) -> None:
    metadata = pickle.loads(stock_file(tmp_path, {"w": torch.ones(3), "step": 1}))
    make(metadata)
    content = dumps(metadata, 2)
    assert len(content) < 4 << 20
    answer = in_limits(lambda: len(parse_metadata(content).state_dict_metadata))
    assert answer in ("2", "10002", "ValueError")


@pytest.mark.parametrize("shapes", ["equal", "different"])
def test_many_keys_with_one_list_of_equal_offsets(tmp_path: Path, shapes: str) -> None:
    """Each of fifteen hundred keys has all of thirty thousand chunks: a quarter of a megabyte."""
    metadata = pickle.loads(stock_file(tmp_path, {"w": torch.ones(3)}))
    entry, (place, info) = metadata.state_dict_metadata.pop("w"), *metadata.storage_data.items()
    entry.chunks = entry.chunks * 30_000
    metadata.storage_data = {}
    for number in range(1500):
        size = torch.Size([number + 10]) if shapes == "different" else entry.size
        metadata.state_dict_metadata[f"w{number}"] = dataclasses.replace(entry, size=size)
        metadata.storage_data[dataclasses.replace(place, fqn=f"w{number}")] = info
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    if shapes == "different":
        assert in_limits(lambda: len(verify(tmp_path).damages)) == "1500"
    else:
        state = {f"w{number}": torch.zeros(3) for number in range(1500)}
        assert in_limits(lambda: tte.load(state, tmp_path, no_dist=True)) == "ReshardError"


def test_sizes_with_chosen_hashes() -> None:
    """Sizes that a known hash, the finalizer of MurmurHash3, takes to numbers whose lower halves are equal."""
    values = np.arange(3_000_000, dtype=np.uint64) << np.uint64(32)
    for factor in (0xC4CEB9FE1A85EC53, 0xFF51AFD7ED558CCD):
        values = (values ^ (values >> np.uint64(33))) * np.uint64(pow(factor, -1, 2**64))
    values ^= values >> np.uint64(33)
    mixed = 1
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        mixed = (mixed ^ (mixed >> 33)) * factor % 2**64
    values ^= np.uint64(mixed ^ (mixed >> 33))
    chosen = values[values < 2**59]
    assert len(chosen) > 80_000
    sizes = np.zeros(len(chosen), dtype=[("num_dims", "u1"), ("size", "<u8")])
    sizes["num_dims"], sizes["size"] = 1, chosen
    # No names, the sizes, no chunk lists, no keys; None, an empty dict and the version as plain values.
    tables = struct.pack("<QQ", 0, len(chosen)) + sizes.tobytes() + struct.pack("<QQ", 0, 0)
    tables += b"\6\0" + struct.pack("<Q", 3) + b"\0" + b"\x08\0" + struct.pack("<Q", 0) + b"\4" + b"\5\0\0\0" + b"1.0.0"
    assert in_limits(lambda: _core.read_metadata_tables(tables, "tables").version) == "1.0.0"


def test_paths_that_are_none(tmp_path: Path) -> None:
    metadata = pickle.loads(stock_file(tmp_path, {"a": {"b": torch.ones(3), "c": 1}, "d": 2}))
    path: Any = ("a", "b")
    for _ in range(60):
        path = (path, path)
    for wrong in (path, ("a", path), 7, ["a", "b"], (), ("b", "a"), ("a",) * 100_000):
        metadata.planner_data["a.b"] = wrong
        parsed = parse_metadata(pickle.dumps(metadata))
        assert in_limits(lambda: sorted(paths_below("a", parsed).items())) == "[('a.b', ('b',)), ('a.c', ('c',))]"  # noqa: B023
        assert in_limits(lambda: recorded_path(parsed.planner_data, "a.b")) == "None"  # noqa: B023


@pytest.mark.parametrize("length", [2**46, 2**60, 5000])
def test_records_that_are_longer_than_their_file(tmp_path: Path, length: int) -> None:
    metadata = pickle.loads(stock_file(tmp_path, {"w": torch.ones(3), "step": 1}))
    for info in metadata.storage_data.values():
        info.length = length
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    text = rf"the file has \d+ bytes.*, expected {length} from here on"
    for state in ({"w": torch.zeros(3)}, {"step": 0}):
        with pytest.raises((DamagedCheckpointError, CheckpointFailedError), match=text):
            tte.load(state, tmp_path, no_dist=True)
    for fqn in ("w", "step"):
        with pytest.raises(DamagedCheckpointError, match=f"expected {length} from here on"):
            read_record(open_source(tmp_path), MetadataIndex(fqn, torch.Size([0]) if fqn == "w" else None))


@pytest.mark.parametrize(
    ("names", "python"),
    [
        ({}, "3.10 to 3.12, 3.14"),
        ({b"cpathlib\nPosixPath\n": b"cpathlib._local\nPosixPath\n"}, "3.13"),
    ],
)
@pytest.mark.parametrize("torch_version", ["2.1", "2.6", "2.13", "2.15"])
def test_streams_of_other_versions(tmp_path: Path, names: dict[bytes, bytes], python: str, torch_version: str) -> None:
    """By hand, from a stream of this torch and Python: the names and fields that those versions wrote."""
    data = stock_file(tmp_path, {"model": {"w": torch.ones(3, 4)}, "step": 1})
    metadata = pickle.loads(data)
    if torch_version == "2.1":
        del metadata.__dict__["storage_meta"], metadata.__dict__["version"]
        for info in metadata.storage_data.values():
            info.__dict__.pop("transform_descriptors", None)
        old = b"ctorch.distributed._shard.sharded_tensor.metadata\n"
        module = b"ctorch.distributed.checkpoint.metadata\n"
        names = {
            module + b"TensorProperties\n": old + b"TensorProperties\n",
            module + b"_MEM_FORMAT_ENCODING\n": old + b"MEM_FORMAT_ENCODING\n",
        }
    elif torch_version == "2.6":
        del metadata.__dict__["version"]
    stream = with_names(pickle.dumps(metadata), names)
    if torch_version == "2.15":
        stream = with_properties(metadata, ((4, 1),))
    pickletools.dis(stream, out=io.StringIO())
    parsed = parse_metadata(stream)
    assert parsed.state_dict_metadata == metadata.state_dict_metadata
    assert parsed.storage_data == metadata.storage_data and parsed.planner_data == metadata.planner_data
    if torch_version != "2.1":
        assert parsed.storage_meta == metadata.storage_meta
    (tmp_path / ".metadata").write_bytes(stream)
    state = {"model": {"w": torch.zeros(3, 4)}, "step": 0}
    tte.load(state, tmp_path, no_dist=True)
    assert state["step"] == 1 and torch.equal(state["model"]["w"], torch.ones(3, 4))
