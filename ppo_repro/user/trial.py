"""A trial of the user's functions on random batches before a run begins: only the tokens themselves may change a loss.

The checks are like `ppo_repro.testing.check_loss`, with the calls of this run: micro-batches of whole responses and
several processes. A function never sees padding.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ppo_repro.base.errors import UserError
from ppo_repro.base.ranks import Ranks
from ppo_repro.base.seeding import bell, permutation, words
from ppo_repro.config.algorithm import KLInLoss, NoValue
from ppo_repro.config.run import RunConfig
from ppo_repro.ppo.log_ratios import LOG_RATIOS
from ppo_repro.ppo.objectives import TokenLosses, no_flags, probability_ratios
from ppo_repro.ppo.own_batches import AdvantageBatch, ObjectiveBatch, ScoreBatch, Tokens
from ppo_repro.user.functions import Functions, Own, OwnAdvantages, OwnObjective, place_of
from ppo_repro.user.operations import Watch, instead_of

MOST_TOKENS = 1 << 19  # of the drawn responses
CALLS = 12  # of a layout: the first ones, and as many others
FEW, SHORT = 2, 40  # full responses of a small batch, and their tokens
OF_PROBE, SAMPLES_OF_PROBE = 8, 4  # tokens of a response, and prompts, whose dependence on each other is tried
SHIFTED = (
    *("advantages", "corrections", "entropies"),
    *("anchor_logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs"),
)
SIZES = torch.tensor([1.0, 1 / 16, 4.0])  # of the numbers of a response
WEIGHTS = torch.tensor([1 / 64, 1 / 128, 1 / 256])  # of losses by response, as different as those of a run
NATIVE_TOLERANCE = 1e-4  # relative to the largest; deterministic numerics have none


class _Result(NamedTuple):
    """The results of some calls for all drawn tokens, [n] each; float32, flags uint8."""

    losses: Tensor
    logprob_gradients: Tensor
    entropy_gradients: Tensor
    flags: Tensor


OfTokens = Callable[[ObjectiveBatch], TokenLosses]
Batch = TypeVar("Batch", bound=Tokens)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of Python, NumPy and torch inside a block, and restore their states after it."""
    state, of_python, of_numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    try:
        yield
    finally:
        torch.set_rng_state(state)
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002


@_seeded(1)
def try_functions(config: RunConfig, functions: Functions) -> None:
    """Call the user's functions on random batches. Raises UserError, naming file and line, for the first mistake."""
    checked = {field for field, own in config.functions.items() if own.checked}
    objective, advantages = functions.objective, functions.advantages
    estimator, placement = functions.estimator, functions.placement
    if objective is not None and "ppo.objective" in checked:
        _try_losses(config, objective, objective.losses, trains=True)
        _require_own_tokens(config, objective)
    if estimator is not None and "kl.estimator" in checked:

        def estimates(batch: ObjectiveBatch) -> TokenLosses:
            found = estimator.estimate(batch.new_logprobs, batch.ref_logprobs)
            return TokenLosses(found, None, no_flags(found))

        _try_losses(config, estimator, estimates, trains=isinstance(config.kl, KLInLoss))
    if advantages is not None and "advantages" in checked:
        _try_iterations(config, advantages, advantages.advantages, _drawn_rewards(config))
        _require_own_prompts(config, advantages)
    if placement is not None and "reward.placement" in checked:
        _try_iterations(config, placement, placement.place, _drawn_scores(config))


