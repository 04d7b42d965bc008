"""The result of a dry run: plain data, and a short text."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan_ext.checkpoint.tables.component import World
from torchtitan_ext.errors import Problem, refusal
from torchtitan_ext.offline.amounts import text_of_bytes
from torchtitan_ext.offline.dry_run.host_memory import Device
from torchtitan_ext.offline.dry_run.load_forecast import LoadForecast, RankLoad
from torchtitan_ext.offline.dry_run.save_forecast import RankSave, SaveForecast
from torchtitan_ext.state.data_position import DataPosition


@dataclass(frozen=True)
class DryRun:
    """What a save and a load of a job would do. ``str`` gives a short table.

    Attributes:
        world: The ranks and the mesh of the job.
        device: Where the tensors lie: ``"cpu"``, or ``"cuda"``, which they reach through the host's memory.
        copies: How many times all ranks together hold each tensor on average: 1 if nothing is replicated.
        save: What a save would do.
        load: What a load of the checkpoint would do; ``None`` without a checkpoint.
        data: Where each data loader of the checkpoint stands, by its component.
        notes: What was assumed, or cannot be known without the job.
    """

    world: World
    device: Device
    copies: float
    save: SaveForecast
    load: LoadForecast | None
    data: Mapping[str, DataPosition]
    notes: tuple[str, ...]

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Why the load, or without a checkpoint the save, would be refused."""
        return self.save.problems if self.load is None else self.load.problems

    def to_dict(self) -> dict[str, Any]:
        """The result as plain values; the report of a load becomes its text and its remedy."""
        save = dataclasses.asdict(self.save)
        load = None
        if self.load is not None:
            report = self.load.report
            load = dataclasses.asdict(dataclasses.replace(self.load, report=None))
            load["report"] = None if report is None else {"text": str(report), "remedy": report.remedy}
        return {
            "world": {"size": self.world.size, "mesh": dict(self.world.mesh)},
            "device": self.device,
            "copies": self.copies,
            "save": save,
            "load": load,
            "data_loaders": [{"name": name, **one.to_dict()} for name, one in self.data.items()],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("", "least", "median", "most", "all ranks")]
        rows += [_row("state", [one.state_bytes for one in self.save.ranks], text_of_bytes)]
        if not self.save.problems:
            rows += [_row("save: records", [one.num_records for one in self.save.ranks], _number)]
            rows += [_row("save: file", [one.file_bytes for one in self.save.ranks], text_of_bytes)]
            rows += [_row("save: host memory", self._host_bytes(self.save.ranks), text_of_bytes)]
        if self.load is not None:
            rows += [_row("load: reads", [one.num_reads for one in self.load.ranks], _number)]
            rows += [_row("load: bytes", [one.num_bytes for one in self.load.ranks], text_of_bytes)]
            rows += [_row("load: files", [one.num_files for one in self.load.ranks], _number)]
            rows += [_row("load: host memory", self._host_bytes(self.load.ranks), text_of_bytes)]
        lines = [f"{self.world}; tensors are held {self.copies:.3g} times", *_aligned(rows), *self._sentences()]
        if self.save.problems:
            lines.append(f"A save would end with:\n{refusal('save', self.save.problems)}")
        if self.load is not None and self.load.problems:
            lines.append(f"A load would end with:\n{refusal('load', self.load.problems, self.load.report)}")
        elif self.load is not None and self.load.report is not None:
            lines.append(str(self.load.report))
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _host_bytes(self, ranks: Sequence[RankSave] | Sequence[RankLoad]) -> list[int]:
        """The peak of host memory of each rank, with the state if it lies in host memory."""
        return [one.buffer_bytes + (one.state_bytes if self.device == "cpu" else 0) for one in ranks]

    def _sentences(self) -> list[str]:
        lines = []
        if not self.save.problems:
            files = f"{self.save.num_files:,} file{'s' if self.save.num_files != 1 else ''}"
            lines.append(f"save: {files}, {self.save.num_parts:,} parts{_duration(self.save.seconds)}")
            sizes = f"{text_of_bytes(self.save.metadata_bytes)}, index {text_of_bytes(self.save.index_bytes)}"
            lines.append(f"save: then .metadata {sizes}, by rank 0{_duration(self.save.metadata_seconds)}")
        if self.load is not None:
            if self.load.metadata_bytes:
                size, duration = text_of_bytes(self.load.metadata_bytes), _duration(self.load.metadata_seconds)
                lines.append(f"load: each rank first reads metadata and index, {size}{duration}")
            whole = sum(one.whole_chunk_bytes for one in self.load.ranks)
            lines.append(
                f"load: each byte is read {self.load.amplification:.3g} times; {text_of_bytes(whole)} by a reader of "
                f"whole chunks{_duration(self.load.seconds)}"
            )
        for name, position in self.data.items():
            lines.append(f"{name}: {position}")
        return lines


def _row(title: str, values: Sequence[int], text: Callable[[int], str]) -> tuple[str, ...]:
    least, most, middle = min(values), max(values), statistics.median_low(values)
    return (title, text(least), text(middle), text(most), text(sum(values)))


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their longest cell, the first to the left."""
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    return [
        f"  {row[0]:<{first}}" + "".join(f"  {cell:>{width}}" for cell, width in zip(row[1:], others, strict=True))
        for row in rows
    ]


def _number(value: int) -> str:
    return f"{value:,}"


def _duration(seconds: float | None) -> str:
    return "" if seconds is None else f"; {seconds:.3g} seconds"
