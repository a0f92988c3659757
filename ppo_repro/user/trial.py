"""A trial of the user's functions on random batches before a run begins: only the tokens themselves may change a loss.

| function | what changes | what must stay |
|---|---|---|
| each | the seed of the global generators | the results |
| each, in deterministic numerics | the machine, which `operations.py` judges by torch's operations | every bit |
| objective, estimator | the responses in a call | every bit; in native numerics the first digits |
| objective, estimator | one token gets an extreme log-ratio or advantage | results are finite |
| objective | the new log-prob of one token | other losses, unless all tokens, all before or all after it change |
| objective | another number of one token | the loss of the next token, or of the token at any other fixed distance |
| advantages | the rewards of one response | advantages of the other prompts, unless those of all prompts change |

`ppo_repro.testing.check_loss` tries losses of other trainers, which get padded rows in any dtype and have tolerances. A
function of a run gets the tokens of whole responses, without padding, and every bit counts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ppo_repro.base.errors import UserError
from ppo_repro.config.algorithm import KLInLoss
from ppo_repro.config.run import RunConfig
from ppo_repro.ppo.objectives import TokenLosses, no_flags, probability_ratios
from ppo_repro.ppo.own_batches import ObjectiveBatch, Tokens
from ppo_repro.user.functions import Functions, Own, OwnAdvantages, OwnEstimator, OwnObjective, OwnT, place_of
from ppo_repro.user.operations import Watch, instead_of
from ppo_repro.user.trial_batches import (
    FEW,
    OLD_LOGPROBS,
    drawn,
    drawn_few,
    drawn_iteration,
    extremes,
    layouts,
    reward_batches,
    score_batches,
    with_rewards,
)

PROBE_TOKENS, PROBE_PROMPTS = 8, 4  # tokens of a response, and prompts, between which dependences are looked for
WEIGHTS = torch.tensor([1 / 64, 1 / 128, 1 / 256])  # weights of responses in the loss, in turn
NATIVE_TOLERANCE = 1e-4  # relative to the largest number; deterministic numerics allow no difference

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
    if objective := _checked(config, functions.objective):
        _refuse(objective, _faults_by_tokens(config, _TokenFunction(objective, objective.losses, trains=True)))
        _refuse(objective, _faults_between_tokens(config, objective))
    if estimator := _checked(config, functions.estimator):
        trains = isinstance(config.kl, KLInLoss)
        _refuse(estimator, _faults_by_tokens(config, _TokenFunction(estimator, _estimates(estimator), trains)))
    if advantages := _checked(config, functions.advantages):
        _refuse(advantages, _faults_by_iteration(config, advantages.advantages, reward_batches(config)))
        _refuse(advantages, _faults_between_prompts(config, advantages))
    if placement := _checked(config, functions.placement):
        _refuse(placement, _faults_by_iteration(config, placement.place, score_batches(config)))


def _checked(config: RunConfig, own: OwnT | None) -> OwnT | None:
    return own if own is not None and config.functions[own.function.field.removesuffix(".path")].checked else None


def _refuse(own: Own, faults: Iterable[str]) -> None:
    """Raise UserError for the first fault, before the next one is looked for."""
    for fault in faults:
        raise own.refused(f"{fault}{_unchecked(own)}")


def _unchecked(own: Own) -> str:
    field = own.function.field.removesuffix("path")
    return f", or start with --unchecked ({field}checked = false), which is recorded"


@contextmanager
def _explained(own: Own, how: str) -> Iterator[None]:
    """Tell in the error of a call how the function was called."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{error}{how}{_unchecked(own)}") from None


def _estimates(own: OwnEstimator) -> Callable[[ObjectiveBatch], TokenLosses]:
    def estimates(batch: ObjectiveBatch) -> TokenLosses:
        result = own.estimate(batch.new_logprobs, batch.ref_logprobs)
        return TokenLosses(result, None, no_flags(result))

    return estimates


class _Result(NamedTuple):
    """The results of some calls for all drawn tokens, [n] each; float32, flags uint8."""

    losses: Tensor
    logprob_gradients: Tensor
    entropy_gradients: Tensor
    flags: Tensor


