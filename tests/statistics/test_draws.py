"""Tokens that were not drawn from their distributions are found; tokens that were are not accused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest

from ppo_repro.statistics.draws import TAILS, Draws, draws_of
from ppo_repro.testing import assert_mismatch_below
from tests.support.cli import Cli
from tests.support.paths import ROOT, TINY

Floats = npt.NDArray[np.float64]

SAMPLER = (ROOT / "experiments" / "own_sampler" / "transformers_generate.py").read_text(encoding="utf-8")


def contexts(seed: int, count: int = 1500, tokens: int = 500) -> Floats:
    """Distributions with falling probabilities, from nearly certain to flat, [count, tokens]."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(count, tokens)) * np.exp(rng.uniform(0.5, 2.5, (count, 1)))
    p = np.exp(logits - logits.max(1, keepdims=True))
    return np.asarray(-np.sort(-p / p.sum(1, keepdims=True), axis=1))


P = contexts(0)
REACHED, ENTROPIES = np.cumsum(P, 1), -(P * np.log(P + 1e-300)).sum(1)


def draws(sampler: Floats, tokens: int, seed: int, with_levels: bool = True) -> Draws:
    """The draws of `tokens` tokens, 20 a response, of a sampler with the probabilities [count, V]."""
    rng = np.random.default_rng(seed)
    rows, reached = rng.integers(0, len(P), tokens), np.cumsum(sampler / sampler.sum(1, keepdims=True), 1)
    found = (rng.random((tokens, 1)) > reached[rows]).sum(1).clip(0, P.shape[1] - 1)
    levels = REACHED[rows, found] if with_levels else None
    return draws_of(np.log(P[rows, found]), ENTROPIES[rows], np.arange(tokens) // 20, levels, seed)


def top_p(mass: float) -> Floats:
    return np.where(mass > REACHED - P, P, 0.0)


def test_two_tokens_by_hand() -> None:
    """p = 1/2 of (1/2, 1/2): no excess. p = 1/4 of (1/4, 3/4): ln 1/4 + H = -3/4 ln 3; the bound is its square / 3."""
    entropy = 0.25 * np.log(4) + 0.75 * np.log(4 / 3)
    found = draws_of(np.log([0.5, 0.25]), np.array([np.log(2), entropy]), np.array([0, 1]), np.array([0.5, 1.0]))
    excess = -0.75 * np.log(3)
    assert found.excess == pytest.approx(excess, rel=1e-12)
    assert (found.squares, found.spread) == (pytest.approx(excess**2), pytest.approx(excess**2))
    assert found.variance == pytest.approx(excess**2 / 3)
    assert (found.tokens, found.levels, found.highest) == (2, 2, 0.75)
    # the levels are in (0, 1/2) and (3/4, 1): the second one is in both of the first two tails
    assert found.in_tails[:2] == (1, 1)


def test_the_sums_of_responses_add_up() -> None:
    whole = draws(P, 200, 1)
    rng = np.random.default_rng(1)
    rows = rng.integers(0, len(P), 200)
    found = (rng.random((200, 1)) > REACHED[rows]).sum(1)
    parts = [
        draws_of(np.log(P[rows, found])[of], ENTROPIES[rows][of], np.arange(200)[of] // 20)
        for of in (slice(0, 100), slice(100, 200))
    ]
    both = parts[0] + parts[1]
    assert both.excess == pytest.approx(whole.excess)
    assert both.squares == pytest.approx(whole.squares)
    assert both.z == pytest.approx(whole.z)


def test_a_right_sampler_is_not_accused() -> None:
    found = [draws(P, 200, seed) for seed in range(300)]
    assert not any(one.is_wrong for one in found)
    z = np.array([one.z for one in found])
    assert abs(z.mean()) < 0.3
    assert 0.6 < z.std() < 1.2


def test_tokens_that_are_nearly_certain_do_not_accuse() -> None:
    """Of 300 tokens with p = 0.999 the other one is often not drawn; then all are alike, and their spread is 0."""
    p = np.array([0.999, 0.001])
    entropy = -(p * np.log(p)).sum()
    for rare in range(3):
        logp = np.log(np.where(np.arange(300) < rare, p[1], p[0]))
        assert not draws_of(logp, np.full(300, entropy), np.arange(300) // 10).is_wrong
    certain = draws_of(np.zeros(50), np.full(50, 1e-7), np.zeros(50))
    assert (certain.z, certain.is_wrong) == (0.0, False)


@pytest.mark.parametrize(
    ("sampler", "tokens"),
    [
        (lambda: top_p(0.9), 1000),
        (lambda: top_p(0.95), 2500),
        (lambda: top_p(0.99), 5000),
        (lambda: np.where(np.arange(P.shape[1]) < 50, P, 0.0), 2500),  # top-k
        (lambda: np.where(P[:, :1] <= 20 * P, P, 0.0), 2500),  # min-p
        (lambda: np.where(np.arange(P.shape[1]) == 0, 0.0, P), 1000),  # the likeliest token is banned
        (lambda: P ** (1 / 0.9), 5000),  # temperature
        (lambda: P ** (1 / 1.1), 5000),
    ],
)
def test_another_sampler_is_found(sampler: Callable[[], Floats], tokens: int) -> None:
    found = [draws(sampler(), tokens, seed) for seed in range(5)]
    assert all(one.is_wrong for one in found)
    assert not any(draws(P, tokens, seed).is_wrong for seed in range(5))


def test_what_a_sentence_excludes_would_have_been_found() -> None:
    """A drawn token has likelier ones of probability `highest`: a cut there does not draw it."""
    found = draws(P, 2000, 0)
    assert found.in_tails[-1] <= found.in_tails[0]
    assert len(found.in_tails) == len(TAILS)
    said = found.sentence()
    assert said.startswith("draws agree with log-probs as far as 2,000 tokens can tell: mean log p + entropy ")
    limit = float(said.split("a top-p of ")[1].split()[0])
    assert draws(top_p(limit), 2000, 0).highest < found.highest
    assert limit <= found.highest
    assert "top-p of" not in draws(P, 2000, 0, with_levels=False).sentence()


def engine(folder: Path, **changes: str) -> str:
    """Write transformers' generate as an engine in float32 that reports log-probs of the model, not of the cut."""
    text = SAMPLER.replace("output_scores", "output_logits").replace("done.scores", "done.logits")
    for name, value in changes.items():
        before, after = f"{name}=1.0,", f"{name}={value},"
        assert before in text
        text = text.replace(before, after)
    path = folder / f"engine{'_'.join(changes)}.py"
    path.write_text(text, encoding="utf-8")
    return f"rollout.engine={{kind: function, path: '{path}:Engine', parameters: {{dtype: float32}}}}"


@pytest.mark.slow
def test_a_run_says_that_its_sampler_draws_otherwise_than_it_reports(tmp_path: Path, cli: Cli) -> None:
    sizes = "rollout.prompts_per_iteration=64", "ppo.minibatch_size=64", "model.vocab_size=64", "ppo.iterations=2"
    options = [part for override in sizes for part in ("--set", override)]
    for changes, word in (
        ({}, "draws agree with log-probs as far as"),
        ({"top_p": "0.8"}, "unlikely tokens are missing"),
    ):
        out = tmp_path / str(len(changes))
        code, said, _ = cli("run", TINY, "--out", out, *options, "--set", engine(tmp_path, **changes))
        assert code == 0
        assert word in said
        (folder,) = (out / "tiny").iterdir()
        if changes:
            with pytest.raises(AssertionError, match="unlikely tokens are missing"):
                assert_mismatch_below(folder, abs_mean=1e-3)
            assert_mismatch_below(folder, abs_mean=1e-3, draws=False)
        else:
            assert_mismatch_below(folder, abs_mean=1e-3)


def test_a_dump_with_entropies_is_judged(tmp_path: Path) -> None:
    def dump(sampler: Floats) -> pd.DataFrame:
        rng = np.random.default_rng(5)
        rows, reached = rng.integers(0, len(P), 2000), np.cumsum(sampler / sampler.sum(1, keepdims=True), 1)
        found = (rng.random((2000, 1)) > reached[rows]).sum(1).clip(0, P.shape[1] - 1)
        logp = np.log(P[rows, found])
        sides = {"rollout_logprobs": logp, "old_logprobs": logp, "entropies": ENTROPIES[rows]}
        return pd.DataFrame([{name: values[i : i + 20] for name, values in sides.items()} for i in range(0, 2000, 20)])

    assert_mismatch_below(dump(P), abs_mean=0.0)
    with pytest.raises(
        AssertionError, match=r"2,000 tokens were not drawn from the log-probs: mean log p \+ entropy \+"
    ):
        assert_mismatch_below(dump(top_p(0.8)), abs_mean=0.0)
    assert_mismatch_below(dump(top_p(0.8)).drop(columns="entropies"), abs_mean=0.0)


def test_as_many_tokens_as_rounding_moves_may_be_impossible() -> None:
    logprobs = np.full(2000, np.log(0.5))
    for count, are_impossible in ((2, False), (3, True)):
        logprobs[:count] = -np.inf
        assert draws_of(logprobs, np.full(2000, np.log(2)), np.arange(2000)).are_impossible == are_impossible
