"""``torchtitan-ext reshard``."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from torchtitan_ext import clock
from torchtitan_ext.cli import lazy, options
from torchtitan_ext.cli.output import count_of, print_json, print_line, text_of_bytes
from torchtitan_ext.storage.progress import progress


def run(
    source: options.Source,
    target: Annotated[Path, typer.Argument(metavar="DST", help="Directory of the new one.", parser=options.local_path)],
    mesh: options.Mesh,
    shard: options.Shard = None,
    only: options.Only = None,
    prefix: options.Prefix = "",
    transform: options.TransformFile = None,
    max_memory: options.MaxMemory = "1GB",
    processes: options.Processes = None,
    overwrite: options.Overwrite = False,
    json: options.Json = False,
) -> None:
    """Write a checkpoint as another mesh would save it. DST is whole or as it was.

    Example: torchtitan-ext reshard run/step-100 new/step-100 --mesh dp=8,tp=2
    """
    begin = clock.now()
    selection = lazy.selection.Selection(tuple(only or ()), prefix)
    with options.refusing_wrong_usage():
        sizes, rules = lazy.placement_rules.parse_mesh(mesh), lazy.placement_rules.parse_rules(shard or ())
        opened = options.transformed(lazy.sources.open_source(source), transform)
        total_bytes = partial(selection.num_bytes_of, opened)
        with progress("reshard", is_coordinator=True, total_bytes=total_bytes) as on_bytes:
            report = lazy.reshard.reshard(
                opened,
                target,
                mesh=sizes,
                rules=rules,
                selection=selection,
                overwrite=overwrite,
                max_bytes=options.amount_of(max_memory),
                num_processes=processes,
                progress=on_bytes,
            )
    seconds = clock.now() - begin
    if json:
        print_json({**dataclasses.asdict(report), "path": str(target), "seconds": seconds})
        return
    keys, ranks = count_of(report.num_keys, "key"), count_of(report.num_ranks, "rank")
    print_line(f"{target}: {keys}, {text_of_bytes(report.num_bytes)} for {ranks}")
    if report.assumed:
        print_line(
            f"nothing says which dim tp cuts of {count_of(len(report.assumed), 'tensor')}, for example "
            f"{report.assumed[0]}: dim 0 was taken; state it with --shard"
        )