@dataclass(frozen=True)
class _TokenFunction:
    """A function that a run calls with the tokens of some responses."""

    own: Own
    call: Callable[[ObjectiveBatch], TokenLosses]
    trains: bool  # whether its result needs a gradient

    def result(self, batch: ObjectiveBatch) -> _Result:
        """Return losses, gradients and flags of a call, as in a run.

        Raises UserError if a check of the call fails.
        """
        new, entropies = (x.detach().requires_grad_(self.trains) for x in (batch.new_logprobs, batch.entropies))
        ratios = probability_ratios(new, batch.anchor_logprobs)
        losses, _, flags = self.call(replace(batch, new_logprobs=new, entropies=entropies, ratios=ratios))
        if not self.trains:
            return _Result(losses, torch.zeros_like(losses), torch.zeros_like(losses), flags)
        if losses.requires_grad:
            self.own.function.guarded(torch.autograd.backward, losses, WEIGHTS[batch.responses % len(WEIGHTS)])
        if new.grad is None and entropies.grad is None:
            _refuse(self.own, ["returned a loss without a gradient; it must depend on new_logprobs or entropies"])
        gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in (new, entropies)]
        for gradient, column in zip(gradients, ("new_logprobs", "entropies"), strict=True):
            wrong = (~gradient.isfinite()).nonzero()[:, 0].tolist()
            if wrong:
                raise self.own.refused(f"has a gradient in {column} that is not finite{place_of(batch, wrong[0])}")
        return _Result(losses.detach(), gradients[0], gradients[1], flags)

    def result_of_calls(self, batch: ObjectiveBatch, calls: Sequence[slice], expected: _Result) -> _Result:
        """Call the function with some tokens at a time; return its results, and `expected` for all other tokens."""
        results = _Result(*map(torch.clone, expected))
        for tokens in calls:
            columns = {field.name: getattr(batch, field.name)[tokens] for field in fields(ObjectiveBatch)}
            for column, values in zip(results, self.result(ObjectiveBatch(**columns)), strict=True):
                column[tokens] = values
        return results


def _faults_by_tokens(config: RunConfig, tried: _TokenFunction) -> Iterator[str]:
    """Yield the faults of a function that a run calls with micro-batches."""
    longest = config.rollout.max_response_tokens
    batch = drawn(config, config.ppo.minibatch_size, longest) if tried.trains else drawn_iteration(config)
    with Watch() as seen:
        expected = tried.result(batch)
    with _seeded(2):
        again = tried.result(batch)
    if change := _difference(again, expected, batch, 0.0):
        yield f"gives two results for one batch, {change}; it must follow from its input alone"
    for layout, calls in layouts(config, batch):
        with _explained(tried.own, f" ({layout})"):
            results = tried.result_of_calls(batch, calls, expected)
        if change := _difference(results, expected, batch, NATIVE_TOLERANCE if config.is_native else 0.0):
            if not _difference(results, expected, batch, NATIVE_TOLERANCE):
                yield from _faults_by_machine(config, seen)  # explain a difference in the last bits
            yield f"depends on the layout. {layout}: {change}; let what a response gets depend on its own tokens alone"
    for extreme, few in extremes(drawn_few(config)):
        with _explained(tried.own, f" ({extreme}); bound it before it leaves float32"):
            tried.result(few)
    yield from _faults_by_machine(config, seen)


def _faults_by_iteration(config: RunConfig, call: Callable[[Batch], Tensor], batches: Iterable[Batch]) -> Iterator[str]:
    """Yield the faults of a function that a run calls with all tokens of an iteration. The first batch has as many."""
    for number, batch in enumerate(batches):
        with Watch() as seen:
            first = call(batch)
        with _seeded(2):
            second = call(batch)
        for i in (first != second).nonzero()[:, 0].tolist():
            both = f"{float(first[i]):.9g} and then {float(second[i]):.9g}{place_of(batch, i)}"
            yield f"gives two results for one batch, {both}; it must follow from its input alone"
        if number == 0:
            yield from _faults_by_machine(config, seen)


def _faults_by_machine(config: RunConfig, seen: Watch) -> Iterator[str]:
    if not config.is_native and seen.machine_dependent:
        name = min(seen.machine_dependent)
        yield f"calls torch's {name.strip('_')}: its bits may differ between machines; take {instead_of(name)}"