def _try_losses(config: RunConfig, own: Own, call: OfTokens, trains: bool) -> None:
    """Try a function that is called with micro-batches; `trains` means that its result needs a gradient."""
    longest = config.rollout.max_response_tokens
    drawn = _drawn(config, config.ppo.minibatch_size, longest) if trains else _drawn_iteration(config)
    with Watch() as seen:
        expected = _result(own, call, drawn, trains)
    with _seeded(2):
        change = _difference(_result(own, call, drawn, trains), expected, drawn, 0.0)
    if change:
        raise _refused(own, f"gives two results for one batch, {change}; it must follow from its input alone")
    tolerance = NATIVE_TOLERANCE if config.is_native else 0.0
    for layout, calls in _layouts(config, drawn):
        try:
            found = _laid_out(own, call, drawn, calls, trains, expected)
        except UserError as error:
            raise UserError(f"{error} ({layout}){_unchecked(own)}") from None
        if change := _difference(found, expected, drawn, tolerance):
            if not _difference(found, expected, drawn, NATIVE_TOLERANCE):
                _require_same_everywhere(config, own, seen)  # explains a difference in the last bits
            alone = "let what a response gets depend on its own tokens alone"
            raise _refused(own, f"depends on the layout. {layout}: {change}; {alone}")
    for extreme, batch in _extremes(_drawn_few(config)):
        try:
            _result(own, call, batch, trains)
        except UserError as error:
            raise UserError(f"{error} ({extreme}); bound it before it leaves float32{_unchecked(own)}") from None
    _require_same_everywhere(config, own, seen)


def _try_iterations(config: RunConfig, own: Own, call: Callable[[Batch], Tensor], drawn: Iterable[Batch]) -> None:
    """Try a function that is called with all tokens of an iteration."""
    for number, batch in enumerate(drawn):
        with Watch() as seen:
            first = call(batch)
        with _seeded(2):
            second = call(batch)
        apart = (first != second).nonzero()[:, 0].tolist()
        if apart:
            both = f"{float(first[apart[0]]):.9g} and then {float(second[apart[0]]):.9g}{place_of(batch, apart[0])}"
            raise _refused(own, f"gives two results for one batch, {both}; it must follow from its input alone")
        if number == 0:
            _require_same_everywhere(config, own, seen)


def _require_own_tokens(config: RunConfig, own: OwnObjective) -> None:
    """Refuse a loss of a token that depends on some other tokens of its response, such as on the next one alone.

    The loss may depend on the new log-probs of all tokens of the response, of all up to the token, or of all from the
    token on. It may not take another column at one fixed distance, such as the next token's advantage. The log-ratios
    are near 0 and the advantages positive, so that nothing is clipped.
    """
    drawn = _drawn(config, FEW, min(OF_PROBE, config.rollout.max_response_tokens))
    new = drawn.anchor_logprobs + (drawn.new_logprobs - drawn.anchor_logprobs) * 1e-2
    drawn = replace(drawn, new_logprobs=new, advantages=drawn.advantages.abs() + 1.0)
    for position, found in enumerate(_dependences(own, drawn, "new_logprobs")):
        length = int(drawn.response_lengths[-1])
        allowed = ({position}, {*range(length)}, {*range(position + 1)}, {*range(position, length)}, set[int]())
        if found not in allowed:
            others = ", ".join(map(str, sorted(found)))
            raise _refused(
                own,
                f"returned a loss{_in_last(drawn, position)} that depends on new_logprobs at position "
                f"{others}; let it depend on the token's own, on those of the whole response, or on all up to or from "
                "the token",
            )
    for column in SHIFTED:
        inside = [*enumerate(_dependences(own, drawn, column))][1:-1]
        shifts = {other - position for position, found in inside for other in found}
        if len(inside) > 1 and len(shifts) == 1 and all(found for _, found in inside) and shifts != {0}:
            position, (other,) = inside[0]
            raise _refused(
                own,
                f"returned a loss{_in_last(drawn, position)} that depends on {column} at position {other} and not at "
                f"{position}; let it depend on the token's own",
            )


