"""``torchtitan-ext verify``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer

from torchtitan_ext.cli import lazy, output
from torchtitan_ext.cli.options import Json, StepNames, refusing_wrong_usage
from torchtitan_ext.errors import UnknownFormatError, named
from torchtitan_ext.storage.checkpoint_files import data_file_bytes, thread_count_of
from torchtitan_ext.storage.commit.steps import has_finished, step_paths
from torchtitan_ext.storage.formats.detect import checkpoints_in, format_of
from torchtitan_ext.storage.inspect.dcp_damage import Verdict
from torchtitan_ext.storage.inspect.verify import verify
from torchtitan_ext.storage.location import Location, Place, place_at
from torchtitan_ext.storage.objects.folder import ObjectFolder
from torchtitan_ext.storage.progress import progress
from torchtitan_ext.storage.runs.object_runs import object_steps

_MAX_UNPROVED = 4

# What all threads of a proof hold of tensors together.
_MAX_BYTES = 256 << 20


def run(
    path: Annotated[
        Any,
        typer.Argument(
            metavar="PATH|RUN", help="A checkpoint, or a run with step-<number> in it, also by URL.", parser=place_at
        ),
    ],
    deep: Annotated[bool, typer.Option("--deep", help="Read every byte and compare its checksum.")] = False,
    prove: Annotated[
        bool, typer.Option("--prove", help="Read every tensor and compare it with the fingerprints of the save.")
    ] = False,
    step_pattern: StepNames = None,
    json: Json = False,
) -> None:
    """Whether a checkpoint, or each of a run, is whole: all files, of their sizes, of one save.

    Exits with 1 if one is damaged, with 3 if files cannot be read, or have no fingerprints to prove by.

    Example: torchtitan-ext verify outputs/checkpoint/step-100 --deep
    """
    with refusing_wrong_usage():
        steps = _steps_of(path, step_pattern)
    if steps is None:
        found = [_look(path, deep, prove)]
        if json:
            output.print_json(_plain(found[0]))
        else:
            _print(found[0], prove)
    else:
        found = _verify_run(path, steps, deep, prove, json)
    if any(one.is_damaged for one in found):
        raise typer.Exit(output.DIFFERS)
    if any(one.damages or (prove and one.num_proved is None) for one in found):
        raise typer.Exit(output.UNREADABLE)


def _verify_run(run_dir: Place, steps: Mapping[int, Place], deep: bool, prove: bool, json: bool) -> list[Verdict]:
    rows = []
    found = []
    for number, step in sorted(steps.items()):
        # A step that is no checkpoint itself may contain checkpoints.
        for place in _checkpoints_at(step):
            one = _look(place, deep, prove)
            found.append(one)
            rows.append({"step": number, "is_finished": True, **_plain(one)})
            if not json:
                _print(one, prove)
        if not rows or rows[-1]["step"] != number:
            rows.append({"step": number, "is_finished": False, "path": str(step)})
            if not json:
                output.print_line(f"{step}: not finished")
    if json:
        is_whole = not any(one.damages for one in found)
        output.print_json({"path": str(run_dir), "is_whole": is_whole, "steps": rows})
    return found


def _checkpoints_at(step: Place) -> Sequence[Place]:
    """The checkpoint that a step is, or those that are in it."""
    if isinstance(step, Location):
        return [step] if ObjectFolder(step).stamp(".metadata") is not None else []
    return [step] if has_finished(step) else [step / name for name in checkpoints_in(step)]


def _data_bytes(path: Place) -> int:
    if isinstance(path, Location):
        return sum(stamp.num_bytes for stamp in ObjectFolder(path).stamps().values())
    return path.stat().st_size if path.is_file() else sum(data_file_bytes(path).values())


def _steps_of(path: Place, pattern: str | None) -> Mapping[int, Place] | None:
    """The steps of a run; ``None`` if the path is a checkpoint itself."""
    try:
        format_of(path)
    except UnknownFormatError:
        steps = object_steps(path, pattern) if isinstance(path, Location) else step_paths(path, pattern)
        if not steps:
            raise
        return steps
    return None


def _look(path: Place, deep: bool, prove: bool) -> Verdict:
    if not deep and not prove:
        return verify(path)
    num_bytes = _data_bytes(path)
    total_bytes = (deep + prove) * num_bytes
    with progress(path.name, is_coordinator=True, total_bytes=lambda: total_bytes) as on_bytes:
        verdict = verify(path, is_deep=deep, on_bytes=on_bytes if deep else lambda _: None)
        if prove and not verdict.damages:
            with suppress(FileNotFoundError):  # each rank has metadata of its own
                return lazy.fingerprints.prove_checkpoint(
                    verdict, max_bytes=_MAX_BYTES, num_threads=thread_count_of(None), progress=on_bytes
                )
    return verdict


def _print(verdict: Verdict, prove: bool) -> None:
    size = f"{output.count_of(verdict.num_files, 'file')} of {output.text_of_bytes(verdict.num_bytes)}"
    if not verdict.damages:
        look = "all checksums match" if verdict.is_deep and not verdict.unproved else "sizes and ids"
        look += "" if verdict.num_proved is None else f"; {output.count_of(verdict.num_proved, 'tensor')} proved"
        output.print_line(f"{verdict.path}: whole ({size}; {look})")
    elif verdict.is_damaged:
        output.print_line(f"{verdict.path}: {output.count_of(len(verdict.damages), 'damage')} ({size})")
        for damage in verdict.damages:
            output.print_line(f"  {damage.what}")
    else:
        for damage in verdict.damages:
            output.print_problem(damage.what)
    if verdict.unproved:
        output.print_line(f"  no checksum of all bytes: {named(verdict.unproved, _MAX_UNPROVED)}")
    if prove and not verdict.damages and verdict.num_proved is None:
        output.print_line("  nothing is proved: it has no fingerprints, which tte.save(..., fingerprints=True) stores")
    elif verdict.without_fingerprints:
        output.print_line(f"  no fingerprint: {named(verdict.without_fingerprints, _MAX_UNPROVED)}")


def _plain(verdict: Verdict) -> dict[str, Any]:
    return {
        "path": str(verdict.path),
        "format": verdict.format,
        "is_whole": not verdict.damages,
        "is_deep": verdict.is_deep,
        "num_files": verdict.num_files,
        "num_bytes": verdict.num_bytes,
        "damages": [{"file": one.file, "kind": one.kind, "what": one.what} for one in verdict.damages],
        "without_checksums": list(verdict.unproved),
        "num_proved": verdict.num_proved,
        "without_fingerprints": list(verdict.without_fingerprints),
    }
