"""README's figure of the quickstart is drawn from runs in both numerics modes."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.figures.quickstart import accuracies, quickstart_figure
from ppo_repro.base.errors import UserError
from ppo_repro.records import reader


def test_accuracy_is_of_deterministic_runs_and_unequal_log_probs_of_all(
    deterministic_run: Path, native_run: Path
) -> None:
    left, right = quickstart_figure([deterministic_run, native_run]).figure.axes
    (line,), recorded = left.get_lines(), reader.open_manifest(deterministic_run)
    assert line.get_label() == "deterministic, 1 runs"
    assert line.get_ydata()[-1] == recorded.final["eval_accuracy"]
    assert len(accuracies(deterministic_run)) == recorded.num_iterations + 1
    assert [label.split(":")[0] for label in right.get_legend_handles_labels()[1]] == ["deterministic", "native"]
    with pytest.raises(UserError, match="no run is deterministic"):
        quickstart_figure([native_run])