def _dependences(own: OwnObjective, drawn: ObjectiveBatch, column: str) -> list[set[int]]:
    """Return for each token of the last response the positions whose number in `column` changes its loss."""

    def losses(values: Tensor) -> Tensor:
        batch = replace(drawn, **{column: values})
        ratios = probability_ratios(batch.new_logprobs, batch.anchor_logprobs)
        return own.losses(replace(batch, ratios=ratios)).surrogates.detach()

    values: Tensor = getattr(drawn, column)
    before, first, changes = losses(values), len(values) - int(drawn.response_lengths[-1]), []
    for token in range(first, len(values)):
        moved = values.clone()
        moved[token] += 1e-2
        changes.append((losses(moved) != before)[first:])
    return [{other for other, depends in enumerate(on) if depends} for on in torch.stack(changes).T.tolist()]


def _in_last(drawn: ObjectiveBatch, position: int) -> str:
    return place_of(drawn, len(drawn.responses) - int(drawn.response_lengths[-1]) + position)


def _require_own_prompts(config: RunConfig, own: OwnAdvantages) -> None:
    """Refuse advantages of a response that depend on responses to some other prompts, but not on those to all."""
    few = _drawn(
        config, SAMPLES_OF_PROBE * config.rollout.samples_per_prompt, min(4, config.rollout.max_response_tokens)
    )
    rewards = few.advantages

    def advantages(rewards: Tensor) -> Tensor:
        scores = few.response_sums(rewards).to(torch.float64)
        values = None if isinstance(config.value, NoValue) else few.entropies
        return own.advantages(AdvantageBatch(**_about(few), rewards=rewards, values=values, scores=scores))

    before, prompts = advantages(rewards), set(few.groups.tolist())
    for response in range(len(few.response_lengths)):
        its_own = few.responses == response
        changed = advantages(torch.where(its_own, rewards + 1.0, rewards)) != before
        prompt = int(few.groups[its_own][0])
        others = {*few.groups[changed].tolist()} - {prompt}
        if others and others != prompts - {prompt}:
            raise _refused(
                own,
                f"returned advantages of prompt {min(others)} that depend on the rewards of response {response}, to "
                f"prompt {prompt}, and not on all prompts; compare a response with those to its prompt, by "
                "`groups`, or with all",
            )


def _require_same_everywhere(config: RunConfig, own: Own, seen: Watch) -> None:
    if not config.is_native and seen.machine_dependent:
        name = min(seen.machine_dependent)
        what = f"calls torch's {name.strip('_')}: its bits may differ between machines; take {instead_of(name)}"
        raise _refused(own, what)


def _unchecked(own: Own) -> str:
    field = own.function.field.removesuffix("path")
    return f", or start with --unchecked ({field}checked = false), which is recorded"


def _refused(own: Own, what: str) -> UserError:
    return own.refused(what + _unchecked(own))


def _drawn_iteration(config: RunConfig) -> ObjectiveBatch:
    """Draw the tokens of an iteration."""
    return _drawn(config, config.sequences_per_iteration, config.rollout.max_response_tokens)


def _drawn_few(config: RunConfig) -> ObjectiveBatch:
    """Draw a few short responses."""
    return _drawn(config, FEW, min(SHORT, config.rollout.max_response_tokens))


