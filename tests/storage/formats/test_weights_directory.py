"""Safetensors files that replace those of a directory: whole at every moment, beside files of others."""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from torchtitan_ext.offline.rewrite.convert import convert
from torchtitan_ext.offline.sources import open_source
from torchtitan_ext.storage.commit import staged_target
from torchtitan_ext.storage.formats.weights_directory import replace_weights

INDEX = "model.safetensors.index.json"


def make(directory: Path, number: int, num_files: int) -> Path:
    """A directory of four tensors, whose values are this number."""
    directory.mkdir()
    state = {f"w{key}": torch.full((2,), float(number)) for key in range(4)}
    names = ["model.safetensors"]
    if num_files > 1:
        names = [f"model-{file:05}-of-{num_files:05}.safetensors" for file in range(1, num_files + 1)]
        weight_map = {key: names[position % num_files] for position, key in enumerate(state)}
        (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    for position, name in enumerate(names):
        save_file({key: state[key] for key in list(state)[position::num_files]}, directory / name)
    return directory


def read_as_hugging_face(directory: Path) -> dict[str, torch.Tensor]:
    if (directory / "model.safetensors").exists():
        return load_file(directory / "model.safetensors")
    weight_map = json.loads((directory / INDEX).read_text())["weight_map"]
    return {key: load_file(directory / name)[key] for key, name in weight_map.items()}


def read_as_we(directory: Path) -> dict[str, torch.Tensor]:
    source = open_source(directory)
    place = directory.with_name("read")
    convert(source, place, to="dcp", num_processes=1, overwrite=True)
    state = {key: torch.zeros(tensor.shape) for key, tensor in source.state.tensors.items()}
    dcp.load(state, checkpoint_id=place, no_dist=True)
    return state


def number_in(state: dict[str, torch.Tensor]) -> float:
    assert state.keys() == {"w0", "w1", "w2", "w3"}
    (number,) = set(torch.cat(list(state.values())).tolist())
    return float(number)


class KilledError(Exception):
    """Stands for a kill."""


@contextmanager
def killed_at(step: int) -> Iterator[list[str]]:
    """Kills who changes names for the n-th time."""
    done: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("rename", "replace", "link", "unlink"):
            original = getattr(os, name)

            def counted(*args: object, name: str = name, original: object = original) -> None:
                if len(done) == step:
                    raise KilledError
                done.append(name)
                original(*args)  # type: ignore[operator]

            patch.setattr(os, name, counted)
        yield done


@pytest.mark.parametrize("num_old", [1, 2, 3])
@pytest.mark.parametrize("num_new", [1, 2, 3])
def test_a_kill_leaves_the_old_tensors_or_the_new_ones_whole(tmp_path: Path, num_old: int, num_new: int) -> None:
    seen = set()
    for step in range(100):
        old, new = make(tmp_path / f"old{step}", 1, num_old), make(tmp_path / f"new{step}", 2, num_new)
        (old / "config.json").write_text("{}")
        (old / "onnx").mkdir()
        try:
            with killed_at(step):
                replace_weights(new, old)
        except KilledError:
            is_done = False
        else:
            is_done = True
        found = number_in(read_as_hugging_face(old)), number_in(read_as_we(old))
        seen.add(found)
        assert (old / "config.json").read_text() == "{}" and (old / "onnx").is_dir()
        replace_weights(make(tmp_path / f"third{step}", 3, num_new), old)
        names = {path.name for path in make(tmp_path / f"fourth{step}", 3, num_new).iterdir()}
        assert {path.name for path in old.iterdir()} == names | {"config.json", "onnx"}
        assert number_in(read_as_hugging_face(old)) == number_in(read_as_we(old)) == 3
        if is_done:
            assert found == (2, 2)
            break
    assert step > 6 and {(1, 1), (2, 2)} <= seen


@pytest.mark.parametrize("num_new", [1, 3])
def test_a_directory_without_tensors_gets_them(tmp_path: Path, num_new: int) -> None:
    target = tmp_path / "a"
    target.mkdir()
    (target / "tokenizer.json").write_text("{}")
    replace_weights(make(tmp_path / "b", 2, num_new), target)
    assert number_in(read_as_hugging_face(target)) == number_in(read_as_we(target)) == 2
    assert (target / "tokenizer.json").exists()


@pytest.mark.parametrize("others", [(), ("config.json",)])
def test_file_systems_without_exchange_and_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: tuple[str, ...]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "not supported")

    monkeypatch.setattr(staged_target._core, "exchange_paths", refuse)
    monkeypatch.setattr(os, "link", refuse)
    old = make(tmp_path / "a", 1, 2)
    for name in others:
        (old / name).touch()
    for num_new in (2, 1, 2):
        replace_weights(make(tmp_path / f"b{num_new}{len(list(tmp_path.iterdir()))}", 2, num_new), old)
        assert number_in(read_as_hugging_face(old)) == number_in(read_as_we(old)) == 2
        assert len(list(old.glob("*.safetensors"))) == num_new


def test_damaged_files_are_replaced(tmp_path: Path) -> None:
    old = make(tmp_path / "a", 1, 1)
    (old / "config.json").touch()
    os.truncate(old / "model.safetensors", 20)
    replace_weights(make(tmp_path / "b", 2, 1), old)
    assert number_in(read_as_hugging_face(old)) == number_in(read_as_we(old)) == 2
