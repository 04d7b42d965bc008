"""`.metadata` read as data: equal to what unpickling gives, and nothing in it is ever run."""

import copyreg
import io
import os
import pickle
import pickletools
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from calls import call
from tier import num_cases
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties, TensorStorageMetadata

import torchtitan_ext as tte
from torchtitan_ext import _core
from torchtitan_ext.storage.metadata.lazy_metadata import PROPERTIES
from torchtitan_ext.storage.metadata.metadata_file import parse_metadata


def stock_file(path: Path, state: dict[str, Any]) -> bytes:
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return (path / ".metadata").read_bytes()


def state_of_all_kinds() -> dict[str, Any]:
    return {
        "model": {"w": torch.ones(3, 4, dtype=torch.bfloat16), "scalar": torch.zeros(()), "empty": torch.zeros(0, 5)},
        "optimizer": {"state": {0: {"exp_avg": torch.ones(2, requires_grad=True)}}, "param_groups": [{"lr": 0.1}]},
        "many": [torch.ones(2, dtype=torch.complex64), torch.tensor([True])],
        "step": 3,
        "ünïcode \U0001f600": "text",
        **{f"key_{index}": torch.ones(1) for index in range(3000)},  # lists and dicts come in steps of a thousand
    }


def with_properties(metadata: Metadata, fields: tuple[Any, ...], keep: int = 5) -> bytes:
    """The file of a torch whose ``TensorProperties`` have these fields behind the five that all releases have."""
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream)
    pickler.dispatch_table = (
        copyreg.dispatch_table
        | {
            TensorProperties: lambda value: (
                copyreg.__newobj__,  # type: ignore[attr-defined]
                (TensorProperties,),
                value.__getstate__()[:keep] + fields,
            )
        }
    )
    pickler.dump(metadata)
    return stream.getvalue()


def assert_same(parsed: Metadata, expected: Metadata) -> None:
    assert parsed.state_dict_metadata == expected.state_dict_metadata
    assert list(parsed.state_dict_metadata) == list(expected.state_dict_metadata)
    assert parsed.planner_data == expected.planner_data
    assert parsed.storage_data == expected.storage_data
    # `index` does not count in the equality of MetadataIndex.
    assert [index.index for index in parsed.storage_data] == [index.index for index in expected.storage_data]
    assert parsed.storage_meta == expected.storage_meta
    assert parsed.version == expected.version


def test_what_stock_wrote(tmp_path: Path) -> None:
    data = stock_file(tmp_path, state_of_all_kinds())
    assert_same(parse_metadata(data), pickle.loads(data))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol(tmp_path: Path, protocol: int) -> None:
    metadata = pickle.loads(stock_file(tmp_path, state_of_all_kinds()))
    data = pickle.dumps(metadata, protocol=protocol)
    assert_same(parse_metadata(data), metadata)
    assert_same(parse_metadata(pickletools.optimize(data)), metadata)
    python = io.BytesIO()
    pickle._Pickler(python, protocol).dump(metadata)  # type: ignore[attr-defined]
    assert_same(parse_metadata(python.getvalue()), metadata)


def test_what_our_planner_adds_and_shares(tmp_path: Path) -> None:
    tte.save({"a": torch.ones(4), "b": torch.ones(4)}, tmp_path)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    a, b = metadata.state_dict_metadata["a"], metadata.state_dict_metadata["b"]
    b.chunks = a.chunks
    parsed = parse_metadata(pickle.dumps(metadata))
    assert_same(parsed, metadata)
    entries = [parsed.state_dict_metadata[name] for name in ("a", "b")]
    assert isinstance(entries[0], TensorStorageMetadata) and entries[0].chunks is entries[1].chunks


def test_fields_that_older_torch_does_not_have(tmp_path: Path) -> None:
    metadata = pickle.loads(stock_file(tmp_path, {"w": torch.ones(3), "step": 1}))
    for name in ("storage_meta", "version"):
        del metadata.__dict__[name]  # torch 2.1 had neither
    parsed = parse_metadata(pickle.dumps(metadata))
    assert parsed.storage_meta is None and parsed.version is None
    assert parsed.state_dict_metadata == metadata.state_dict_metadata


def with_names(data: bytes, replacements: dict[bytes, bytes]) -> bytes:
    """The same stream in protocol 2, in which names are lines of text, with other names in it."""
    plain = pickle.dumps(pickle.loads(data), protocol=2)
    for old, new in replacements.items():
        assert old in plain
        plain = plain.replace(old, new)
    return plain


def test_names_of_torch_before_2_3(tmp_path: Path) -> None:
    data = stock_file(tmp_path, {"w": torch.ones(3)})
    old = with_names(
        data,
        {
            b"ctorch.distributed.checkpoint.metadata\nTensorProperties\n": (
                b"ctorch.distributed._shard.sharded_tensor.metadata\nTensorProperties\n"
            ),
            b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n": (
                b"ctorch.distributed._shard.sharded_tensor.metadata\nMEM_FORMAT_ENCODING\n"
            ),
        },
    )
    assert_same(parse_metadata(old), pickle.loads(data))


