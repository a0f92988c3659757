"""The settings of a fork count for the iterations that it computed, not for those that it copied from its origin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ppo_repro.analysis import grid_outcomes
from ppo_repro.analysis.figures import agreement_figure, mismatch_figure, new_axes
from ppo_repro.analysis.report.run_page import run_page
from ppo_repro.analysis.report.runs_page import runs_page
from ppo_repro.analysis.report.two_runs_page import two_runs_page
from ppo_repro.analysis.run_pairs import run_pairs
from ppo_repro.analysis.run_tables import run_tables
from ppo_repro.base.errors import UserError
from ppo_repro.records import reader
from ppo_repro.runs.summary import summarise
from ppo_repro.testing import assert_mismatch_below
from ppo_repro.testing.audit.recorded_run import dump_of_run
from ppo_repro.testing.pairs import evidence_of
from tests.support.language import fork, tiny_run


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fork whose sampler is exact, of a run whose sampler was disturbed."""
    out = tmp_path_factory.mktemp("forks")
    origin = tiny_run(out, "ppo.iterations=2", "checkpoints.every=1", "rollout.mismatch_sigma=0.1")
    assert summarise(origin).figures["unequal_old_rollout_logprobs"] > 0
    return fork(origin, out, 1, "rollout.mismatch_sigma=null", "ppo.ratio_anchor=old", "checkpoints.every=0")


@pytest.mark.parametrize("read", [evidence_of, run_pairs])
def test_pairs_and_evidence_of_a_fork_are_of_its_own_iterations(
    forked: Path, read: Callable[..., Iterator[pd.DataFrame]]
) -> None:
    assert [int(chunk["iteration"].iloc[0]) for chunk in read(forked)] == [1]
    with pytest.raises(UserError, match="iteration 0 is of the run that was forked"):
        list(run_pairs(forked, iterations=[0]))


def test_the_guard_of_a_fork_judges_its_own_iterations(forked: Path) -> None:
    assert_mismatch_below(forked, frac_unequal=0.0)


def test_the_summary_and_the_page_of_a_fork_count_its_own_iterations(forked: Path) -> None:
    found, tokens = summarise(forked), len(reader.read_tokens(forked, iterations=[1]))
    assert found.figures["unequal_old_rollout_logprobs"] == found.figures["unequal_first_ratios"] == 0
    assert found.figures["tokens"] == len(reader.read_tokens(forked))
    assert f"0 of {tokens:,} training log-probs differ from the sampler's" in found.sentences
    page = run_page(forked, 0)
    assert f"0 of {tokens:,} training log-probs differ from the sampler&#x27;s." in page
    assert 'unequal old and rollout log-probs, tokens</bdi></td><td class="number">0<' in page


def test_the_pages_of_two_runs_and_of_a_folder_count_a_forks_own_iterations(forked: Path) -> None:
    tokens = len(reader.read_tokens(forked, iterations=[1]))
    assert f"A: 0 of {tokens:,} training log-probs differ from the sampler&#x27;s." in two_runs_page(forked, forked)
    page = runs_page(forked.parent, None)
    assert f"Sampler and trainer agree on every bit in 1 of 2 runs ({tokens:,} tokens)." in page


def test_the_measures_of_a_fork_in_a_grid_are_of_its_own_iterations(forked: Path, tmp_path: Path) -> None:
    assert grid_outcomes.mismatch_of_cell(run_tables(forked)) == (0.0, 0.0)
    unclipped = fork(forked, tmp_path, 1, "ppo.objective={kind: unclipped}")
    assert reader.read_steps(unclipped, iterations=[0])["clip_fraction"].max() > 0, "its origin clips"
    assert grid_outcomes.clip_shares_of_cell(run_tables(unclipped)) == (0.0, 0.0)


def test_the_figures_of_a_fork_draw_its_own_tokens(forked: Path) -> None:
    tokens = len(reader.read_tokens(forked, iterations=[1]))
    (handle,) = agreement_figure([forked]).get_legend_handles_labels()[1]
    assert handle == f"deterministic: 0 of {tokens:,}"
    (axes,) = new_axes()
    mismatch_figure([forked], axes)
    assert axes.get_legend_handles_labels()[1][0].split(": ")[1].startswith("0 of ")


def test_the_figure_draws_every_finite_difference_beside_one_that_is_not(
    native_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = reader.read_tokens(native_run, columns=["rollout_logprobs", "old_logprobs"])
    tokens.loc[0, "old_logprobs"] = np.nan
    apart = (tokens["old_logprobs"].astype(float) - tokens["rollout_logprobs"]).abs()
    monkeypatch.setattr(reader, "read_table", lambda *given, **names: tokens)
    axes = mismatch_figure([native_run])
    drawn, _ = axes.lines[0].get_data()
    assert sorted(drawn) == sorted(apart[apart > 0])
    said = f"{len(drawn):,} of {len(tokens):,} differ, by {apart.max():.2g} at most (1 not finite)"
    assert axes.get_legend_handles_labels()[1] == [f"built in, native: {said}"]


def test_the_audit_of_a_fork_reads_the_iteration_that_its_checkpoint_sampled(forked: Path) -> None:
    found = dump_of_run(forked)
    assert (found.iteration, found.checkpoint is None) == (1, False)


def test_the_audit_of_a_fork_of_adapters_says_that_only_its_origin_has_whole_weights(tmp_path: Path) -> None:
    origin = tiny_run(tmp_path, "ppo.iterations=2", "checkpoints.every=1", "lora={rank: 2, alpha: 4.0}")
    assert dump_of_run(origin).iteration == 0
    with pytest.raises(UserError, match=r"forks a run with LoRA, .*; audit the run that was forked$"):
        dump_of_run(fork(origin, tmp_path, 1, "ppo.learning_rate=1e-4"))
