"""Published remedies for mismatch: losses by hand, weights in NumPy, and runs in which each has an effect or none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from ppo_repro.analysis.visits import load_iterations
from ppo_repro.config.algorithm import DivergenceRejection, ImportanceWeights, RatioRejection, Rejection, VetoRejection
from ppo_repro.config.files import load_config
from ppo_repro.config.run import RunConfig
from ppo_repro.loop import policy_loss
from ppo_repro.ppo.corrections import correction_names
from ppo_repro.records import reader
from ppo_repro.records.logprob_pairs import deltas
from ppo_repro.stages.corrections import corrections_of
from ppo_repro.stages.minibatches import minibatch_of
from ppo_repro.stages.training_batch import TrainingBatch, training_batch
from ppo_repro.stages.updates import detached, policy_update
from ppo_repro.statistics.clusters import Floats
from tests.support.bare import NO_COEFFICIENTS, bare_advantages, bare_forward, bare_rollout
from tests.support.language import tiny_run
from tests.support.paths import TINY
from tests.support.runs import recomputed

LENGTHS = torch.tensor([2, 2])
# log-probs in units of log 2. w = pi_old / pi_rollout: 1, 4 | 1/8, 2; of the responses 4 | 1/4; their roots 2 | 1/2
SAMPLER = torch.full((4,), -4.0)
OLD = SAMPLER + torch.tensor([0.0, 2.0, -3.0, 1.0])
NEW = OLD + torch.tensor([1.0, 0.0, -1.0, 1.0])  # r = 2, 1 | 1/2, 2
ADVANTAGES = torch.tensor([1.0, 1.0, -1.0, -1.0])
LN2 = math.log(2.0)


POLICY_ALONE = ("value={kind: none}", "advantages={kind: group}", "kl={placement: none}", "ppo.entropy_coef=0")
WEIGHTS = "ppo.importance_weights="
CLIP = "ppo.objective={clip_range: 0.5}"
# name: what a run is told beside ratio_anchor = old, and the loss of each token by hand
REMEDIES: dict[str, tuple[tuple[str, ...], list[float]]] = {
    "recomputed anchor": ((CLIP,), [-1.5, -1, 0.5, 2]),
    "anchor of the sampler": (
        (CLIP, "ppo.ratio_anchor=rollout"),  # r = 2, 4 | 1/16, 4
        [-1.5, -1.5, 0.5, 4],
    ),
    "decoupled PPO": ((CLIP, WEIGHTS + "{kind: truncated, cap: null}"), [-1.5, -4, 1 / 16, 4]),
    "TIS": ((CLIP, WEIGHTS + "{kind: truncated, cap: 3}"), [-1.5, -3, 1 / 16, 4]),
    "TIS by response": ((CLIP, WEIGHTS + "{kind: truncated, level: sequence, cap: 3}"), [-4.5, -3, 1 / 8, 1 / 2]),
    "MIS by response": ((CLIP, WEIGHTS + "{kind: masked, level: sequence, floor: 0.5, cap: 2}"), [0, 0, 0, 0]),
    "MIS by response, only small w": (
        (CLIP, WEIGHTS + "{kind: masked, level: sequence, floor: 0.5, cap: 5}"),
        [-6, -4, 0, 0],
    ),
    "IcePop": ((CLIP, WEIGHTS + "{kind: masked, floor: 0.1, cap: 3.5}"), [-1.5, 0, 1 / 16, 4]),
    "length-normalised ratio": ((CLIP, WEIGHTS + "{kind: truncated, level: geometric, cap: null}"), [-3, -2, 1 / 4, 1]),
    "rejection by the length-normalised ratio": (
        (CLIP, "ppo.rejection=[{kind: ratio, level: geometric, low: 0.6, high: 3}]"),
        [-1.5, -1, 0, 0],
    ),
    # s = root of 2 | 1
    "GSPO": (("ppo.objective={kind: sequence_clip, clip_range: 0.25, clip_range_high: 0.25}",), [-1.25, -1.25, 1, 1]),
}


def batch_of(config: RunConfig, old: Tensor, sampler: Tensor, a: Tensor, lengths: Tensor) -> TrainingBatch:
    rollout, forward = bare_rollout(lengths, sampler), bare_forward(old)
    return training_batch(config, NO_COEFFICIENTS, rollout, forward, bare_advantages(a))


@pytest.mark.parametrize("name", REMEDIES)
def test_every_published_remedy_by_hand(name: str) -> None:
    overrides, expected = REMEDIES[name]
    config = load_config(TINY, [*POLICY_ALONE, "ppo.ratio_anchor=old", *overrides])
    new = NEW * LN2
    batch, tokens = batch_of(config, OLD * LN2, SAMPLER * LN2, ADVANTAGES, LENGTHS), torch.arange(len(new))
    losses = policy_loss(batch, tokens, new, torch.zeros(len(new)), None).losses
    # float32: exponentials and products rounded by 2^-24
    assert losses.tolist() == pytest.approx(expected, rel=2e-6, abs=1e-7)
    plain = REMEDIES["recomputed anchor"][1]
    assert (expected == plain) == (name == "recomputed anchor"), "a remedy that changes nothing would pass"


def test_what_is_left_out_is_what_a_loss_mask_or_a_rejection_leaves_out() -> None:
    rejection = "ppo.rejection=[{kind: ratio, level: geometric, low: 0.6, high: 3}]"  # of the second response
    config = load_config(TINY, [*POLICY_ALONE, "ppo.ratio_anchor=old", rejection, "ppo.rejected_tokens=left_out"])
    mask = torch.tensor([True, False, True, True])  # of a trainer
    rollout = replace(bare_rollout(LENGTHS, SAMPLER * LN2), in_losses=mask)
    batch = training_batch(config, NO_COEFFICIENTS, rollout, bare_forward(OLD * LN2), bare_advantages(ADVANTAGES))
    assert batch.in_losses is not None
    assert batch.in_losses.tolist() == [True, False, False, False]


@pytest.mark.parametrize("rejected_tokens", ["counted", "left_out"])
def test_a_rejected_token_whose_loss_overflows_changes_nothing(rejected_tokens: str) -> None:
    settings = ("ppo.rejection=[{kind: ratio, low: 0.1, high: 9}]", f"ppo.rejected_tokens={rejected_tokens}")
    config = load_config(TINY, [*POLICY_ALONE, "ppo.ratio_anchor=rollout", *settings])
    sampler, old = torch.tensor([-200.0, -1.0, -1.0, -1.0]), torch.full((4,), -1.0)
    batch = batch_of(config, old, sampler, torch.full((4,), -8.0), LENGTHS)
    new = old.clone().requires_grad_()
    columns = policy_loss(batch, torch.arange(4), new, torch.zeros(4), None)
    assert columns.surrogates.tolist() == [math.inf, 8, 8, 8]
    assert columns.losses.tolist() == [0, 8, 8, 8]
    torch.autograd.backward(columns.losses, torch.ones(4))
    assert new.grad is not None
    assert new.grad.tolist() == [0, 8, 8, 8]
    step = policy_update(batch, minibatch_of("token_mean", batch, torch.arange(2)), detached(columns), 1.0)
    assert step.loss == step.surrogate_loss == pytest.approx(8 if rejected_tokens == "left_out" else 6, rel=1e-6)


def test_weights_of_responses_are_normalised_over_responses() -> None:
    """By hand: ratios of 4 and 1/2, whose mean over responses is 9/4, and over their one and three tokens 11/8."""
    weights = "{kind: truncated, level: geometric, cap: null, normalize: true}"
    config = load_config(TINY, [*POLICY_ALONE, "ppo.ratio_anchor=old", WEIGHTS + weights])
    old = SAMPLER + torch.tensor([2.0, -1.0, -1.0, -1.0])
    batch = batch_of(config, old * LN2, SAMPLER * LN2, ADVANTAGES, torch.tensor([1, 3]))
    assert batch.corrections is not None
    assert batch.corrections.weights.tolist() == pytest.approx([16 / 9, *[2 / 9] * 3], rel=1e-6)


def by_level(delta: Floats, level: str) -> Floats:
    """The logarithm of w of each token of a response, from delta = old - rollout log-prob."""
    if level == "token":
        return delta
    return np.full(len(delta), delta.mean() if level == "geometric" else delta.sum())


def rejected(entry: Rejection, delta: Floats) -> npt.NDArray[np.bool_]:
    """Which tokens of a response an entry of `ppo.rejection` rejects."""
    if entry.kind == "ratio":
        ratios = np.exp(by_level(delta, entry.level))
        return (ratios < entry.low) | (ratios > entry.high)
    if entry.kind == "veto":
        return np.full(len(delta), (np.exp(delta) < entry.below).any())
    values = delta**2 / 2 if entry.estimator == "k2" else np.exp(delta) - 1 - delta
    of = {"token": values, "sum": values.sum(), "mean": values.mean(), "max": values.max()}
    return np.broadcast_to(of[entry.level] > entry.above, len(delta))


def slow_corrections(
    settings: ImportanceWeights | None, rejection: Sequence[Rejection], apart: Sequence[Floats]
) -> tuple[Floats, list[str]]:
    """Weights, and changes of the ratio, of the tokens of all responses."""
    weights, changes = np.ones(sum(map(len, apart))), np.full(sum(map(len, apart)), "none", dtype=object)
    if settings is not None:
        ratios = np.exp(np.concatenate([by_level(delta, settings.level) for delta in apart]))
        changes[ratios > settings.highest] = f"{settings.kind}_high"
        changes[ratios < settings.lowest] = f"{settings.kind}_low"
        bounded = np.clip(ratios, settings.lowest, settings.highest)
        weights = bounded if settings.kind == "truncated" else np.where(changes == "none", ratios, 0.0)
        each = slice(None) if settings.level == "token" else np.cumsum([len(delta) for delta in apart]) - 1
        weights = weights / weights[each].mean() if settings.normalize else weights
    for entry in rejection:
        where = np.concatenate([rejected(entry, delta) for delta in apart])
        weights, changes = np.where(where, 0.0, weights), np.where(where, "rejected", changes)
    return weights, changes.tolist()


EVERY_WEIGHT = [
    ImportanceWeights(kind=kind, level=level, normalize=normalize)
    for kind in ("truncated", "masked")
    for level in ("token", "sequence", "geometric")
    for normalize in (False, True)
]
EVERY_REJECTION: list[Rejection] = [
    *(RatioRejection(kind="ratio", level=level, low=0.7, high=1.6) for level in ("token", "sequence", "geometric")),
    *(
        DivergenceRejection(kind="divergence", estimator=estimator, level=level, above=0.3)
        for estimator in ("k2", "k3")
        for level in ("token", "sum", "mean", "max")
    ),
    VetoRejection(kind="veto", below=0.4),
]


def test_weights_and_rejections_are_their_slow_definitions() -> None:
    lengths, generator = torch.tensor([1, 5, 2, 9, 3, 4]), np.random.default_rng(0)
    noise = (generator.normal(-3, np.linspace(0, 1.6, 24)) for _ in range(2))  # the last responses are further apart
    old, sampled = (torch.from_numpy(logprobs.astype(np.float32)) for logprobs in noise)
    apart = np.split((old - sampled).numpy().astype(np.float64), np.cumsum(lengths.numpy())[:-1])
    cases = [(weights, ()) for weights in EVERY_WEIGHT] + [(None, (entry,)) for entry in EVERY_REJECTION]
    for settings, rejection in [*cases, (EVERY_WEIGHT[0], EVERY_REJECTION)]:
        found = corrections_of(settings, rejection, old, sampled, lengths)
        assert found is not None
        weights, changes = slow_corrections(settings, rejection, apart)
        assert correction_names(found.changes) == changes, (settings, rejection)
        assert len(set(changes)) > 1, "a rule that changes every token or none would pass"
        np.testing.assert_allclose(found.weights, weights, rtol=1e-5)


SHORT = ("ppo.iterations=1", "model.warm_start_steps=2", "evaluation.every=1000")
ANCHOR, NOISE, LEFT_OUT = "ppo.ratio_anchor=old", "rollout.mismatch_sigma=0.5", "ppo.rejected_tokens=left_out"
REJECTION = "ppo.rejection=[{kind: ratio, level: geometric, low: 0.9, high: 1.1}, {kind: veto, below: 0.9}]"


def recorded(out: Path, *options: str) -> Path:
    return tiny_run(out, *SHORT, ANCHOR, *options)


def fingerprint(run_dir: Path) -> str:
    return reader.open_manifest(run_dir).fingerprint


def test_a_remedy_for_what_is_not_there_changes_no_bit(tmp_path: Path) -> None:
    remedy = (REJECTION, LEFT_OUT, "ppo.importance_weights={kind: truncated}")
    assert fingerprint(recorded(tmp_path / "a", *remedy)) == fingerprint(recorded(tmp_path / "b"))
    # the control: the same remedy where there is something
    assert fingerprint(recorded(tmp_path / "c", NOISE, *remedy)) != fingerprint(recorded(tmp_path / "d", NOISE))


ALL_AT_ONCE = (
    *(NOISE, "ppo.importance_weights={kind: masked, floor: 0.7, cap: 1.5, normalize: true}", LEFT_OUT),
    "ppo.rejection=[{kind: veto, below: 0.3}, {kind: ratio, level: geometric, low: 0.8, high: 1.3}, "
    "{kind: divergence, level: mean, above: 0.2}]",
)


def test_recorded_weights_are_their_slow_definition_and_recomputed(tmp_path: Path) -> None:
    run_dir, ppo = recorded(tmp_path, *ALL_AT_ONCE), load_config(TINY, [*SHORT, ANCHOR, *ALL_AT_ONCE]).ppo
    for item in load_iterations(run_dir):
        tokens = reader.read_tokens(run_dir, iterations=[item.iteration])
        responses = [deltas(response) for _, response in tokens.groupby("sequence")]
        weights, changes = slow_corrections(ppo.importance_weights, ppo.rejection, responses)
        computed = tokens[["sequence", "position"]].assign(weight=weights, change=changes)
        expected = item.rows.merge(computed)
        assert set(item.rows["correction"]) >= {"none", "rejected"}
        assert item.rows["correction"].nunique() > 2
        assert (item.rows["correction"].to_numpy() == expected["change"].to_numpy()).all()
        np.testing.assert_allclose(item.rows["importance_weights"], expected["weight"], rtol=1e-5)
        dropped = item.rows["correction"] != "none"
        assert ((item.rows["loss_weights"] == 0) == dropped).all()
        counted = (~dropped).groupby([item.rows["epoch"], item.rows["minibatch"]]).transform("sum")
        np.testing.assert_allclose(item.rows["loss_weights"], (~dropped) / counted.clip(lower=1), rtol=1e-6)
    found = recomputed(run_dir)
    assert found.difference is None, found.lines()
