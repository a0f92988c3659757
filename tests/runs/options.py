"""A small set of configurations in which every two options of the algorithm meet, where they may."""

from __future__ import annotations

import itertools
from functools import cache

from ppo_repro.config.files import load_config
from ppo_repro.config.run import RunConfig
from ppo_repro.errors import UserError
from tests.support.paths import TINY

REWARD_MODEL = "{kind: trained_model, num_pairs: 24, minibatch_size: 8, learning_rate: 1e-3}"

# each option is a list of overrides; the first of a factor is the usual one
FACTORS: dict[str, list[tuple[str, ...]]] = {
    "objective": [
        (),
        ("ppo.objective={clip_range: 0.1, clip_range_high: 0.3, dual_clip: 2.0}",),
        ("ppo.objective={kind: adaptive_clip, target_kl: 0.01}",),
        ("ppo.objective={kind: kl_penalty, target_kl: 0.01}",),
        ("ppo.objective={kind: unclipped}",),
        ("ppo.objective={kind: policy_gradient}",),
        ("ppo.objective={kind: sequence_clip, clip_range: 0.01}",),
        ("ppo.objective={kind: cispo, cap: 1.01, floor: 0.99}",),
        ("ppo.objective={kind: clip_cov, share: 0.2, covariance_low: 0, clip_range: 0.2}",),
        ("ppo.objective={kind: kl_cov, share: 0.2}",),
    ],
    "value": [
        ("value={learning_rate: 1e-3}",),
        ("value={learning_rate: 1e-3, epochs: 3, clip_range: null, normalize_returns: true}",),
        ("value={kind: head, value_coef: 0.5}",),
        ("value={kind: head, clip_range: null, normalize_returns: true}",),
        ("value={kind: none}", "advantages={kind: group}"),
        ("value={kind: none}", "advantages={kind: group, scale: false}"),
        (f"reward.terms=[{REWARD_MODEL}]", "value={init: reward_model, learning_rate: 1e-3}"),
        ("value={learning_rate: 1e-3, lora: {rank: 2, alpha: 4.0}}",),
    ],
    "advantages": [
        (),
        ("advantages.gae_lambda=0", "advantages.gamma=0.9", "advantages.whiten=none"),
        ("advantages.gae_lambda=1", "advantages.whiten=scale"),
    ],
    "kl": [
        (),
        ("kl={charge: word, estimator: k3, direction: reference_policy}",),
        ("kl={charge: last_mean, estimator: exact, controller: {kind: adaptive, target_kl: 0.5}}",),
        ("kl={charge: length_normalized, estimator: exact, direction: reference_policy}",),
        ("kl={placement: loss, estimator: k2}",),
        ("kl={placement: loss, estimator: exact}",),
        ("kl={placement: none}",),
    ],
    "reward": [
        (),
        ("reward.terms=[{kind: exact_match}, {kind: length, target: 2, weight: 0.1}]", "reward.placement=word_ends"),
        ("reward.missing_eos_penalty=0.5", "reward.whiten=scale"),
        ("reward.whiten=full",),
    ],
    "update": [
        (),
        ("ppo.aggregation=sequence_mean", "ppo.early_stop_kl=1e-9"),
        ("ppo.aggregation=sequence_sum", "ppo.schedule=cosine", "ppo.warmup_iterations=1"),
    ],
    "anchor": [
        (),
        ("ppo.ratio_anchor=old",),
        ("ppo.ratio_anchor=old", "ppo.importance_weights={kind: truncated}"),
        ("ppo.ratio_anchor=old", "ppo.importance_weights={kind: masked, level: sequence}"),
        ("ppo.ratio_anchor=old", "ppo.importance_weights={kind: masked, floor: 0.5, cap: 5}"),  # IcePop
        (
            "ppo.ratio_anchor=old",
            "ppo.importance_weights={kind: truncated, level: geometric, cap: null, normalize: true}",
        ),
        (
            "ppo.rejection=[{kind: ratio, low: 0.5, high: 2}, {kind: veto}, {kind: divergence, above: 1}]",
            "ppo.rejected_tokens=left_out",
        ),
    ],
    "sampling": [(), ("rollout.temperature=0.7", "rollout.top_p=0.9"), ("rollout.top_k=4",)],
    "memory": [(), ("layout.gradient_checkpointing=true",), ("lora={rank: 2, alpha: 4.0}",)],
}

NAMES = tuple(FACTORS)
Choice = tuple[int, ...]  # an option of each factor


def overrides(choice: Choice) -> list[str]:
    return [o for name, option in zip(NAMES, choice, strict=True) for o in FACTORS[name][option]]


@cache
def config_of(choice: Choice) -> RunConfig | None:
    """The configuration of a choice, None where two of its options contradict each other."""
    try:
        return load_config(TINY, overrides(choice))
    except UserError:
        return None


def _pairs(choice: Choice) -> set[tuple[int, int, int, int]]:
    return {(i, choice[i], j, choice[j]) for i, j in itertools.combinations(range(len(choice)), 2)}


# what the options not yet chosen may be: the usual ones, or those that go with group advantages
BASES: tuple[dict[str, int], ...] = ({}, {"value": 4, "kl": 4})


def _possible(chosen: dict[int, int]) -> bool:
    return any(
        config_of(tuple(chosen.get(i, base.get(name, 0)) for i, name in enumerate(NAMES))) is not None for base in BASES
    )


def _completions(fixed: dict[int, int], wanted: set[tuple[int, int, int, int]]) -> Choice | None:
    """The choice with the given options that, option by option, meets most wanted pairs; None if there is none."""
    chosen = dict(fixed)
    for factor in range(len(NAMES)):
        if factor in chosen:
            continue

        def gain(option: int, factor: int = factor) -> int:
            pairs = ((min(f, factor), max(f, factor), f) for f in chosen)
            return sum(
                (a, chosen[a] if a == f else option, b, chosen[b] if b == f else option) in wanted for a, b, f in pairs
            )

        ranked = sorted(range(len(FACTORS[NAMES[factor]])), key=lambda option: (-gain(option), option))
        for option in ranked:
            if _possible({**chosen, factor: option}):
                chosen[factor] = option
                break
        else:
            return None
    choice = tuple(chosen[i] for i in range(len(NAMES)))
    return choice if config_of(choice) is not None else None


def pairwise() -> list[Choice]:
    """Choices that together hold every two options of two factors which some configuration can hold."""
    sizes = [len(FACTORS[name]) for name in NAMES]
    wanted = {
        (i, a, j, b)
        for i, j in itertools.combinations(range(len(NAMES)), 2)
        for a in range(sizes[i])
        for b in range(sizes[j])
    }
    found: list[Choice] = []
    while wanted:
        i, a, j, b = min(wanted)
        choice = _completions({i: a, j: b}, wanted)
        if choice is None:
            wanted.discard((i, a, j, b))
            continue
        found.append(choice)
        wanted -= _pairs(choice)
    return found
