"""``torchtitan-ext inspect``."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from torchtitan_ext._core import ChunkSummary, KeySummary
from torchtitan_ext.cli.commands.ls import inner_rows
from torchtitan_ext.cli.lazy import without_collector
from torchtitan_ext.cli.options import Json, UnsafeUnpickle, refusing_wrong_usage
from torchtitan_ext.cli.output import (
    FORMAT_NAMES,
    count_of,
    plain_number,
    print_json,
    print_line,
    print_problem,
    print_table,
    saved_by,
    text_of_bytes,
)
from torchtitan_ext.errors import UnknownFormatError
from torchtitan_ext.errors.near_names import nearest_name, refuse_unmatched
from torchtitan_ext.layout.layout import Box
from torchtitan_ext.state.data_position import DataPosition, ShardPosition, loaders_among, read_data_position
from torchtitan_ext.storage.commit.steps import step_paths
from torchtitan_ext.storage.formats.contents import MODEL, Contents, Scalar
from torchtitan_ext.storage.formats.detect import checkpoints_in, format_of
from torchtitan_ext.storage.inspect.describe import describe
from torchtitan_ext.storage.location import Location, Place, place_at
from torchtitan_ext.storage.runs.listing import bytes_in

_MAX_VALUE_CHARS = 60

_PICTURES = (".svg", ".png", ".pdf")


def run(
    path: Annotated[
        Any, typer.Argument(metavar="PATH", help="A checkpoint: DCP, safetensors or torch.save.", parser=place_at)
    ],
    glob: Annotated[str | None, typer.Argument(metavar="GLOB", help="Only keys that match, as in *.wq.*")] = None,
    shards: Annotated[bool, typer.Option("--shards", help="Where each chunk of a key lies.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw which rank holds what of the tensor GLOB: .svg, .png, .pdf."),
    ] = None,
    data: Annotated[bool, typer.Option("--data", help="Where each data loader stands, shard by shard.")] = False,
    rank: Annotated[int | None, typer.Option(help="The rank, if each rank has metadata of its own.")] = None,
    unsafe_unpickle: UnsafeUnpickle = False,
    json: Json = False,
) -> None:
    """What a checkpoint holds: keys, dtypes, shapes, values, files. Reads no tensors but single numbers.

    For a folder with several checkpoints: their names.

    Example: torchtitan-ext inspect outputs/checkpoint/step-100 "*norm*" --shards
    """
    plot_holders = None if plot is None else _plotter(plot)
    names = _checkpoints_of_folder(path)
    if names:
        _show_folder(path, names, json)
        return
    with without_collector():
        contents = describe(path, rank=rank, unsafe_unpickle=unsafe_unpickle)
        if plot_holders is not None:
            plot_holders(plot, *_holders(contents, glob))
            print_problem(f"wrote {plot}")  # on stderr, since stdout may have a JSON document
        with refusing_wrong_usage():
            refuse_unmatched("glob", [] if glob is None else [glob], [key.fqn for key in contents.keys], where=path)
        keys = contents.matching(glob)
        if json:
            print_json(_plain(contents, keys, shards))
        elif data:
            _print_data(_data_positions(contents))
        else:
            _print(contents, keys, shards, has_totals=glob is None and not shards)


def _plotter(path: Path) -> Any:
    """What draws the picture, by matplotlib. Refusals (none there, no picture's ending) come before the work."""
    if path.suffix.lower() not in _PICTURES:
        expected = f"a name that ends in {', '.join(_PICTURES)}"
        raise typer.BadParameter(f"got {path}, expected {expected}", param_hint="--plot")
    try:
        return importlib.import_module("torchtitan_ext.cli.picture").plot_holders
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        text = 'pictures need matplotlib; run: pip install "torchtitan-ext[plot]"'
        raise typer.BadParameter(text, param_hint="--plot") from None


def _holders(contents: Contents, name: str | None) -> tuple[str, Sequence[int], list[tuple[str, Box]]]:
    """The picture's title, and of the tensor of this name its shape, and its boxes with their files."""
    key = next((key for key in contents.keys if key.fqn == name and key.sizes is not None), None)
    if key is None:
        near = nearest_name(name or "", [key.fqn for key in contents.keys if key.sizes is not None])
        hint = "" if near is None else f"; did you mean {near}?"
        text = f"{contents.path} has no tensor {name}{hint}" if name else "got no name of a tensor to draw"
        raise typer.BadParameter(text, param_hint="--plot")
    boxes = [
        (chunk.file or contents.path.name, (tuple(chunk.offsets), tuple(chunk.sizes)))
        for chunk in contents.chunks_of(key.fqn)
        if chunk.offsets is not None and chunk.sizes is not None
    ]
    size, shape = contents.world_size, key.sizes or ()
    origin = saved_by(size, contents.mesh) if size else f"in {count_of(len(contents.files), 'file')}"
    return f"{name}, {' x '.join(map(str, shape)) or 'a single number'}, {key.dtype}\n{origin}", shape, boxes


def _checkpoints_of_folder(path: Place) -> list[str]:
    """The names of the checkpoints in a folder that is neither a checkpoint nor a run."""
    if isinstance(path, Location) or not path.is_dir() or step_paths(path):
        return []
    try:
        format_of(path)
    except UnknownFormatError:
        return checkpoints_in(path)
    return []


def _show_folder(path: Path, names: Sequence[str], json: bool) -> None:
    if json:
        rows = [{"name": name, "format": format_of(path / name), "num_bytes": bytes_in(path / name)} for name in names]
        print_json({"path": str(path), "checkpoints": rows})
        return
    print_line(f"{path} holds {count_of(len(names), 'checkpoint')}; inspect one of them")
    print()
    print_table(("checkpoint", "format", "bytes"), inner_rows(path, names))


def _print(contents: Contents, keys: Sequence[KeySummary], shards: bool, *, has_totals: bool) -> None:
    totals = list(_totals(contents))
    for line in _headline(contents, totals):
        print_line(line)
    print()
    if has_totals and any(total.num_tensors for total in totals):
        sums = [
            (name, num_tensors, f"{num_elements:,}", text_of_bytes(num_bytes), num_values)
            for name, num_tensors, num_elements, num_bytes, num_values in totals
            if num_tensors
        ]
        print_table(("component", "tensors", "elements", "bytes", "other values"), sums)
        print()
    if shards:
        print_table(("key", "offsets", "sizes", "bytes", "file", "at byte"), _shard_rows(contents, keys))
    else:
        values = contents.read_values([key for key in keys if not key.sizes])
        rows = ((*_key_row(key), _cell(values[key.fqn]) if key.fqn in values else "") for key in keys)
        print_table(("key", "dtype", "shape", "bytes", "chunks", "value"), rows)


class _Total(NamedTuple):
    """The sums over the keys of one component."""

    component: str
    num_tensors: int
    num_elements: int
    num_bytes: int
    num_values: int


def _totals(contents: Contents) -> Iterator[_Total]:
    for name, keys in contents.components().items():
        tensors = [key for key in keys if key.sizes is not None]
        num_elements = sum(math.prod(key.sizes or ()) for key in tensors)
        num_bytes = sum(key.num_bytes for key in tensors)
        yield _Total(name, len(tensors), num_elements, num_bytes, len(keys) - len(tensors))


def _headline(contents: Contents, totals: Sequence[_Total]) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in contents.versions.items())
    yield f"{contents.path}: {FORMAT_NAMES[contents.format]}{f' ({versions})' if versions else ''}"
    tensors = [key for key in contents.keys if key.dtype is not None]
    size = text_of_bytes(sum(key.num_bytes for key in tensors))
    others = count_of(len(contents.keys) - len(tensors), "other value")
    parameters = "".join(
        f"; {MODEL} has {count_of(total.num_elements, 'parameter')}" for total in totals if total.component == MODEL
    )
    yield f"{count_of(len(tensors), 'tensor')} of {size}, {others}{parameters}"
    there = [file.num_bytes for file in contents.files if file.num_bytes is not None]
    missing = len(contents.files) - len(there)
    lost = f", {missing:,} not there" if missing else ""
    checksums = "checksums of all bytes" if contents.has_checksums else "no checksums of ours"
    earlier = [file for file in contents.files if file.save_id is not None]
    size = text_of_bytes(sum(file.num_bytes or 0 for file in earlier))
    shared = f" ({len(earlier):,} of {size} shared with earlier saves)" if earlier else ""
    yield f"{count_of(len(contents.files), 'file')} of {text_of_bytes(sum(there))}{shared}{lost}; {checksums}"
    if contents.world_size is not None:
        yield saved_by(contents.world_size, contents.mesh)
    for name, position in _data_positions(contents).items():
        yield f"{name}: {position}"


