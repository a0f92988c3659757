"""A metric has one name: that of its recorded column, or else of a row of the page of names."""

from __future__ import annotations

import re

import pytest

from ppo_repro.analysis.grid_outcomes import ACCURACY, MEASURES
from ppo_repro.analysis.report.data.metrics import CONTENT, Metric
from ppo_repro.config.kinds import CONTROL, DPO, LANGUAGE, Kind
from ppo_repro.records.schema import CONTROL_TABLES, DPO_TABLES, ITERATIONS, TABLES, Table
from ppo_repro.statistics.mismatch_metrics import METRICS
from tests.support.paths import ROOT

PAGE = ROOT / "ppo_repro" / "analysis" / "columns.md"


def explained(*commands: str) -> set[str]:
    """The names in the first column of the tables of these commands, and of those of several commands."""
    sections = PAGE.read_text(encoding="utf-8").split("\n## ")[1:]
    wanted = {"In several commands", *(f"`{command}`" for command in commands)}
    assert wanted <= {section.splitlines()[0] for section in sections}
    rows = [row for section in sections if section.splitlines()[0] in wanted for row in section.splitlines()]
    return {name for row in rows if row.startswith("| `") for name in re.findall(r"`(\w+)`", row.split(" | ")[0])}


def columns(*tables: Table) -> set[str]:
    return {column.name for table in tables for column in table.columns}


def test_a_measure_of_a_grid_has_the_name_of_its_column() -> None:
    averaged = {name for name, measure in MEASURES.items() if measure.averaged is not None}
    assert averaged
    assert averaged | {ACCURACY} <= columns(ITERATIONS)
    assert set(MEASURES) - averaged - {ACCURACY} <= explained("table")


def test_a_metric_of_mismatch_has_a_row_on_the_page() -> None:
    assert {metric.name for metric in METRICS} <= explained("mismatch")


@pytest.mark.parametrize(("kind", "tables"), [(LANGUAGE, TABLES), (CONTROL, CONTROL_TABLES), (DPO, DPO_TABLES)])
def test_a_metric_of_a_page_has_the_name_of_its_column(kind: Kind, tables: tuple[Table, ...]) -> None:
    content, by_name = CONTENT[kind], {table.name: columns(table) for table in tables}
    assert {line.key for line in (*content.first_chart, content.last_value, *content.totals)} <= by_name["iterations"]

    def has_name(metric: Metric) -> bool:
        if metric.source == "samples":  # recomputed
            return metric.key in by_name["iterations"] | explained("report")
        return metric.key in by_name[metric.source]

    assert [metric.key for metric in (*content.metrics, *content.by_step) if not has_name(metric)] == []