def _faults_between_tokens(config: RunConfig, own: OwnObjective) -> Iterator[str]:
    """Yield the faults of a loss that depends on some other tokens of its response, such as on the next one alone.

    The log-ratios are near 0 and the advantages positive, so that nothing is clipped.
    """
    batch = drawn(config, FEW, min(PROBE_TOKENS, config.rollout.max_response_tokens))
    new = batch.anchor_logprobs + (batch.new_logprobs - batch.anchor_logprobs) * 1e-2
    batch = replace(batch, new_logprobs=new, advantages=batch.advantages.abs() + 1.0)
    first = len(new) - int(batch.response_lengths[-1])

    def depends(position: int, column: str, others: Iterable[int]) -> str:
        there = ", ".join(map(str, sorted(others)))
        return f"returned a loss{place_of(batch, first + position)} that depends on {column} at position {there}"

    for position, others in _mixed(_dependences(own, batch, "new_logprobs")):
        advice = "let it depend on the token's own, on those of the whole response, or on all up to or from the token"
        yield f"{depends(position, 'new_logprobs', others)}; {advice}"
    for column in ("advantages", "corrections", "entropies", *OLD_LOGPROBS):
        for position, others in _shifted(_dependences(own, batch, column)):
            yield f"{depends(position, column, others)} and not at {position}; let it depend on the token's own"


def _dependences(own: OwnObjective, batch: ObjectiveBatch, column: str) -> list[set[int]]:
    """Return for each token of the last response the positions whose number in `column` changes its loss."""

    def losses(values: Tensor) -> Tensor:
        changed = replace(batch, **{column: values})
        ratios = probability_ratios(changed.new_logprobs, changed.anchor_logprobs)
        return own.losses(replace(changed, ratios=ratios)).surrogates.detach()

    values: Tensor = getattr(batch, column)
    before, first, changes = losses(values), len(values) - int(batch.response_lengths[-1]), []
    for token in range(first, len(values)):
        moved = values.clone()
        moved[token] += 1e-2
        changes.append((losses(moved) != before)[first:])
    return [{other for other, depends in enumerate(on) if depends} for on in torch.stack(changes).T.tolist()]


def _mixed(dependences: Sequence[set[int]]) -> Iterator[tuple[int, set[int]]]:
    """Yield the positions that depend on other tokens, but neither on all, nor on all before or after."""
    length = len(dependences)
    for position, others in enumerate(dependences):
        allowed = (set[int](), {position}, {*range(length)}, {*range(position + 1)}, {*range(position, length)})
        if others not in allowed:
            yield position, others


def _shifted(dependences: Sequence[set[int]]) -> Iterator[tuple[int, set[int]]]:
    """Yield all positions but the first and last, if each depends on one token alone, at one distance other than 0."""
    inside = list(enumerate(dependences))[1:-1]
    shifts = {other - position for position, others in inside for other in others}
    if len(inside) > 1 and all(others for _, others in inside) and len(shifts) == 1 and shifts != {0}:
        yield from inside


def _faults_between_prompts(config: RunConfig, own: OwnAdvantages) -> Iterator[str]:
    """Yield the faults of advantages that depend on responses to some other prompts, but not to all."""
    responses = PROBE_PROMPTS * config.rollout.samples_per_prompt
    few = drawn(config, responses, min(4, config.rollout.max_response_tokens))
    rewards, prompts = few.advantages, set(few.groups.tolist())
    before = own.advantages(with_rewards(config, few, rewards))
    for response in range(len(few.response_lengths)):
        its_own = few.responses == response
        moved = torch.where(its_own, rewards + 1.0, rewards)
        changed = own.advantages(with_rewards(config, few, moved)) != before
        prompt = int(few.groups[its_own][0])
        others = {*few.groups[changed].tolist()} - {prompt}
        if others and others != prompts - {prompt}:
            yield (
                f"returned advantages of prompt {min(others)} that depend on the rewards of response {response}, to "
                f"prompt {prompt}, and not on all prompts; compare a response with those to its prompt, by "
                "`groups`, or with all"
            )


def _difference(results: _Result, expected: _Result, batch: ObjectiveBatch, tolerance: float) -> str:
    """Describe which losses and gradients differ by more than `tolerance` times the largest one; "" if none do.

    With a tolerance of 0 a difference in any bit counts.
    """
    changes = []
    names = ("loss", "gradient", "gradient in entropies", "clip flag")
    for name, actual, wanted in zip(names, results, expected, strict=True):
        apart = (actual.float() - wanted.float()).abs() > tolerance * float(wanted.abs().max())
        if not tolerance:
            apart |= actual.signbit() != wanted.signbit()  # as numbers, -0 and 0 are equal
        wrong = apart.nonzero()[:, 0].tolist()
        if wrong:
            both = f"{float(actual[wrong[0]]):.9g} instead of {float(wanted[wrong[0]]):.9g}"
            changes.append(f"{name} differs at {len(wrong)} tokens, first {both}{place_of(batch, wrong[0])}")
    return "; ".join(changes)
