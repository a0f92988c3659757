"""Runs with remedies: none shows where there is no mismatch, each does where there is, no layout shows in any."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from analysis.clipping.corrections import corrections_of
from analysis.clipping.update_rows import load_iterations
from analysis.clipping.weights import loss_weights
from ppo_repro.buffers import Advantages, Coefficients, ReturnStatistics
from ppo_repro.config.files import load_config
from ppo_repro.config.run import RunConfig
from ppo_repro.records import reader
from ppo_repro.replay.columns import STAGES
from ppo_repro.replay.replay import lines, replay
from ppo_repro.stages.objective import PolicyTerms, band_of
from ppo_repro.stages.update import with_chosen
from ppo_repro.watcher import Silent
from tests.support.language import run
from tests.support.paths import TINY

SHORT = ("ppo.iterations=1", "model.warm_start_steps=2", "evaluation.every=1000")
ANCHOR = "ppo.ratio_anchor=old"
CLIP = "ppo.objective={clip_range: 0.01}"
NOISE = "rollout.mismatch_sigma=0.5"
REJECTION = "ppo.rejection=[{kind: ratio, level: geometric, low: 0.9, high: 1.1}, {kind: veto, below: 0.9}]"
LEFT_OUT = "ppo.rejected_tokens=left_out"
# remedies, and the same run without them
SAME: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "truncated": ((ANCHOR, "ppo.importance_weights={kind: truncated}"), (ANCHOR,)),
    "icepop": ((ANCHOR, "ppo.importance_weights={kind: masked, floor: 0.5, cap: 5}"), (ANCHOR,)),
    "masked by response, normalised": (
        (ANCHOR, "ppo.importance_weights={kind: masked, level: sequence, normalize: true}"),
        (ANCHOR,),
    ),
    "rejected": ((ANCHOR, REJECTION, LEFT_OUT), (ANCHOR,)),
    "gspo of one token": (
        (
            "rollout.max_response_tokens=1",
            "ppo.objective={kind: sequence_clip, clip_range: 0.01, clip_range_high: 0.01}",
        ),
        ("rollout.max_response_tokens=1", CLIP),
    ),
    "clip-cov without a candidate": (
        ("ppo.objective={kind: clip_cov, covariance_low: 1e6, covariance_high: 1e7, clip_range: 0.01}",),
        (CLIP,),
    ),
}
QUICK = ("rejected", "gspo of one token")
ALL_AT_ONCE = (
    *(ANCHOR, NOISE, "ppo.importance_weights={kind: masked, floor: 0.7, cap: 1.5, normalize: true}", LEFT_OUT),
    "ppo.rejection=[{kind: veto, below: 0.3}, {kind: ratio, level: geometric, low: 0.8, high: 1.3}, "
    "{kind: divergence, level: mean, above: 0.2}]",
)


def recorded(out: Path, *options: str) -> Path:
    return run(load_config(TINY, [*SHORT, *options]), out, Silent())[0]


def updates_differ(a: Path, b: Path) -> bool:
    left, right = (reader.read_updates(path, columns=["new_logprobs", "ratios"]) for path in (a, b))
    return not left.equals(right)


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in SAME])
def test_a_remedy_for_what_is_not_there_changes_no_bit(name: str, tmp_path: Path) -> None:
    remedy, without = (recorded(tmp_path / str(index), *options) for index, options in enumerate(SAME[name]))
    assert reader.open_manifest(remedy).fingerprint == reader.open_manifest(without).fingerprint


@pytest.mark.slow
@pytest.mark.parametrize("name", ["truncated", "icepop", "masked by response, normalised", "rejected"])
def test_the_same_remedy_changes_a_run_with_mismatch(name: str, tmp_path: Path) -> None:
    """The negative control."""
    remedy, without = (recorded(tmp_path / str(index), NOISE, *options) for index, options in enumerate(SAME[name]))
    assert reader.open_manifest(remedy).fingerprint != reader.open_manifest(without).fingerprint
    assert updates_differ(remedy, without)


@pytest.fixture(scope="module")
def corrected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with mismatch, and every correction at once."""
    return recorded(tmp_path_factory.mktemp("corrected"), *ALL_AT_ONCE)


