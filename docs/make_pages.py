"""Writes what their programs print into docs/use/tutorial.md and mistakes.md, and what the classes say into
docs/reference/errors.md: python docs/make_pages.py."""

import os
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))

import errors_page
import mistakes_page
import tutorial_page

errors_page.PATH.write_text(errors_page.page_of_classes())
mistakes_page.PATH.write_text(mistakes_page.page_of_runs())
with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    os.symlink(tutorial_page.ROOT / "examples", "examples")
    printed = {command: tutorial_page.run(command) for command, _ in tutorial_page.STEPS}
    tutorial_page.PATH.write_text(tutorial_page.page_of(printed))
