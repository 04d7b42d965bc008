"""Runs a script or module whose code cannot be edited, with ``tte.install()`` before it.

python -m torchtitan_ext.run script.py --its-arguments
torchrun --nproc-per-node 8 -m torchtitan_ext.run -m package.train --its-arguments
"""

from __future__ import annotations

import os
import runpy
import sys

from torchtitan_ext.integrations.install import install

_USAGE = "usage: python -m torchtitan_ext.run [-m] script_or_module [its arguments]"


def main(arguments: list[str]) -> None:
    """Runs ``script.py ...`` or ``-m module ...`` as ``__main__``."""
    is_module = arguments[:1] == ["-m"]
    rest = arguments[1:] if is_module else arguments
    if not rest or rest[0].startswith("-"):
        raise SystemExit(_USAGE)
    install()
    sys.argv = rest
    if is_module:
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        # As Python does: the script's own folder, where a link leads to; none with -P.
        if not getattr(sys.flags, "safe_path", False):
            sys.path[0] = os.path.dirname(os.path.realpath(rest[0]))
        runpy.run_path(rest[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
