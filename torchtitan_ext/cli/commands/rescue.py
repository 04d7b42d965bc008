"""``torchtitan-ext rescue``."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from torchtitan_ext.cli import lazy, options
from torchtitan_ext.cli.output import MAX_NAMED, count_of, print_json, print_line, text_of_bytes
from torchtitan_ext.errors import named
from torchtitan_ext.storage.progress import progress


def run(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A checkpoint of stock.", parser=options.local_path)],
    target: Annotated[Path, typer.Argument(metavar="DST", help="A new directory.", parser=options.local_path)],
    mesh: options.Mesh,
    shard: options.Shard = None,
    only: options.Only = None,
    max_memory: options.MaxMemory = "1GB",
    processes: options.Processes = None,
    json: options.Json = False,
) -> None:
    """Write anew what stock has described wrongly, or say what of it is lost. MESH is the one that saved.

    Example: torchtitan-ext rescue run/step-100 whole/step-100 --mesh dp=4,tp=2
    """
    selection = lazy.selection.Selection(tuple(only or ()))
    with options.refusing_wrong_usage():
        sizes, rules = lazy.placement_rules.parse_mesh(mesh), lazy.placement_rules.parse_rules(shard or ())
        opened = lazy.misdescribed.RescuedFiles(source, sizes, rules)
        total_bytes = partial(selection.num_bytes_of, opened)
        with progress("rescue", is_coordinator=True, total_bytes=total_bytes) as on_bytes:
            report = lazy.convert.convert(
                opened,
                target,
                to="dcp",
                selection=selection,
                max_bytes=options.amount_of(max_memory),
                num_processes=processes,
                progress=on_bytes,
            )
    rescued = [fqn for fqn in opened.rescued if fqn in selection.keys_of(opened)]
    if json:
        print_json({**dataclasses.asdict(report), "path": str(target), "rescued": rescued})
        return
    print_line(f"{target}: {count_of(report.num_keys, 'key')}, {text_of_bytes(report.num_bytes)}")
    print_line(f"rescued {count_of(len(rescued), 'tensor')}: {named(rescued, MAX_NAMED)}")