def test_weights_and_what_was_done_are_those_of_the_analyses(corrected: Path) -> None:
    config = load_config(TINY, [*SHORT, *ALL_AT_ONCE])
    for item in load_iterations(corrected):
        expected = item.rows.merge(corrections_of(item.tokens, config).join(item.tokens[["sequence", "position"]]))
        assert set(item.rows["correction"]) >= {"none", "rejected"} and item.rows["correction"].nunique() > 2
        assert (item.rows["correction"].to_numpy() == expected["change"].to_numpy()).all()
        np.testing.assert_allclose(item.rows["importance_weights"], expected["weight"], rtol=1e-5)
        dropped = item.rows["correction"] != "none"
        assert (item.rows.loc[dropped, "loss_weights"] == 0).all() and (
            item.rows.loc[~dropped, "loss_weights"] > 0
        ).all()
        together = item.rows["loss_weights"].astype(np.float64) * item.rows["importance_weights"]
        np.testing.assert_allclose(together, loss_weights(item.rows, config, item.tokens), rtol=1e-5)


def test_a_corrected_run_is_replayed(corrected: Path) -> None:
    found = replay(corrected, STAGES)
    assert found.difference is None, lines(found)


def terms_of(config: RunConfig, count: int) -> PolicyTerms:
    generator = torch.Generator().manual_seed(1)
    advantages = Advantages(*(torch.randn(count, generator=generator),) * 2, None)
    zeros = torch.zeros(count)
    coefficients = Coefficients(0.0, 0.0, 0.0, ReturnStatistics())
    return PolicyTerms(
        zeros, zeros, advantages.advantages, torch.arange(count), None, band_of(config, 0.0), coefficients, config
    )


@pytest.mark.parametrize("kind", ["clip_cov, covariance_low: 0, clip_range: 0.9", "kl_cov"])
def test_tokens_are_chosen_over_the_minibatch_and_by_no_other_order(kind: str) -> None:
    """The control chooses in each half by itself, as stacks do that choose within micro-batches."""
    config = load_config(TINY, [f"ppo.objective={{kind: {kind}, share: 0.1}}"])
    terms, logprobs = terms_of(config, 200), -torch.rand(200, generator=torch.Generator().manual_seed(2))
    tokens = torch.arange(200)
    chosen = with_chosen(terms, tokens, logprobs, (0, 0, 0)).chosen
    assert chosen is not None and int(chosen.sum()) == 20
    assert torch.equal(chosen, with_chosen(terms, tokens, logprobs, (0, 0, 0)).chosen)
    halves = [with_chosen(terms, half, logprobs[half], (0, 0, 0)).chosen for half in tokens.split(100)]
    assert not torch.equal(chosen, halves[0] | halves[1])
    other = with_chosen(terms, tokens, logprobs, (0, 1, 0)).chosen
    assert torch.equal(chosen, other) == (kind == "kl_cov"), "only Clip-Cov draws"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["clip_cov, covariance_low: 0, covariance_high: 50", "kl_cov"])
def test_no_layout_shows_in_which_tokens_are_chosen(kind: str, tmp_path: Path) -> None:
    options = (f"ppo.objective={{kind: {kind}, share: 0.1}}", "ppo.minibatch_size=15")
    whole, cut = (recorded(tmp_path / str(n), *options, f"layout.update_micro_batch={n}") for n in (0, 2))
    flags = reader.read_updates(whole, columns=["clip_flag"])["clip_flag"]
    assert (flags == kind[: kind.find("_cov") + 4]).any()
    assert reader.open_manifest(whole).fingerprint == reader.open_manifest(cut).fingerprint
