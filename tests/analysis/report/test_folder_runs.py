"""How a page names the settings of a folder's runs, and which results it compares."""

from __future__ import annotations

import pytest

from ppo_repro.analysis.report.data.folder_runs import setting_names, shared_results
from ppo_repro.analysis.report.data.metrics import CONTENT


@pytest.mark.parametrize(
    ("texts", "labels", "names"),
    [
        (["lr=1", "lr=2"], [["", ""], [""]], ["lr=1", "lr=2"]),
        (["lr=1", "lr=2"], [["small", "small"], [""]], ["small", "lr=2"]),
        (["lr=1", "lr=2"], [["small", ""], ["big"]], ["lr=1", "big"]),  # a label of some runs
        (["lr=1", "lr=2"], [["mine"], ["mine"]], ["lr=1", "lr=2"]),  # one label for two settings
        (["lr=1", "lr=2"], [["lr=2"], [""]], ["lr=1", "lr=2"]),  # a label that is the other setting's text
        ([""], [["", ""]], ["sums"]),  # nothing differs
        ([""], [["mine", "mine"]], ["mine"]),
    ],
)
def test_a_setting_is_named_by_its_label_else_its_text_else_its_experiment(
    texts: list[str], labels: list[list[str]], names: list[str]
) -> None:
    assert setting_names(texts, labels, ["sums"] * len(texts)) == names


ACCURACY, SCORE = "eval_accuracy", "eval_score"


@pytest.mark.parametrize(
    ("finals", "is_judged", "keys"),
    [
        ([{ACCURACY: 0.5, SCORE: 0.7}, {ACCURACY: 0.6, SCORE: 0.9}], True, [ACCURACY, SCORE]),
        ([{ACCURACY: 0.5, SCORE: 0.5}, {ACCURACY: 0.6, SCORE: 0.6}], True, [ACCURACY]),  # the scores are accuracies
        ([{ACCURACY: 0.5, SCORE: 0.5}, {ACCURACY: 0.6, SCORE: 0.6}], False, [SCORE]),
        ([{ACCURACY: 0.5, SCORE: 0.7}, {SCORE: 0.9}], True, [SCORE]),  # a result of some runs
        ([{ACCURACY: 0.5}, {SCORE: 0.9}], True, ["score_mean"]),  # no result of all runs
        ([{}, {}], True, ["score_mean"]),
    ],
)
def test_runs_are_compared_by_the_results_that_all_have_else_by_their_last_value(
    finals: list[dict[str, float | int | str]], is_judged: bool, keys: list[str]
) -> None:
    assert [result.key for result in shared_results(CONTENT["language"], finals, is_judged)] == keys
