"""The examples of docs/use/transforms.md run."""

import re
from pathlib import Path
from typing import Any

import pytest

from torchtitan_ext.transforms import Transform

PAGE = (Path(__file__).parents[2] / "docs" / "use" / "transforms.md").read_text()


@pytest.mark.nightly("pages")
def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (first,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    (text,) = re.findall(r"```json\n(.*?)```", PAGE, re.S)
    names: dict[str, Any] = {}
    exec(first, names)
    assert Transform.from_json(text) == names["transform"]