def test_enum_members_as_python_3_11_may_write_them(tmp_path: Path) -> None:
    data = stock_file(tmp_path, {"w": torch.ones(3)})
    by_value = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
    plain = pickle.dumps(pickle.loads(data), protocol=2)
    at = plain.index(by_value)
    end = plain.index(b"R", plain.index(b"K\x00", at))
    text = b"TORCH_CONTIGUOUS_FORMAT"
    member = b"cbuiltins\ngetattr\n" + by_value + b"X" + len(text).to_bytes(4, "little") + text + b"\x86"
    assert_same(parse_metadata(plain[:at] + member + plain[end:]), pickle.loads(data))


def test_a_path_as_checkpoint_id(tmp_path: Path) -> None:
    metadata = pickle.loads(stock_file(tmp_path, {"w": torch.ones(3)}))
    metadata.storage_meta.checkpoint_id = tmp_path
    parsed = parse_metadata(pickle.dumps(metadata))
    assert parsed.storage_meta is not None and parsed.storage_meta.checkpoint_id == tmp_path


@pytest.mark.parametrize(
    ("strides", "read"), [(None, None), ((1, 3), (1, 3)), ([0, 7], (0, 7)), (torch.Size([2]), (2,)), ((), ())]
)
def test_strides_of_torch_2_15(tmp_path: Path, strides: Any, read: Any) -> None:
    """They say how the tensor of one rank lay in memory, and nothing about the bytes of its record."""
    metadata = pickle.loads(stock_file(tmp_path, {"w": torch.ones(4, 3).t(), "step": 1}))
    data = with_properties(metadata, (strides,))
    assert _core.read_metadata_pickle(data).columns.key(0).strides == read  # type: ignore[union-attr]
    parsed = parse_metadata(data)
    if "strides" in PROPERTIES:
        metadata.state_dict_metadata["w"].properties.strides = read
    assert_same(parsed, metadata)
    (tmp_path / ".metadata").write_bytes(data)
    state = {"w": torch.zeros(3, 4), "step": 0}
    tte.load(state, tmp_path, no_dist=True)
    assert state["step"] == 1 and torch.equal(state["w"], torch.ones(3, 4))


@pytest.mark.parametrize(
    ("strides", "text"),
    [
        (7, "has a value of another type, expected strides"),
        ("3", "has a value of another type, expected strides"),
        ((1, None), "has a value of another type, expected an integer"),
        ((1, -1), "has a negative stride"),
        ((1,) * 65, "has more than 64 dims"),
    ],
)
def test_strides_that_no_tensor_has(tmp_path: Path, strides: Any, text: str) -> None:
    metadata = pickle.loads(stock_file(tmp_path, {"w": torch.ones(3)}))
    with pytest.raises(ValueError, match=rf"^\.metadata: w: {text}$"):
        parse_metadata(with_properties(metadata, (strides,)))


