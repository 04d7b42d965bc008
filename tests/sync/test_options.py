"""Options that nothing can be done with."""

from typing import Any

import pytest

from torchtitan_ext.sync.options import Options, option_problems


def test_defaults_are_good() -> None:
    assert option_problems(Options()) == []


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"buffers": "some"}, 'arguments: buffers is \'some\', expected "all", "persistent" or "none"'),
        ({"ignore": "head"}, "arguments: ignore is 'head', expected a list of names or globs"),
        ({"ignore": [3]}, "arguments: ignore is [3], expected a list of names or globs"),
        ({"src": "0"}, "arguments: src is '0', expected a coordinate"),
        ({"bucket_bytes": 0}, "bucket_bytes: got 0, expected a positive int64"),
        ({"bucket_bytes": 2**63}, f"bucket_bytes: got {2**63}, expected a positive int64"),
    ],
)
def test_what_is_wrong_is_named(wrong: dict[str, Any], text: str) -> None:
    assert [str(problem) for problem in option_problems(Options(**wrong))] == [text]
