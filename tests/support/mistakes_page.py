"""The programs of docs/use/mistakes.md, and what the page shows of them."""

import contextlib
import gc
import io
import os
import re
import tempfile
import warnings
from pathlib import Path

PATH = Path(__file__).parents[2] / "docs" / "use" / "mistakes.md"
PAGE = PATH.read_text()
_BLOCK = re.compile(r"(?<=```python\n)(.*?)(?P<between>```\n```text\n)(.*?)(?=```)", re.S)
PROGRAMS = [(code, shown) for code, _, shown in _BLOCK.findall(PAGE)]


def run(code: str) -> str:
    """What a program prints, its warnings, and the error that ends it, in a directory of its own."""
    gc.collect()  # what tests before this one left open would warn in its output
    printed, before, environment = io.StringIO(), os.getcwd(), dict(os.environ)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", module="torch")
        warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}")
        os.chdir(folder)
        try:
            exec(compile(code, "<page>", "exec"), {"__name__": "__main__"})
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
        finally:
            os.chdir(before)
            os.environ.clear()
            os.environ.update(environment)
        return printed.getvalue().replace(f"{os.path.realpath(folder)}/", "").replace(f"{folder}/", "")


def page_of_runs() -> str:
    """The page with what its programs print now."""
    return _BLOCK.sub(lambda block: block[1] + block["between"] + run(block[1]), PAGE)
