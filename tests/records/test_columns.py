"""A line of the schema says where the numbers of its column come from, and no column is left out silently."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_type_hints

import numpy as np
import pytest

from ppo_repro import buffers
from ppo_repro.control import buffers as control
from ppo_repro.preferences.preference_pairs import Preference
from ppo_repro.preferences.training import PreferenceStep
from ppo_repro.records import arrow, schema
from tests.support import synthetic_run

LANGUAGE = {
    **get_type_hints(buffers.Iteration),
    **{
        "prompts": buffers.Prompts,
        "spans": buffers.Spans,
        "evaluation": buffers.Evaluation,
        "digests": buffers.WeightDigests,
    },
    **{"step": buffers.MinibatchUpdate, "policy": buffers.PolicyUpdate, "value": buffers.ValueUpdate},
}
CONTROL = {**get_type_hints(control.ControlIteration), "step": control.MinibatchUpdate}
PAIRS = {"step": PreferenceStep, "pair": Preference}
TABLES = [
    *((table, LANGUAGE) for table in (*schema.TABLES, schema.EVALUATIONS)),
    *((table, CONTROL) for table in schema.CONTROL_TABLES),
    *((table, PAIRS) for table in (schema.PAIRS, schema.PAIR_UPDATES, schema.PAIR_STEPS)),
    *((table, PAIRS) for table in (*schema.DPO_TABLES, *schema.DPO_SIDE_TABLES)),
    (schema.WARM_START_STEPS, {"step": buffers.WarmStartStep}),
]


@pytest.mark.parametrize(("table", "sources"), TABLES, ids=lambda value: getattr(value, "grain", ""))
def test_the_source_of_a_column_has_a_field_for_it(table: schema.Table, sources: dict[str, Any]) -> None:
    for column in table.columns:
        if column.source != "computed":
            names = {field.name for field in fields(sources[column.source])}
            assert (column.field or column.name) in names, column.name


def test_a_column_without_a_source_is_an_error() -> None:
    with pytest.raises(TypeError, match="source"):
        schema.Column("c", "int32", "", about="Any.")  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["old_logprobs", "cumulative_probs", "policy_routes"])
def test_a_column_that_nobody_gives_is_an_error_at_every_level(name: str) -> None:
    generator = np.random.default_rng(0)
    columns = {c.name: synthetic_run.random_column(c, 3, generator) for c in schema.TOKENS.columns if c.name != name}
    with pytest.raises(ValueError, match=f"table tokens, column {name}: missing"):
        arrow.to_arrow(schema.TOKENS, columns)
