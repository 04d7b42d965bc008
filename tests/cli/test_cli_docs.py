"""docs/use/command_line.md: its examples print what they show, and its tables of JSON keys are complete.

A block ``console`` is run, here, in a directory with the runs that ``runs`` makes; a block ``text`` is only shown.
"""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import call, flip, shown
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import torchtitan_ext as tte
from torchtitan_ext.elastic import ElasticDataLoader, Streams

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "use" / "command_line.md").read_text()
SECTIONS = dict(re.findall(r"^## `(\w+)[^\n]*\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))
EXAMPLES = re.findall(r"```console\n(.*?)```", PAGE, re.S)


def save_runs(rank: int, world_size: int, place: Path) -> None:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp_shard",))
    model = {
        "tok_embeddings.weight": distribute_tensor(torch.zeros(1000, 64), mesh, [Shard(0)]),
        "layers.0.norm.weight": distribute_tensor(torch.ones(64), mesh, [Shard(0)]),
        "layers.0.wq.weight": distribute_tensor(torch.zeros(64, 64, dtype=torch.bfloat16), mesh, [Shard(0)]),
    }
    for run in ("checkpoint", "damaged"):
        for step in (100, 200, 300):
            tte.save({"model": model, "step": step}, place / "outputs" / run / f"step-{step}")
    source = Streams(lambda shard, num_shards, epoch: iter(range(shard, 998, num_shards)), num_shards=4)
    loader = ElasticDataLoader(source, global_batch_size=16, dp_rank=rank, dp_size=world_size, uneven=True, last="pad")
    epochs = [len(list(loader)) for _ in range(2)]
    next(iter(loader))
    assert epochs == [63, 63]
    tte.save({"model": model, "dataloader": loader}, place / "outputs" / "elastic" / "step-127")


@pytest.fixture(scope="module")
def runs(world_pool: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place: Path = tmp_path_factory.mktemp("docs")
    world_pool.run(2, save_runs, place)
    flip(place / "outputs" / "damaged" / "step-200" / "__1_0.distcp", 30_000)
    (place / "outputs" / "damaged" / "step-100" / "__0_0.distcp").unlink()
    return place


def plain(text: str) -> list[str]:
    """Lines without what differs from machine to machine: ids, dates, versions, sizes, and the columns' widths."""
    text = re.sub(r"[0-9a-f]{32}", "<id>", text)
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", "<date>", text)
    text = re.sub(r"torch \d[\w.+]*", "torch <version>", text)
    text = re.sub(r"\b\d+(\.\d)? [kM]?B\b", "<size>", text)
    return [re.sub(r" +", " ", line).strip() for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.splitlines()[0])
def test_an_example_prints_what_the_page_shows(runs: Path, example: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)
    command, _, output = example.partition("\n")
    assert command.startswith("$ torchtitan-ext ")
    assert plain(shown(call(*shlex.split(command)[2:]))) == plain(output)


def paths_of(value: Any, path: str = "") -> set[str]:
    """``steps[].path`` for the keys of a JSON document."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return set().union(*(paths_of(member, f"{path}[]") for member in value))
    if not isinstance(value, dict) or path in ("mesh", "versions"):
        return {path}
    return set().union(*(paths_of(member, f"{path}.{key}".strip(".")) for key, member in value.items()))


JSON_CALLS = {
    "inspect": ["outputs/elastic/step-127", "--shards"],
    "verify": ["outputs/damaged/step-200", "--deep"],
    "ls": ["outputs/checkpoint"],
    "latest": ["outputs/checkpoint"],
    "gc": ["outputs/checkpoint", "--keep", "1"],
    "diff": ["outputs/checkpoint/step-100", "outputs/checkpoint/step-200"],
    "reshard": ["outputs/checkpoint/step-100", "json/step-100", "--mesh", "dp_shard=4"],
    "convert": ["outputs/checkpoint/step-100", "json/exported", "--to", "safetensors"],
    "doctor": [],
}


@pytest.mark.parametrize("command", JSON_CALLS)
def test_every_key_of_the_json_is_documented(runs: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)
    rows = re.findall(r"^\| (`.*?) \|", PAGE.partition("\n## ")[0] + SECTIONS[command], re.M)
    documented = {name for row in rows for name in re.findall(r"`([\w.\[\]]+)`", row)}
    assert paths_of(call(command, *JSON_CALLS[command], "--json").json) <= documented
