"""Reports of loads: how they read, and how those of several sources become one."""

from torchtitan_ext.checkpoint.rules.load_rules import UNTOUCHED
from torchtitan_ext.checkpoint.rules.report import ComponentLine, LoadReport, join_reports
from torchtitan_ext.checkpoint.tables.component import World
from torchtitan_ext.errors import Problem

OLD, NEW = World(8, {"dp": 4, "tp": 2}), World(16, {"dp": 16})


def report(*lines: ComponentLine, **parts: tuple[str, ...]) -> LoadReport:
    return LoadReport(OLD, NEW, lines, **parts)  # type: ignore[arg-type]


def test_a_report_is_a_table_with_what_is_missing_below() -> None:
    text = str(
        report(
            ComponentLine("model", "reshard", "30 entries"),
            ComponentLine("dataloader", "reset", "starts anew"),
            missing=tuple(f"model.{index}" for index in range(12)),
        )
    )
    assert text.splitlines() == [
        "saved by 8 ranks (dp 4 x tp 2), loaded by 16 ranks (dp 16)",
        "  model       reshard  30 entries",
        "  dataloader  reset    starts anew",
        "  missing: " + ", ".join(f"model.{index}" for index in range(10)) + " and 2 more",
    ]


def test_one_report_is_itself() -> None:
    one = report(ComponentLine("model", "reshard", "1 entry"))
    assert join_reports([("base", one)]) is one


def test_lines_of_several_sources_name_where_things_come_from() -> None:
    base = report(
        ComponentLine("model", "reshard", "30 entries"), ComponentLine("lora", "reshard", UNTOUCHED), unused=("x", "y")
    )
    adapter = report(
        ComponentLine("model", "reshard", UNTOUCHED), ComponentLine("lora", "reshard", "4 entries"), unused=("x",)
    )
    joined = join_reports([("base", base), ("adapter", adapter)])
    assert [line.outcome for line in joined.components] == ["30 entries from base", "4 entries from adapter"]
    assert joined.unused == ("x",), "what one of the sources has was not named in vain"


def test_problems_of_all_sources_are_kept() -> None:
    problems = [Problem("missing_key", name, "no") for name in "ab"]
    parts = [LoadReport(OLD, NEW, (), problems=(problem,)) for problem in problems]
    assert join_reports([("1", parts[0]), ("2", parts[1])]).problems == tuple(problems)
