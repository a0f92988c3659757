"""Runs whose trainer is torch's own: the size of the mismatch beside the law's, and none without it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from analysis.mismatch.parity import parity
from analysis.report.reading.facts import disturbance_verdict
from ppo_repro.accuracy.scores import Text, reference_scores, stock_scores
from ppo_repro.config.files import load_config
from ppo_repro.models.load import load_folder
from ppo_repro.records import reader
from ppo_repro.rollout.stock_engine import in_dtype
from ppo_repro.runs.run import run_folder
from ppo_repro.watcher import Silent
from tests.support.language import resume, run
from tests.support.mixtures import config_of
from tests.support.paths import TINY
from tests.support.ranks import cli_ranks
from tests.support.replay import require_replayed

ONE = (
    *("ppo.iterations=1", "checkpoints.every=1", "rollout.prompts_per_iteration=30", "ppo.minibatch_size=15"),
    *("rollout.max_response_tokens=6", "model.warm_start_steps=10"),
)
# a factor of 8 lies between the spacings of the two dtypes
SIZES = {"bfloat16": (2e-3, 2e-2), "float16": (2e-4, 2e-3)}


def recorded(out: Path, *overrides: str) -> Path:
    return run(load_config(TINY, overrides), out, Silent())[0]


def errors(run_dir: Path) -> np.ndarray:
    """old - rollout log-prob of each token, nats."""
    tokens = reader.read_tokens(run_dir)
    return tokens["old_logprobs"].to_numpy(np.float64) - tokens["rollout_logprobs"].to_numpy(np.float64)


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.square(x).mean()))


def law(dtype: str) -> str:
    return f"mismatch.trainer.precision={{weights: {dtype}, activations: {dtype}, logits: {dtype}}}"


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_a_stock_trainer_has_the_error_of_its_dtype(dtype: str, tmp_path: Path) -> None:
    """Beside the law's rounding, and beside the recorded text in float64 and in that dtype, each response alone."""
    run_dir = recorded(tmp_path / "stock", f"mismatch.trainer.stock={dtype}", *ONE)
    by_law = rms(errors(recorded(tmp_path / "law", law(dtype), *ONE)))
    sequences = reader.read_sequences(run_dir)
    text = Text([list(ids) for ids in sequences["prompt_ids"]], [list(ids) for ids in sequences["response_ids"]])
    model, _ = load_folder(run_dir / "checkpoints" / "reference")
    assert model.dtype == torch.float32, "a run goes on from unrounded weights"
    reference = reference_scores(model, text).logprobs
    alone = (stock_scores(in_dtype(model, getattr(torch, dtype)), text).logprobs.double() - reference).numpy()
    found, (low, high) = rms(errors(run_dir)), SIZES[dtype]
    assert low < found < high, "one dtype would pass for the other"
    # a batch rounds other sums than a response alone, so single tokens differ and the size does not
    assert 0.5 < found / rms(alone) < 2
    assert 0.8 < found / by_law < 1.25, "several hundred tokens"
    steps = reader.read_steps(run_dir)
    assert steps["policy_digest"].nunique() == len(steps) > 5, "every step moved the float32 weights"
    tokens = reader.read_tokens(run_dir)
    assert (tokens["old_logprobs"] == tokens["ref_logprobs"]).all(), "the reference is scored as the policy is"


def test_without_it_there_is_no_mismatch_at_all(tmp_path: Path) -> None:
    found = parity(recorded(tmp_path, *ONE))
    assert found.tokens > 30 and found.unequal_old_rollout_logprobs == 0 and found.max_abs_old_rollout == 0.0


@pytest.mark.slow
def test_a_stock_trainer_goes_with_the_options_of_a_run(tmp_path: Path) -> None:
    """Packed rows, layers computed again, top-p, KL over the vocabulary, dropout, a mixture's routes; and a resume."""
    more = (
        *("mismatch.trainer.stock=float16", "mismatch.trainer.dropout=0.001", "layout.padding=none"),
        *("layout.gradient_checkpointing=true", "layout.update_micro_batch=2", "rollout.top_p=0.95"),
        *(
            "kl={placement: loss, estimator: exact}",
            "records.level=deep",
            "checkpoints.every=1",
            "numerics.accuracy_sequences=0",
        ),
        *("rollout.prompts_per_iteration=3", "ppo.minibatch_size=9", "ppo.epochs=1", "model.warm_start_steps=0"),
    )
    run_dir = run(config_of("qwen3_moe", *more), tmp_path / "run", Silent())[0]
    require_replayed(run_dir)
    assert 1e-4 < rms(errors(run_dir)) < 0.1, "float16, dropped numbers and flipped routes"
    tokens = reader.read_tokens(run_dir)
    assert len(tokens["policy_routes"].iloc[0]) == len(tokens["rollout_routes"].iloc[0]) > 0

    class Stopped(Silent):
        def iteration(self, done: int, total: int, figures: str) -> None:
            raise KeyboardInterrupt

    config = config_of("qwen3_moe", *more)
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "part", Stopped())
    part = run_folder(config, tmp_path / "part")
    resume(part, Silent(), [])
    # torch promises no bit, so the size is compared: what was trained before the end of the first process is there
    whole, again = (reader.read_steps(d)["grad_norm"].to_numpy() for d in (run_dir, part))
    assert len(whole) == len(again) and np.allclose(whole, again, rtol=0.05)


@pytest.mark.slow
def test_two_processes_train_as_one_does(tmp_path: Path) -> None:
    """Both have the same weights after each update, or the run ends; against one process no bit is promised."""
    sets = ("mismatch.trainer.stock=float16", "layout.update_micro_batch=2", *ONE)
    alone = recorded(tmp_path / "alone", *sets)
    arguments = [part for override in sets for part in ("--set", override)]
    ended = cli_ranks(2, "run", TINY, "--out", tmp_path / "two", "--json", *arguments)
    assert [process.code for process in ended] == [0, 0], ended[0].err
    two = run_folder(load_config(TINY, sets), tmp_path / "two")
    whole, divided = (reader.read_steps(d)["grad_norm"].to_numpy() for d in (alone, two))
    assert len(whole) == len(divided) > 5 and np.allclose(whole, divided, rtol=0.05)
    assert 0.8 < rms(errors(two)) / rms(errors(alone)) < 1.25
    # sampled before the first step, by exact numerics, which no number of processes changes
    first, second = (reader.read_tokens(d, columns=["rollout_logprobs"]) for d in (alone, two))
    assert (first == second).all().all()


def test_the_page_says_that_it_was_on_purpose() -> None:
    found = disturbance_verdict(load_config(TINY, ("mismatch.trainer.stock=float16",)))
    assert found[0].text == "The trainer was torch's own on purpose: mismatch.trainer.stock = float16."
