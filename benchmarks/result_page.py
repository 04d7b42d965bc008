"""Puts the tables of a result file into docs/costs.md, between two markers; for the scripts that make tables."""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

Content = dict[str, Any]
"""What ``result_file.write_results`` wrote."""


def print_or_put(
    description: str | None,
    head: Callable[[Content], str],
    tables: Callable[[Content], str],
    on_page: Callable[[Content], str] | None = None,
) -> None:
    """The command line of such a script: prints the tables, or puts them with their head into a page.

    Their place in the page begins with a comment with the name of the benchmark. ``on_page`` makes the tables of the
    page where that has fewer than there are.

    Raises:
        ValueError: The page has no place for them.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--into", type=Path, help="the page that has a place for the tables")
    options = parser.parse_args()
    content = json.loads(options.results.read_text())
    if options.into is None:
        print(tables(content))
        return
    begin, end = f"<!-- tables of {content['benchmark']} -->", "<!-- end of tables -->"
    page, place = options.into.read_text(), re.compile(rf"({re.escape(begin)}\n).*?({re.escape(end)})", re.S)
    if not place.search(page):
        raise ValueError(f"the page has no {begin} and {end}")
    text = f"{head(content)}\n\n{(on_page or tables)(content)}\n"
    options.into.write_text(place.sub(lambda match: f"{match[1]}{text}{match[2]}", page))


def command_without(content: Content, option: str) -> str:
    """The command of a benchmark without an option that names a folder of the machine."""
    return re.sub(rf" {option} \S+", "", content["command"])
