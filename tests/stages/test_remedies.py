"""Published remedies for mismatch: losses by hand and in NumPy, and runs in which each has an effect or none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from analysis.clipping.corrections import corrections_of
from analysis.clipping.update_rows import load_iterations
from analysis.clipping.weights import loss_weights
from ppo_repro.config.files import load_config
from ppo_repro.config.run import RunConfig
from ppo_repro.loop import policy_loss
from ppo_repro.recompute.recompute import STAGES, lines, recompute
from ppo_repro.records import reader
from ppo_repro.stages.training_batch import Minibatch, TrainingBatch, chosen_tokens, training_batch
from ppo_repro.watcher import Silent
from tests.support.bare import NO_COEFFICIENTS, bare_advantages, bare_forward, bare_rollout
from tests.support.language import run
from tests.support.paths import TINY

Array = np.ndarray
LENGTHS = np.array([2, 2])
# log-probs in units of log 2. w = pi_old / pi_rollout: 1, 4 | 1/8, 2; of the responses 4 | 1/4; their roots 2 | 1/2
SAMPLER = np.array([-4.0, -4.0, -4.0, -4.0])
OLD = SAMPLER + np.array([0.0, 2.0, -3.0, 1.0])
NEW = OLD + np.array([1.0, 0.0, -1.0, 1.0])  # r = 2, 1 | 1/2, 2
ADVANTAGES = np.array([1.0, 1.0, -1.0, -1.0])
LN2 = float(np.log(2.0))


def mean_of_response(x: Array, lengths: Array) -> Array:
    return np.repeat([part.mean() for part in np.split(x, lengths.cumsum()[:-1])], lengths)


def clipped(r: Array, a: Array, low: float = 0.5, high: float = 0.5) -> Array:
    return -np.minimum(r * a, np.clip(r, 1 - low, 1 + high) * a)


def covariance(new: Array, a: Array) -> Array:
    return (new - new.mean()) * (a - a.mean())


def weighted(weight: Callable[[Array], Array], level: str = "token") -> Callable[..., Array]:
    def loss(new: Array, old: Array, sampler: Array, a: Array, lengths: Array) -> Array:
        log = old - sampler
        mean = mean_of_response(log, lengths)
        logs = {"token": log, "geometric": mean, "sequence": mean * np.repeat(lengths, lengths)}
        return clipped(np.exp(new - old), a) * weight(np.exp(logs[level]))

    return loss


def gspo(new: Array, old: Array, sampler: Array, a: Array, lengths: Array) -> Array:
    return clipped(np.exp(mean_of_response(new - old, lengths)), a, 0.25, 0.25)


def clip_cov(new: Array, old: Array, sampler: Array, a: Array, lengths: Array) -> Array:
    r, cov = np.exp(new - old), covariance(new, a)
    inside = ~((a > 0) & (r > 1.6)) & ~((a < 0) & (r < 0.4))
    return np.where(inside & (cov > 1) & (cov < 2), 0.0, clipped(r, a, 0.6, 0.6))


def kl_cov(new: Array, old: Array, sampler: Array, a: Array, lengths: Array) -> Array:
    cov = covariance(new, a)
    largest = cov >= np.sort(cov)[-max(int(0.25 * len(cov)), 1)]
    return -np.exp(new - old) * a + np.where(largest, np.abs(new - old), 0.0)


def within(low: float, high: float) -> Callable[[Array], Array]:
    return lambda w: np.where((w >= low) & (w <= high), w, 0.0)


POLICY_ALONE = ("value={kind: none}", "advantages={kind: group}", "kl={placement: none}", "ppo.entropy_coef=0")
WEIGHTS = "ppo.importance_weights="
CLIP = "ppo.objective={clip_range: 0.5}"
# name: what a run is told beside ratio_anchor = old, the loss of each token by hand, the same in NumPy
REMEDIES: dict[str, tuple[tuple[str, ...], list[float], Callable[..., Array]]] = {
    "recomputed anchor": ((CLIP,), [-1.5, -1, 0.5, 2], weighted(np.ones_like)),
    "anchor of the sampler": (
        (CLIP, "ppo.ratio_anchor=rollout"),  # r = 2, 4 | 1/16, 4
        [-1.5, -1.5, 0.5, 4],
        lambda new, old, sampler, a, lengths: clipped(np.exp(new - sampler), a),
    ),
    "decoupled PPO": ((CLIP, WEIGHTS + "{kind: truncated, cap: null}"), [-1.5, -4, 1 / 16, 4], weighted(lambda w: w)),
    "TIS": (
        (CLIP, WEIGHTS + "{kind: truncated, cap: 3}"),
        [-1.5, -3, 1 / 16, 4],
        weighted(lambda w: np.minimum(w, 3)),
    ),
    "TIS by response": (
        (CLIP, WEIGHTS + "{kind: truncated, level: sequence, cap: 3}"),
        [-4.5, -3, 1 / 8, 1 / 2],
        weighted(lambda w: np.minimum(w, 3), "sequence"),
    ),
    "MIS by response": (
        (CLIP, WEIGHTS + "{kind: masked, level: sequence, floor: 0.3, cap: 5}"),
        [-6, -4, 0, 0],
        weighted(within(0.3, 5), "sequence"),
    ),
    "IcePop": (
        (CLIP, WEIGHTS + "{kind: masked, floor: 0.1, cap: 3.5}"),
        [-1.5, 0, 1 / 16, 4],
        weighted(within(0.1, 3.5)),
    ),
    "length-normalised ratio": (
        (CLIP, WEIGHTS + "{kind: truncated, level: geometric, cap: null}"),
        [-3, -2, 1 / 4, 1],
        weighted(lambda w: w, "geometric"),
    ),
    "rejection by the length-normalised ratio": (
        (CLIP, "ppo.rejection=[{kind: ratio, level: geometric, low: 0.6, high: 3}]"),
        [-1.5, -1, 0, 0],
        weighted(lambda w: np.where((w >= 0.6) & (w <= 3), 1.0, 0.0), "geometric"),
    ),
    # s = root of 2 | 1
    "GSPO": (
        ("ppo.objective={kind: sequence_clip, clip_range: 0.25, clip_range_high: 0.25}",),
        [-1.25, -1.25, 1, 1],
        gspo,
    ),
    # covariances in units of log 2: 3/4, 7/4 | 17/4, -7/4; only the second lies within 1 and 2 nats
    "Clip-Cov": (
        ("ppo.objective={kind: clip_cov, share: 1, covariance_low: 1, covariance_high: 2, clip_range: 0.6}",),
        [-1.6, 0, 0.5, 2],
        clip_cov,
    ),
    "KL-Cov": (
        ("ppo.objective={kind: kl_cov, share: 0.25, penalty_coef: 1}",),
        [-2, -1, 0.5 + LN2, 2],
        kl_cov,
    ),
}


def batch_of(config: RunConfig, old: Tensor, sampler: Tensor, a: Tensor, lengths: Tensor) -> TrainingBatch:
    rollout, forward = bare_rollout(lengths, sampler), bare_forward(old)
    return training_batch(config, NO_COEFFICIENTS, rollout, forward, bare_advantages(a))


def minibatch_of(tokens: Tensor, epoch: int = 0) -> Minibatch:
    return Minibatch(0, epoch, 0, tokens, torch.ones(int(tokens.max()) + 1), ())


def loss_of(overrides: tuple[str, ...], new: Array, old: Array, sampler: Array, a: Array, lengths: Array) -> Array:
    """The loss of each token as the update of such a run has it."""
    config = load_config(TINY, [*POLICY_ALONE, "ppo.ratio_anchor=old", *overrides])
    new32, old32, sampler32, a32 = (torch.tensor(x, dtype=torch.float32) for x in (new, old, sampler, a))
    batch, tokens = batch_of(config, old32, sampler32, a32, torch.tensor(lengths)), torch.arange(len(new))
    chosen = None
    if batch.objective.chooses_tokens:
        chosen = chosen_tokens(config, batch, minibatch_of(tokens), new32)
    columns = policy_loss(config, batch, tokens, new32, torch.zeros(len(new)), None, chosen)
    return columns.losses.numpy().astype(np.float64)


@pytest.mark.parametrize("name", REMEDIES)
def test_every_published_remedy_by_hand_and_beside_numpy(name: str) -> None:
    overrides, expected, in_numpy = REMEDIES[name]
    by_hand = NEW * LN2, OLD * LN2, SAMPLER * LN2, ADVANTAGES, LENGTHS
    # float32: exponentials and products rounded by 2^-24
    np.testing.assert_allclose(loss_of(overrides, *by_hand), expected, rtol=2e-6, atol=1e-7)
    np.testing.assert_allclose(in_numpy(*by_hand), expected, rtol=1e-12, atol=1e-12)
    plain, rng, differs = REMEDIES["recomputed anchor"][2], np.random.default_rng(3), 0
    for _ in range(5):
        lengths = rng.integers(1, 6, 12)
        count = int(lengths.sum())
        old = rng.uniform(-4.0, -0.5, count).astype(np.float32).astype(np.float64)
        new, sampler = ((old + rng.normal(0.0, 0.8, count)).astype(np.float32).astype(np.float64) for _ in range(2))
        a = rng.normal(0.0, 1.5, count).astype(np.float32).astype(np.float64)
        case = new, old, sampler, a, lengths
        # float32 log-ratios of up to 4 are rounded by 2^-22
        np.testing.assert_allclose(loss_of(overrides, *case), in_numpy(*case), rtol=3e-6, atol=1e-6)
        differs += not np.allclose(in_numpy(*case), plain(*case), rtol=1e-2)
    assert differs == (0 if name == "recomputed anchor" else 5), "a remedy that changes nothing would pass"


@pytest.mark.parametrize("kind", ["clip_cov, covariance_low: 0, clip_range: 0.9", "kl_cov"])
def test_tokens_are_chosen_over_the_minibatch_and_by_no_other_order(kind: str) -> None:
    """The control chooses in each half by itself, as stacks do that choose within micro-batches."""
    config = load_config(TINY, [*POLICY_ALONE, f"ppo.objective={{kind: {kind}, share: 0.1}}"])
    generator, zeros = torch.Generator().manual_seed(1), torch.zeros(200)
    batch = batch_of(config, zeros, zeros, torch.randn(200, generator=generator), torch.full((40,), 5))
    logprobs, tokens = -torch.rand(200, generator=generator), torch.arange(200)

    def chosen(some: Tensor, epoch: int = 0) -> Tensor:
        return chosen_tokens(config, batch, minibatch_of(some, epoch), logprobs[some])

    whole, halves = chosen(tokens), [chosen(half) for half in tokens.split(100)]
    assert int(whole.sum()) == 20 and not torch.equal(whole, halves[0] | halves[1])
    assert torch.equal(whole, chosen(tokens, epoch=1)) == (kind == "kl_cov"), "only Clip-Cov draws"


SHORT = ("ppo.iterations=1", "model.warm_start_steps=2", "evaluation.every=1000")
ANCHOR, NOISE, LEFT_OUT = "ppo.ratio_anchor=old", "rollout.mismatch_sigma=0.5", "ppo.rejected_tokens=left_out"
SMALL_CLIP = "ppo.objective={clip_range: 0.01}"
ONE_TOKEN = "rollout.max_response_tokens=1"
REJECTION = "ppo.rejection=[{kind: ratio, level: geometric, low: 0.9, high: 1.1}, {kind: veto, below: 0.9}]"
# remedies, and the same run without them
SAME: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "truncated": ((ANCHOR, "ppo.importance_weights={kind: truncated}"), (ANCHOR,)),
    "masked by response, normalised": (
        (ANCHOR, "ppo.importance_weights={kind: masked, level: sequence, normalize: true}"),
        (ANCHOR,),
    ),
    "rejected": ((ANCHOR, REJECTION, LEFT_OUT), (ANCHOR,)),
    "gspo of one token": (
        (ONE_TOKEN, "ppo.objective={kind: sequence_clip, clip_range: 0.01, clip_range_high: 0.01}"),
        (ONE_TOKEN, SMALL_CLIP),
    ),
    "clip-cov without a candidate": (
        ("ppo.objective={kind: clip_cov, covariance_low: 1e6, covariance_high: 1e7, clip_range: 0.01}",),
        (SMALL_CLIP,),
    ),
}
QUICK = ("rejected",)


def recorded(out: Path, *options: str) -> Path:
    return run(load_config(TINY, [*SHORT, *options]), out, Silent())[0]


def fingerprint(run_dir: Path) -> str:
    return reader.open_manifest(run_dir).fingerprint


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in SAME])
def test_a_remedy_for_what_is_not_there_changes_no_bit(name: str, tmp_path: Path) -> None:
    remedy, without = (recorded(tmp_path / str(index), *options) for index, options in enumerate(SAME[name]))
    assert fingerprint(remedy) == fingerprint(without)
    if ANCHOR in SAME[name][1]:  # the control: the same remedy where there is something
        remedy, without = (recorded(tmp_path / f"n{i}", NOISE, *options) for i, options in enumerate(SAME[name]))
        assert fingerprint(remedy) != fingerprint(without)


ALL_AT_ONCE = (
    *(ANCHOR, NOISE, "ppo.importance_weights={kind: masked, floor: 0.7, cap: 1.5, normalize: true}", LEFT_OUT),
    "ppo.rejection=[{kind: veto, below: 0.3}, {kind: ratio, level: geometric, low: 0.8, high: 1.3}, "
    "{kind: divergence, level: mean, above: 0.2}]",
)


def test_recorded_weights_are_the_analyses_and_recomputed(tmp_path: Path) -> None:
    run_dir, config = recorded(tmp_path, *ALL_AT_ONCE), load_config(TINY, [*SHORT, *ALL_AT_ONCE])
    for item in load_iterations(run_dir):
        expected = item.rows.merge(corrections_of(item.tokens, config).join(item.tokens[["sequence", "position"]]))
        assert set(item.rows["correction"]) >= {"none", "rejected"} and item.rows["correction"].nunique() > 2
        assert (item.rows["correction"].to_numpy() == expected["change"].to_numpy()).all()
        np.testing.assert_allclose(item.rows["importance_weights"], expected["weight"], rtol=1e-5)
        dropped = item.rows["correction"] != "none"
        assert ((item.rows["loss_weights"] == 0) == dropped).all()
        together = item.rows["loss_weights"].astype(np.float64) * item.rows["importance_weights"]
        np.testing.assert_allclose(together, loss_weights(item.rows, config, item.tokens), rtol=1e-5)
    found = recompute(run_dir, STAGES)
    assert found.difference is None, lines(found)
