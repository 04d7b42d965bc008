"""Commands, called in this process or in one of their own, and the checkpoints that they are tried on."""

import contextlib
import io
import json
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import warm_processes
from checkpoints import without_metadata
from safetensors.torch import save_file

import torchtitan_ext as tte
from torchtitan_ext.cli.app import main
from torchtitan_ext.storage import FileWriter

STATE: dict[str, Any] = {
    "layers.0.wq": torch.arange(2_000_000, dtype=torch.float32).view(2000, 1000),
    "layers.0.norm": torch.ones(1000, dtype=torch.bfloat16),
    "layers.1.norm": torch.ones(1000, dtype=torch.bfloat16),
    "step": torch.tensor(7),
    "note": "not a tensor",
}


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def call(*arguments: object) -> Done:
    """A command in this process."""
    out, err, argv = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["torchtitan-ext", *map(str, arguments)]
    code = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            try:
                main()
            except SystemExit as end:
                code = int(end.code or 0)
    finally:
        sys.argv = argv
    return Done(code, out.getvalue(), err.getvalue())


def shown(done: Done) -> str:
    """What a reader sees of a command."""
    code = f"exit code {done.code}\n" if done.code else ""
    return done.out + done.err + code


def call_process(*arguments: object) -> Done:
    """A command as a process."""
    done = warm_processes.run(["-m", "torchtitan_ext", *arguments], capture_output=True)
    return Done(done.returncode, done.stdout, done.stderr)


def call_importing(modules: set[str], *arguments: object) -> tuple[Done, set[str]]:
    """A command as a process, and which of these modules it has imported."""
    code = (
        f"import sys; sys.argv = {['torchtitan-ext', *map(str, arguments)]!r}\n"
        "from torchtitan_ext.cli.app import main\n"
        "try: main()\n"
        f"finally: print(*{modules!r} & set(sys.modules), sep=',')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    *lines, imported = done.stdout.splitlines(keepends=True)
    return Done(done.returncode, "".join(lines), done.stderr), set(filter(None, imported.strip().split(",")))


def make(path: Path, kind: str, state: dict[str, Any] = STATE) -> Path:
    """A checkpoint of a kind."""
    tensors = {fqn: value for fqn, value in state.items() if isinstance(value, torch.Tensor)}
    if kind == "stock":
        dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    elif kind in ("ours", "ours without .metadata"):
        tte.save(dict(state), storage_writer=FileWriter(path, sync=False), no_dist=True)
        if kind != "ours":
            without_metadata(path)
    elif kind == "safetensors directory":
        save_directory(path, tensors)
    elif kind == "safetensors":
        save_file(tensors, path)
    elif kind == "torch":
        torch.save(state, path)
    else:
        raise ValueError(kind)
    return path


def save_directory(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Two files and their index, as Hugging Face has them."""
    path.mkdir()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[:1], names[1:])):
        file = f"model-{number + 1:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, path / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def flip(path: Path, position: int) -> None:
    """Changes a bit of a byte; counted from the end where negative."""
    with path.open("r+b") as stream:
        at = stream.seek(position, os.SEEK_SET if position >= 0 else os.SEEK_END)
        (byte,) = stream.read(1)
        stream.seek(at)
        stream.write(bytes([byte ^ 1]))


def patch_metadata(path: Path, change: Callable[[Any], object]) -> None:
    """Writes a stock checkpoint's ``.metadata`` anew, changed."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