def _data_positions(contents: Contents) -> dict[str, DataPosition]:
    """Where each data loader of ours stands, by its component."""
    found = {}
    for prefix, fqns in loaders_among([key.fqn for key in contents.keys if key.dtype is None]).items():
        state = {fqn.removeprefix(prefix): value for fqn, value in contents.read_records(fqns).items()}
        with suppress(ValueError):
            found[prefix.removesuffix(".") or "loader"] = read_data_position(state)
    return found


def _print_data(positions: Mapping[str, DataPosition]) -> None:
    if not positions:
        print_line("no data loader of this package")
    for name, position in positions.items():
        print_line(f"{name}: {position}")
        if position.shards:
            print()
            print_table(("shard", "epoch", "served", "left", "all epochs"), map(_position_row, position.shards))


def _position_row(one: ShardPosition) -> Sequence[object]:
    left = "-" if one.samples_left is None else f"{one.samples_left:,}"
    return one.shard, one.epoch, f"{one.served:,}", left, f"{one.total:,}"


def _key_row(key: KeySummary) -> Sequence[object]:
    kind = ("-", "-") if key.dtype is None else (key.dtype, _shape(key.sizes))
    return key.fqn, *kind, text_of_bytes(key.num_bytes), key.num_chunks


def _cell(value: Scalar) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[:_MAX_VALUE_CHARS]}..."


