"""`.metadata` of Llama 405B with AdamW (parameters, exp_avg, exp_avg_sq on dp x tp 8): ours against Python's pickle.

    python benchmarks/bench_metadata.py                    256 and 1,024 ranks, and results/metadata_<machine>.json
    python benchmarks/bench_metadata.py --ranks 64 --stock-ranks 64

Timed, in CPU seconds, the best of three:
  write    from the encoded records of all ranks to the bytes of the file; stock: a dict of dataclasses is made of them
           and pickled, as its FileSystemWriter does from the ranks' results
  read     from the bytes to a Metadata of which one rank's parts are looked up; stock: pickle.loads and the same
  stock's  the same read of the file that stock wrote
Stock is run up to --stock-ranks ranks. Nothing touches a disk.
"""

import argparse
import gc
import pickle
import time
from collections.abc import Callable
from typing import Any

import torch
from llama_405b import list_tensors
from result_file import write_results
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from torchtitan_ext import _core
from torchtitan_ext.storage.metadata.metadata_file import encode_metadata, parse_metadata

TP = 8
CHECKED_RANKS = 256  # files of more are not compared: each copy of the objects takes gigabytes
PARTS = ("", ".exp_avg", ".exp_avg_sq")


def shards(shape: tuple[int, ...], placements: Any, num_ranks: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes per rank; () where another rank writes the rank's replica."""
    dp, found = num_ranks // TP, []
    for rank in range(num_ranks):
        offsets, sizes = [0] * len(shape), list(shape)
        is_first = True
        for (dim, _), (position, parts) in zip(reversed(placements), ((rank % TP, TP), (rank // TP, dp)), strict=True):
            if dim < 0:
                is_first = is_first and position == 0
                continue
            step = -(-sizes[dim] // parts)
            begin = min(position * step, sizes[dim])
            offsets[dim], sizes[dim] = offsets[dim] + begin, min(step, sizes[dim] - begin)
        found.append((tuple(offsets), tuple(sizes)) if is_first and 0 not in sizes else ((), ()))
    return found


def make_save(num_ranks: int) -> tuple[Metadata, list[_core.RankFile]]:
    """What planner and ranks give to `finish`."""
    records: list[list[tuple[Any, ...]]] = [[] for _ in range(num_ranks)]
    entries: dict[str, Any] = {}
    known: dict[Any, Any] = {}
    for fqn, shape, placements in list_tensors(TP):
        if (shape, placements) not in known:
            boxes = shards(shape, placements, num_ranks)
            written = [(rank, box) for rank, box in enumerate(boxes) if box[0] or not shape]
            chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for _, (offsets, sizes) in written]
            known[shape, placements] = (written, chunks, TensorProperties(), torch.Size(shape))
        written, chunks, properties, size = known[shape, placements]
        for part in PARTS:
            entries[fqn + part] = TensorStorageMetadata(properties, size, chunks)
            for position, (rank, (offsets, sizes)) in enumerate(written):
                num_bytes = 4 * torch.Size(sizes).numel() + 1024
                records[rank].append((fqn + part, offsets, position, sizes, num_bytes))
    paths = {fqn: ("model", *fqn.split(".")) for fqn in entries}
    metadata = Metadata(entries, paths, storage_meta=StorageMeta("/run/step-1", "0" * 32), version=CURRENT_DCP_VERSION)
    return metadata, [encode_file(rank, rows) for rank, rows in enumerate(records)]


def encode_file(rank: int, rows: list[tuple[Any, ...]]) -> _core.RankFile:
    """The records of a rank as docs/format.md says."""
    out = bytearray(
        (1).to_bytes(4, "little") + (7).to_bytes(4, "little") + b"float32" + len(rows).to_bytes(8, "little")
    )
    end = 0
    for fqn, offsets, position, sizes, num_bytes in rows:
        name = fqn.encode()
        out += len(name).to_bytes(4, "little") + name + bytes([3, len(sizes), 0, 0])
        for value in (position, end, num_bytes, end + 1024, *offsets, *sizes):
            out += value.to_bytes(8, "little")
        end += num_bytes
    return _core.RankFile(f"__{rank}_0.distcp", rank, end, end, 0, bytes(out))


def stock_write(metadata: Metadata, files: list[_core.RankFile]) -> bytes:
    storage_data = {}
    for file in files:
        for one in _core.parse_records(file):
            storage_data[MetadataIndex(one.fqn, one.offsets, one.index)] = _StorageInfo(
                file.name, one.offset, one.num_bytes
            )
    metadata.storage_data = storage_data
    return pickle.dumps(metadata)


def look_up(metadata: Metadata, wanted: list[MetadataIndex]) -> None:
    for place in wanted:
        metadata.storage_data[place]
        metadata.state_dict_metadata[place.fqn]


def seconds(act: Callable[[], Any], num_repeats: int = 3) -> float:
    best = float("inf")
    for _ in range(num_repeats):
        gc.collect()
        gc.disable()
        begin = time.process_time()
        result = act()
        best = min(best, time.process_time() - begin)
        gc.enable()
        del result
    return best


def measure(num_ranks: int, stock_ranks: int) -> dict[str, Any]:
    metadata, files = make_save(num_ranks)
    content = encode_metadata(metadata, files)
    wanted = [place for place, info in metadata.storage_data.items() if info.relative_path == files[0].name]
    result: dict[str, Any] = {
        "num_ranks": num_ranks,
        "num_parts": len(metadata.storage_data),
        "file_bytes": len(content),
        "records_bytes": sum(len(file.records) for file in files),
        "write_seconds": seconds(lambda: encode_metadata(metadata, files)),
        "read_seconds": seconds(lambda: look_up(parse_metadata(content), wanted)),
    }
    if num_ranks > stock_ranks:
        return result
    stock_content = stock_write(metadata, files)
    if num_ranks <= CHECKED_RANKS:
        loaded = pickle.loads(content)
        assert loaded == pickle.loads(stock_content) and parse_metadata(content) == loaded
        del loaded
    result |= {
        "stock_file_bytes": len(stock_content),
        "stock_write_seconds": seconds(lambda: stock_write(metadata, files), 1),
        "stock_read_seconds": seconds(lambda: look_up(pickle.loads(stock_content), wanted), 1),
        "pickle_read_of_ours_seconds": seconds(lambda: look_up(pickle.loads(content), wanted), 1),
        "read_stocks_seconds": seconds(lambda: look_up(parse_metadata(stock_content), wanted)),
    }
    return result


def print_row(row: dict[str, Any]) -> None:
    def rate(name: str, num_bytes: str = "file_bytes") -> str:
        if name not in row:
            return "-"
        return f"{row[name]:7.2f} s ({row[num_bytes] / row[name] / 1e9:.2f} GB/s)"

    print(f"{row['num_ranks']:,} ranks, {row['num_parts']:,} parts")
    print(f"  file   ours {row['file_bytes'] / 1e6:.0f} MB, stock {row.get('stock_file_bytes', 0) / 1e6:.0f} MB")
    print(f"  write  ours {rate('write_seconds')}, pickle {rate('stock_write_seconds', 'stock_file_bytes')}")
    print(f"  read   ours {rate('read_seconds')}, pickle {rate('pickle_read_of_ours_seconds')}")
    print(f"  stock's file: ours {rate('read_stocks_seconds', 'stock_file_bytes')}, ", end="")
    print(f"pickle {rate('stock_read_seconds', 'stock_file_bytes')}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--stock-ranks", type=int, default=1024, help="the most ranks that stock is run for")
    arguments = parser.parse_args()
    rows = []
    for num_ranks in arguments.ranks:
        rows.append(measure(num_ranks, arguments.stock_ranks))
        print_row(rows[-1])
    path = write_results("metadata", sizes={"tp": TP}, results=rows)
    print(f"\nwritten: benchmarks/results/{path.name}")


if __name__ == "__main__":
    main()
