"""Writes what the commands of docs/use/tutorial.md print into the page: python docs/make_tutorial.py."""

import os
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

import tutorial_page as page

with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    os.symlink(page.ROOT / "examples", "examples")
    page.PATH.write_text(page.page_of({command: page.run(command) for command, _ in page.STEPS}))