def _drawn(config: RunConfig, full: int, longest: int) -> ObjectiveBatch:
    """Draw the tokens of short responses, with 1, 2, 4, ... tokens, and of full ones, as many as MOST_TOKENS allow.

    The numbers of a response resemble each other more than those of different responses, so that the statistics of
    few responses differ much from those of all.

    Args:
        config: gives the number of samples of a prompt, and what the ratios are to.
        longest: the full length, in tokens.
    """
    samples, short = config.rollout.samples_per_prompt, [1 << k for k in range((longest - 1).bit_length())]
    count = len(short) + min(full, max(MOST_TOKENS // longest, 1))
    lengths = torch.tensor([*short, *[longest] * (count - len(short))])
    n, responses = int(lengths.sum()), torch.repeat_interleave(torch.arange(count), lengths)

    def drawn(name: str, scale: float) -> Tensor:
        of_tokens, of_responses = bell(n, "trial", name), bell(count, "trial", name, "responses")
        sizes = SIZES[torch.from_numpy((words(count, "trial", name, "sizes") % len(SIZES)).astype("int64"))]
        return (torch.from_numpy(of_tokens + of_responses[responses]) * sizes[responses] * scale).to(torch.float32)

    rollout = -drawn("rollout", 1.0).abs() - 1.0
    old = rollout if config.ppo.ratio_anchor == "rollout" else rollout + drawn("old", 0.1)
    anchor = rollout if config.ppo.ratio_anchor == "rollout" else old
    new = anchor + drawn("new", 0.2)
    advantages = drawn("advantages", 1.0)
    advantages[5::11] = 0.0
    kept = 1.0 + drawn("corrections", 0.3)
    return ObjectiveBatch(
        new_logprobs=new,
        entropies=drawn("entropies", 0.5).abs(),
        ratios=probability_ratios(new, anchor),
        anchor_logprobs=anchor,
        old_logprobs=old,
        rollout_logprobs=rollout,
        ref_logprobs=rollout + drawn("ref", 0.3),
        advantages=advantages,
        corrections=torch.where(kept < 0.5, 0.0, kept),
        responses=responses,
        groups=(responses // samples).clamp(max=max(count // samples, 1) - 1),  # none is too small
        positions=torch.arange(n) - (torch.cumsum(lengths, 0) - lengths)[responses],
        lengths=lengths[responses],
    )


def _layouts(config: RunConfig, drawn: ObjectiveBatch) -> Iterator[tuple[str, list[slice]]]:
    """Yield the name of each layout, and the tokens of some of its calls; those of `ranks 2` are all tokens."""
    ends = [0, *torch.cumsum(drawn.response_lengths, 0).tolist()]
    count, own = len(ends) - 1, config.layout.update_micro_batch
    for size in sorted({own, *(1 << k for k in range(count.bit_length()))}):
        if 0 < size < count:
            starts = range(0, count, size)
            others = permutation(len(starts), "trial", "calls", size)[:CALLS].tolist()
            chosen = {*range(min(CALLS, len(starts))), *others}
            calls = [slice(ends[starts[i]], ends[min(starts[i] + size, count)]) for i in sorted(chosen)]
            yield f"micro batch {size}", calls
    halves = [Ranks(rank, 2).mine(count) for rank in range(2)]
    yield "ranks 2", [slice(ends[half.start], ends[half.stop]) for half in halves if half]


def _drawn_rewards(config: RunConfig) -> Iterator[AdvantageBatch]:
    """Yield batches for advantages: random rewards, and few equal and few large rewards."""
    tokens, few = _drawn_iteration(config), _drawn_few(config)
    for batch, rewards in (
        (tokens, tokens.advantages),
        (few, torch.ones_like(few.advantages)),
        (few, few.advantages * 1e6),
    ):
        yield AdvantageBatch(
            **_about(batch),
            rewards=rewards,
            values=None if isinstance(config.value, NoValue) else batch.entropies,
            scores=batch.response_sums(rewards).to(torch.float64),
        )


def _drawn_scores(config: RunConfig) -> Iterator[ScoreBatch]:
    """Yield batches for a placement: random scores, and few scores that are all 0."""
    for batch, scale in ((_drawn_iteration(config), 1.0), (_drawn_few(config), 0.0)):
        scores = batch.response_sums(batch.advantages).to(torch.float64)
        yield ScoreBatch(
            **_about(batch),
            scores=scores * scale,
            is_finished=scores > 0,
            token_ids=batch.positions,
            words=batch.positions // 2,
            old_logprobs=batch.old_logprobs,
            ref_logprobs=batch.ref_logprobs,
            entropies=batch.entropies,
        )


def _about(tokens: Tokens) -> dict[str, Tensor]:
    return {field.name: getattr(tokens, field.name) for field in fields(Tokens)}


def _laid_out(
    own: Own, call: OfTokens, drawn: ObjectiveBatch, calls: Sequence[slice], trains: bool, expected: _Result
) -> _Result:
    """Call a function with some tokens at a time; return its results, and what is expected of all other tokens."""
    found = _Result(*map(torch.clone, expected))
    for tokens in calls:
        columns = {field.name: getattr(drawn, field.name)[tokens] for field in fields(ObjectiveBatch)}
        for column, values in zip(found, _result(own, call, ObjectiveBatch(**columns), trains), strict=True):
            column[tokens] = values
    return found


def _result(own: Own, call: OfTokens, drawn: ObjectiveBatch, trains: bool) -> _Result:
    """Return losses, gradients and flags of a call, as in a run. Raises UserError if the function does what it must
    not do.
    """
    new, entropies = (x.detach().requires_grad_(trains) for x in (drawn.new_logprobs, drawn.entropies))
    ratios = probability_ratios(new, drawn.anchor_logprobs)
    losses, _, flags = call(replace(drawn, new_logprobs=new, entropies=entropies, ratios=ratios))
    if not trains:
        return _Result(losses, torch.zeros_like(losses), torch.zeros_like(losses), flags)
    if losses.requires_grad:
        own.function.guarded(torch.autograd.backward, losses, WEIGHTS[drawn.responses % len(WEIGHTS)])
    if new.grad is None and entropies.grad is None:
        raise _refused(own, "returned a loss without a gradient; it must depend on new_logprobs or entropies")
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in (new, entropies)]
    for gradient, of in zip(gradients, ("new_logprobs", "entropies"), strict=True):
        wrong = (~gradient.isfinite()).nonzero()[:, 0].tolist()
        if wrong:
            raise own.refused(f"has a gradient in {of} that is not finite{place_of(drawn, wrong[0])}")
    return _Result(losses.detach(), gradients[0], gradients[1], flags)


def _extremes(drawn: ObjectiveBatch) -> Iterator[tuple[str, ObjectiveBatch]]:
    """Yield a description and the batch with one extreme token: log-ratios near 0 or large, advantages of both signs.

    With the largest ratios, near the end of float32, the advantages are small, so that a loss may multiply by 1000.
    """
    token = len(drawn.responses) // 2
    for x in LOG_RATIOS:
        size = 1.0 if x < 88.0 else 1e-3
        for advantage in (size, -size, 0.0):
            columns = {name: getattr(drawn, name).clone() for name in _LOGPROBS}
            for name, values in columns.items():
                values[token] = -0.5 + min(x, 0.0) if name == "new_logprobs" else -0.5 - max(x, 0.0)
            advantages = drawn.advantages.clone()
            advantages[token] = advantage
            yield f"log-ratio {x:g}, advantage {advantage:g}", replace(drawn, advantages=advantages, **columns)


_LOGPROBS = ("new_logprobs", "anchor_logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs")


def _difference(found: _Result, expected: _Result, drawn: ObjectiveBatch, tolerance: float) -> str:
    """Describe which losses and gradients differ by more than `tolerance` times the largest, with a tolerance of 0 in
    any bit; "" if none do.
    """
    changes = []
    names = ("loss", "gradient", "gradient in entropies", "clip flag")
    for name, a, b in zip(names, found, expected, strict=True):
        apart = (a.float() - b.float()).abs() > tolerance * float(b.abs().max())
        if not tolerance:
            apart |= a.signbit() != b.signbit()  # as numbers, -0 and 0 are equal
        wrong = apart.nonzero()[:, 0].tolist()
        if wrong:
            both = f"{float(a[wrong[0]]):.9g} instead of {float(b[wrong[0]]):.9g}"
            changes.append(f"{name} differs at {len(wrong)} tokens, first {both}{place_of(drawn, wrong[0])}")
    return "; ".join(changes)