def _shard_rows(contents: Contents, keys: Sequence[KeySummary]) -> Iterator[Sequence[object]]:
    for key in keys:
        for chunk in contents.chunks_of(key.fqn):
            num_bytes = "-" if chunk.num_bytes is None else text_of_bytes(chunk.num_bytes)
            place = ("nowhere" if chunk.file is None else chunk.file, "-" if chunk.offset is None else chunk.offset)
            yield key.fqn, _shape(chunk.offsets), _shape(chunk.sizes), num_bytes, *place


def _shape(sizes: Sequence[int] | None) -> str:
    return "-" if sizes is None else f"[{', '.join(map(str, sizes))}]"


def _plain(contents: Contents, keys: Sequence[KeySummary], shards: bool) -> dict[str, Any]:
    values = contents.read_values([key for key in keys if not key.sizes])
    rows = [{**_plain_key(key), "value": plain_number(values.get(key.fqn))} for key in keys]
    if shards:
        for row, key in zip(rows, keys, strict=True):
            row["chunks"] = [_plain_chunk(chunk) for chunk in contents.chunks_of(key.fqn)]
    names = ("format", "step", "save_id", "world_size", "mesh", "versions", "has_checksums")
    names_of_totals = ("name", *_Total._fields[1:])
    tensors = [key for key in contents.keys if key.dtype is not None]
    return {
        "path": str(contents.path),
        **{name: getattr(contents, name) for name in names},
        "num_keys": len(contents.keys),
        "num_tensors": len(tensors),
        "tensor_bytes": sum(key.num_bytes for key in tensors),
        "data_loaders": [{"name": name, **one.to_dict()} for name, one in _data_positions(contents).items()],
        "components": [dict(zip(names_of_totals, total, strict=True)) for total in _totals(contents)],
        "files": [file._asdict() for file in contents.files],
        "keys": rows,
    }


def _plain_key(key: KeySummary) -> dict[str, Any]:
    row = {"name": key.fqn, "dtype": key.dtype, "shape": key.sizes}
    return {**row, "num_bytes": key.num_bytes, "num_chunks": key.num_chunks}


def _plain_chunk(chunk: ChunkSummary) -> dict[str, Any]:
    row = {"offsets": chunk.offsets, "sizes": chunk.sizes, "file": chunk.file}
    return {**row, "at_byte": chunk.offset, "num_bytes": chunk.num_bytes}