@pytest.mark.parametrize("value", [None, False])
def test_a_field_of_a_newer_torch_that_is_not_used(
    tmp_path: Path, value: Any, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    metadata = pickle.loads(stock_file(tmp_path, {"w": torch.ones(3), "b": torch.ones(2)}))
    data = with_properties(metadata, ((1,), value))
    recwarn.clear()
    assert parse_metadata(data).storage_data == metadata.storage_data
    text = (
        ".metadata: a newer torch has written field 7{name} of TensorProperties, of which this version knows 6: it is "
        "ignored, because it has its default everywhere; upgrade torchtitan_ext"
    )
    assert [str(one.message) for one in recwarn] == [text.format(name="")]
    recwarn.clear()
    (tmp_path / ".metadata").write_bytes(data)
    monkeypatch.setattr("torchtitan_ext.storage.native.file_reader.PROPERTIES", (*"123456", "colour"))
    state = {"w": torch.zeros(3)}
    tte.load(state, tmp_path, no_dist=True)
    assert torch.equal(state["w"], torch.ones(3))
    assert text.format(name=" (colour)") in [str(one.message) for one in recwarn]
    recwarn.clear()
    shown = call("inspect", tmp_path, "--json")
    assert (shown.code, len(shown.json["keys"])) == (0, 2)


@pytest.mark.parametrize("value", [True, 0, "red", (), (1,), {}])
def test_a_field_of_a_newer_torch_that_is_used(tmp_path: Path, value: Any) -> None:
    metadata = pickle.loads(stock_file(tmp_path, {"w": torch.ones(3)}))
    text = "has a value in field 7 of TensorProperties, of which this version knows 6; upgrade torchtitan_ext"
    with pytest.raises(ValueError, match=rf"^\.metadata: w: {text}$"):
        parse_metadata(with_properties(metadata, (None, value)))


def test_properties_of_no_torch(tmp_path: Path) -> None:
    metadata = pickle.loads(stock_file(tmp_path, {"w": torch.ones(3)}))
    with pytest.raises(ValueError, match="w: has TensorProperties of 4 fields, expected 5 or more$"):
        parse_metadata(with_properties(metadata, (), keep=4))
    with pytest.raises(ValueError, match="w: has more fields than its class$"):
        parse_metadata(with_properties(metadata, (None,) * 12))


@pytest.mark.parametrize("fields", [(), (None,), ((1,),)])
def test_known_fields_are_no_reason_to_warn(tmp_path: Path, fields: Any) -> None:
    metadata = pickle.loads(stock_file(tmp_path, {"w": torch.ones(3)}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parse_metadata(with_properties(metadata, fields))


class Hostile:
    def __reduce__(self) -> Any:
        return os.system, ("touch hostile-was-run",)


def hostile_files(tmp_path: Path) -> dict[str, bytes]:
    metadata = pickle.loads(stock_file(tmp_path, {"w": torch.ones(3), "step": 1}))

    def changed(**fields: Any) -> bytes:
        changed = Metadata(metadata.state_dict_metadata, metadata.planner_data, metadata.storage_data)
        changed.__dict__.update(fields)
        return pickle.dumps(changed)

    entry_of_hostile_size = TensorStorageMetadata(TensorProperties(), Hostile(), [])  # type: ignore[arg-type]
    return {
        "instead of the metadata": pickle.dumps(Hostile()),
        "as a key's entry": changed(state_dict_metadata={"w": Hostile()}),
        "as strides": with_properties(metadata, (Hostile(),)),
        "as a stride": with_properties(metadata, ((1, Hostile()),)),
        "as a size": changed(state_dict_metadata={"w": entry_of_hostile_size}),
        "in planner_data": changed(planner_data={"w": Hostile()}),
        "deep in planner_data": changed(planner_data={"w": [[[Hostile()]]]}),
        "in storage_data": changed(storage_data={MetadataIndex("w"): Hostile()}),
        "in storage_meta": changed(storage_meta=Hostile()),
        "as the version": changed(version=Hostile()),
        "as a call of getattr": b"\x80\x02cbuiltins\ngetattr\ncos\nsystem\nX\x08\x00\x00\x00__call__\x86R.",
    }


def test_nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, data in hostile_files(tmp_path / "checkpoint").items():
        with pytest.raises(
            ValueError, match=r"^\.metadata: .*(posix\.system|builtins\.getattr), expected .*; nothing was run$"
        ):
            parse_metadata(data)
        assert not Path("hostile-was-run").exists(), name


@pytest.mark.parametrize("path", ["../w", "/etc/passwd", "a/../../w", "..", "", "a\0/../b"])
def test_files_outside_of_the_checkpoint_are_refused(tmp_path: Path, path: str) -> None:
    metadata = pickle.loads(stock_file(tmp_path, {"w": torch.ones(3)}))
    for entry in metadata.storage_data.values():
        entry.relative_path = path
    with pytest.raises(ValueError, match=r"^\.metadata: w: lies outside of the checkpoint: "):
        parse_metadata(pickle.dumps(metadata))


def test_a_value_that_contains_itself_is_refused(tmp_path: Path) -> None:
    metadata = pickle.loads(stock_file(tmp_path, {"w": torch.ones(3)}))
    metadata.planner_data["loop"] = loop = []
    loop.append(loop)
    with pytest.raises(ValueError, match="nested deeper than 200, or contain themselves"):
        parse_metadata(pickle.dumps(metadata))


def test_a_small_file_is_no_large_value(tmp_path: Path) -> None:
    # 2^60 leaves: each tuple holds the one before twice.
    metadata = pickle.loads(stock_file(tmp_path, {"w": torch.ones(3)}))
    value: Any = ("leaf",)
    for _ in range(60):
        value = (value, value)
    metadata.planner_data["deep"] = value
    parsed = parse_metadata(pickle.dumps(metadata)).planner_data["deep"]
    for _ in range(60):
        assert parsed[0] is parsed[1]
        parsed = parsed[0]


def test_damaged_files_are_refused_or_harmless(tmp_path: Path) -> None:
    data = stock_file(tmp_path, {"model": {"w": torch.ones(3, 4), "b": torch.zeros(2)}, "step": 3})
    for length in range(len(data)):
        with pytest.raises(ValueError, match=r"pickle: at byte \d+ the stream |\.metadata: "):
            _core.read_metadata_pickle(data[:length])
    source = random.Random(0)
    refused = 0
    for _ in range(num_cases(2000, 0.15)):
        damaged = bytearray(data)
        for _ in range(source.randint(1, 4)):
            damaged[source.randrange(len(data))] = source.randrange(256)
        try:
            _core.read_metadata_pickle(bytes(damaged))
        except ValueError:
            refused += 1
    assert refused > num_cases(2000, 0.15) / 2
