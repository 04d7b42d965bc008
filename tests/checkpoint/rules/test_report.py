"""Reports of loads: how they read."""

from torchtitan_ext.checkpoint.rules.report import ComponentLine, LoadReport
from torchtitan_ext.checkpoint.tables.component import World

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
