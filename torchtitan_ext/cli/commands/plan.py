"""``torchtitan-ext plan``: what a load of a checkpoint on another mesh, and a save there, would do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from torchtitan_ext.cli import lazy
from torchtitan_ext.cli.options import Json, Mesh, Shard, refusing_wrong_usage
from torchtitan_ext.cli.output import DIFFERS, print_json, print_text


def run(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A checkpoint of any format.")],
    mesh: Mesh,
    component: Annotated[list[str] | None, typer.Option(help="Component or glob of keys; by default all.")] = None,
    shard: Shard = None,
    policy: Annotated[
        list[str] | None, typer.Option(metavar="COMPONENT=ACTION", help="As in dataloader=reset.")
    ] = None,
    json: Json = False,
) -> None:
    """What a load on another mesh would read, and what would be refused.

    It says the same about a save there. Reads the metadata, and what RngState saved. Exits with 1 if the load would be
    refused.

    Example: torchtitan-ext plan run/step-100 --mesh dp=8,tp=2
    """
    for text in policy or ():
        if "=" not in text:
            expected = "COMPONENT=ACTION such as dataloader=reset"
            raise typer.BadParameter(f"got {text!r}, expected {expected}", param_hint="--policy")
    # The policy checks the actions.
    actions: dict[str, Any] = {name: action for name, _, action in (text.rpartition("=") for text in policy or ())}
    with refusing_wrong_usage():
        found = lazy.run.dry_run(
            path,
            mesh=lazy.placement_rules.parse_mesh(mesh),
            components=component or (),
            placements=lazy.placement_rules.parse_rules(shard or ()),
            policy=lazy.policy.ElasticPolicy(actions),
        )
    if json:
        print_json(found.to_dict())
    else:
        print_text(str(found))
    if found.problems:
        raise typer.Exit(DIFFERS)
