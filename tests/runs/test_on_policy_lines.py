"""The lines about the agreement of sampler and trainer: each says what its run has, with the mark of its counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ppo_repro.config.algorithm import NoValue, PolicyGradientObjective
from ppo_repro.config.run import RunConfig
from ppo_repro.records import reader
from ppo_repro.records.notes import Accuracy
from ppo_repro.runs.results import LanguageResults, ppo_results
from ppo_repro.runs.summary import on_policy_lines
from ppo_repro.statistics.draws import NONE


@pytest.fixture(scope="module")
def results(deterministic_run: Path) -> LanguageResults:
    rows = reader.read_iterations(deterministic_run)
    found = ppo_results(deterministic_run, reader.open_manifest(deterministic_run), rows, NONE)
    assert isinstance(found, LanguageResults)
    return found


def test_a_count_decides_the_mark_of_its_line(results: LanguageResults) -> None:
    counts = replace(results.agreement, unequal_old_rollout_logprobs=3, unequal_values=2, unequal_first_ratios=1)
    kinds = {line.text: line.kind for line in on_policy_lines(replace(results, agreement=counts))}
    tokens, first = counts.tokens, counts.first_minibatch_tokens
    assert kinds[f"3 of {tokens:,} training log-probs differ from the sampler's"] == "differs"
    assert kinds[f"{first - 1:,} of {first:,} first-minibatch ratios (anchor rollout) are exactly 1"] == "differs"
    assert kinds[f"2 of {first:,} recomputed values differ from the recorded ones"] == "differs"
    assert [line.kind for line in on_policy_lines(results)[:3]] == ["holds"] * 3


def test_a_run_without_ratios_or_values_has_no_line_about_them(results: LanguageResults) -> None:
    def texts(config: RunConfig) -> str:
        return "\n".join(line.text for line in on_policy_lines(replace(results, config=config)))

    without_ratios = results.config.ppo.model_copy(
        update={"objective": PolicyGradientObjective(kind="policy_gradient")}
    )
    assert "ratios" in texts(results.config)
    assert "values" in texts(results.config)
    assert "ratios" not in texts(results.config.model_copy(update={"ppo": without_ratios}))
    assert "values" not in texts(results.config.model_copy(update={"value": NoValue(kind="none")}))


@pytest.mark.parametrize(("ratio", "kind"), [(0.5, "fact"), (1e6, "differs")])
def test_the_accuracy_beside_bfloat16_is_told_with_its_mark(results: LanguageResults, ratio: float, kind: str) -> None:
    measured = Accuracy(9, 1e-3, 2e-3, 1e-3, 2e-3, ratio, stock="bfloat16")
    told = replace(results, figures=replace(results.figures, numerical_accuracy=measured))
    (line,) = (line for line in on_policy_lines(told) if "float64" in line.text)
    assert (line.kind, "stock bfloat16 0.001" in line.text) == (kind, True)
