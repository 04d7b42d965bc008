"""Paths that differ between ranks are told at once, with the ranks; several names of one directory are one place."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torchtitan_ext as tte
from torchtitan_ext.checkpoint.operation.arguments import place_of, place_problems
from torchtitan_ext.elastic import Source
from torchtitan_ext.errors import ReplicaMismatchError


def problem_of(*paths: str | Path) -> str | None:
    problems = place_problems([[place_of(path)] for path in paths])
    return str(problems[0]) if problems else None


def test_names_of_one_directory_are_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "link").symlink_to(run)
    monkeypatch.chdir(run)
    assert problem_of(run / "step-1", f"{run}/step-1/", "step-1", tmp_path / "link" / "step-1") is None
    assert problem_of("gs://bucket/step-1", "gs://bucket/step-1/") is None
    mounted = ("/mnt/a/step-1", (7, "step-1")), ("/mnt/b/step-1", (7, "step-1"))
    assert place_problems([[place] for place in mounted]) == []


def test_other_directories_are_named_with_their_ranks(tmp_path: Path) -> None:
    text = problem_of(tmp_path / "a", tmp_path / "b", tmp_path / "a")
    assert text is not None and text.startswith(
        f"path: is {tmp_path}/a on ranks 0, 2, {tmp_path}/b on rank 1; pass the same path on every rank"
    )
    (tmp_path / "a").mkdir()
    assert problem_of(tmp_path / "a", tmp_path / "b") is not None
    assert problem_of("gs://bucket/step-1", "gs://bucket/step-2") is not None
    assert problem_of(tmp_path / "9:00" / "step-1", tmp_path / "9:01" / "step-1") is not None


def use_other_paths(rank: int, world_size: int, run: Path) -> list[str]:
    state = {"w": torch.full((3,), 7.0)}
    own = run / f"9:0{rank}" / "step-1"
    tte.save(state, run / "step-1")
    acts: list[Callable[[], Any]] = [
        lambda: tte.save(state, own),
        lambda: tte.save(state, storage_writer=tte.FileWriter(own)),
        lambda: tte.async_save(state, own).result(),
        lambda: tte.load(state, run / f"step-{1 + rank}"),
        lambda: tte.load(state, Source(run / f"step-{1 + rank}")),
    ]
    texts = []
    for act in acts:
        with pytest.raises(ReplicaMismatchError) as refused:
            act()
        texts.append(str(refused.value).replace(str(run), "RUN"))
    target = {"w": torch.zeros(3)}
    tte.load(target, os.path.relpath(run / "step-1") if rank else run / "step-1")
    assert target["w"].tolist() == [7.0] * 3 and not any(run.glob("9:*"))
    return texts


def test_every_operation_says_so_on_every_rank(run_world: Callable[..., Any], tmp_path: Path) -> None:
    first, second = run_world(2, use_other_paths, tmp_path)
    assert first == second
    for text in first[:3]:
        assert "Ranks disagree (1):" in text
        assert "path: is RUN/9:00/step-1 on rank 0, RUN/9:01/step-1 on rank 1; pass the same path" in text
    for text in first[3:]:
        assert "load refused" in text
        assert "path: is RUN/step-1 on rank 0, RUN/step-2 on rank 1; pass the same path" in text
