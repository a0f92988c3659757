"""A trial of the user's functions on random batches before a run begins: only the tokens themselves may change a loss.

The checks are like `ppo_repro.testing.check_loss`, with the calls of this run: micro-batches of whole responses and
several processes. A function never sees padding.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ppo_repro.base.errors import UserError
from ppo_repro.base.seeding import bell, words
from ppo_repro.config.algorithm import KLInLoss, NoValue
from ppo_repro.config.run import RunConfig
from ppo_repro.ppo.objectives import probability_ratios
from ppo_repro.ppo.own_batches import AdvantageBatch, ObjectiveBatch, ScoreBatch, Tokens
from ppo_repro.ppo.own_functions import Own, place_of
from ppo_repro.stages.functions import Functions, require_settings, settings_of_process
from ppo_repro.stages.operations import Watch, instead_of

LONGEST, RESPONSES = 40, 7  # of the drawn responses: tokens, and how many
LOG_RATIOS = (1e-8, -1e-8, 20.0, -20.0, 100.0, -100.0, 800.0, -800.0)
NATIVE_TOLERANCE = 1e-4  # relative to the largest; deterministic numerics have none


class _Result(NamedTuple):
    """The results of some calls for all drawn tokens, float32 [n] each."""

    losses: Tensor
    logprob_gradients: Tensor
    entropy_gradients: Tensor


OfTokens = Callable[[ObjectiveBatch], Tensor]  # what a function gives for each token, [n]
Batch = TypeVar("Batch", bound=Tokens)


def try_functions(config: RunConfig, functions: Functions) -> None:
    """Call the user's functions on random batches. Raises UserError, naming file and line, for the first mistake."""
    checked = {field for field, own in config.functions.items() if own.checked}
    if not checked:
        return
    tokens, objective, advantages = _drawn(config), functions.objective, functions.advantages
    estimator, placement = functions.estimator, functions.placement
    if objective is not None and "ppo.objective" in checked:
        _try_losses(config, objective, lambda batch: objective.losses(batch)[0], tokens, trains=True)
    if estimator is not None and "kl.estimator" in checked:
        trains = isinstance(config.kl, KLInLoss)
        _try_losses(config, estimator, lambda b: estimator.estimate(b.new_logprobs, b.ref_logprobs), tokens, trains)
    if advantages is not None and "advantages" in checked:
        _try_iterations(config, advantages, advantages.advantages, _drawn_rewards(config, tokens))
    if placement is not None and "reward.placement" in checked:
        _try_iterations(config, placement, placement.place, _drawn_scores(tokens))


def _try_losses(config: RunConfig, own: Own, call: OfTokens, drawn: ObjectiveBatch, trains: bool) -> None:
    """Try a function that is called with micro-batches; `trains` means that its result needs a gradient."""
    whole = [torch.arange(len(drawn.responses))]

    def result(batch: ObjectiveBatch, micro_batches: Sequence[Tensor], seed: int = 1) -> _Result:
        return _result(own, call, batch, micro_batches, trains, seed)

    before = settings_of_process()
    with Watch() as seen:
        expected = result(drawn, whole)
    require_settings(own.function, before)
    if change := _difference(result(drawn, whole, seed=2), expected, drawn, 0.0):
        raise _refused(own, f"gives two results for one batch, {change}; it must follow from its input alone")
    tolerance = NATIVE_TOLERANCE if config.is_native else 0.0
    for layout, micro_batches in _layouts(config, drawn):
        try:
            found = result(drawn, micro_batches)
        except UserError as error:
            raise UserError(f"{error} ({layout}){_unchecked(own)}") from None
        if change := _difference(found, expected, drawn, tolerance):
            alone = "let what a response gets depend on its own tokens alone"
            raise _refused(own, f"depends on the layout. {layout}: {change}; {alone}")
    for extreme, batch in _extremes(drawn):
        try:
            result(batch, whole)
        except UserError as error:
            raise UserError(f"{error} ({extreme}); bound it before it leaves float32{_unchecked(own)}") from None
    _require_same_everywhere(config, own, seen)


def _try_iterations(config: RunConfig, own: Own, call: Callable[[Batch], Tensor], drawn: Sequence[Batch]) -> None:
    """Try a function that is called with all tokens of an iteration."""
    for number, batch in enumerate(drawn):
        given, before = copy.deepcopy(batch), settings_of_process()
        with _seeded(1), Watch() as seen:
            first = call(given)
        require_settings(own.function, before)
        for field in fields(batch):
            as_drawn, now = getattr(batch, field.name), getattr(given, field.name)
            if as_drawn is not None and not torch.equal(as_drawn, now):
                raise _refused(own, f"changes {field.name} in place; let it change a copy")
        with _seeded(2):
            second = call(given)
        apart = (first != second).nonzero()[:, 0].tolist()
        if apart:
            both = f"{float(first[apart[0]]):.9g} and then {float(second[apart[0]]):.9g}{place_of(batch, apart[0])}"
            raise _refused(own, f"gives two results for one batch, {both}; it must follow from its input alone")
        if number == 0:
            _require_same_everywhere(config, own, seen)


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


def _drawn(config: RunConfig) -> ObjectiveBatch:
    """Draw responses that this run may have: one with a single token, one of full length, several to one prompt."""
    longest, samples = min(LONGEST, config.rollout.max_response_tokens), config.rollout.samples_per_prompt
    lengths = 1 + torch.from_numpy((words(RESPONSES, "trial", "lengths") % longest).astype("int64"))
    lengths[0], lengths[-2], lengths[-1] = 1, longest, 1
    responses = torch.repeat_interleave(torch.arange(RESPONSES), lengths)
    n = len(responses)

    def drawn(name: str, scale: float) -> Tensor:
        return torch.from_numpy(bell(n, "trial", name) * scale).to(torch.float32)

    rollout = -drawn("rollout", 1.5).abs() - 1.0
    old = rollout if config.ppo.ratio_anchor == "rollout" else rollout + drawn("old", 0.1)
    anchor = rollout if config.ppo.ratio_anchor == "rollout" else old
    new = anchor + drawn("new", 0.3)
    starts = torch.cumsum(lengths, 0) - lengths
    advantages = drawn("advantages", 1.0)
    advantages[::11] = 0.0
    kept = 1.0 + drawn("corrections", 0.4)
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
        groups=(responses // samples).clamp(max=max(RESPONSES // samples, 1) - 1),  # none is too small
        positions=torch.arange(n) - starts[responses],
        lengths=lengths[responses],
    )


def _layouts(config: RunConfig, drawn: ObjectiveBatch) -> Iterator[tuple[str, Sequence[Tensor]]]:
    """Yield the name of each layout, and the tokens of each call of the function."""
    size = config.layout.update_micro_batch
    for n in sorted({1, 2, 3, *([size] if 0 < size < RESPONSES else [])}):
        yield f"micro batch {n}", [_tokens_of(drawn, range(i, min(i + n, RESPONSES))) for i in range(0, RESPONSES, n)]
    yield "ranks 2", [_tokens_of(drawn, range(rank, RESPONSES, 2)) for rank in range(2)]


def _tokens_of(drawn: ObjectiveBatch, responses: Sequence[int]) -> Tensor:
    return torch.isin(drawn.responses, torch.tensor(list(responses))).nonzero()[:, 0]


def _drawn_rewards(config: RunConfig, tokens: ObjectiveBatch) -> list[AdvantageBatch]:
    """Return batches for advantages: random rewards, equal rewards, and large rewards."""
    has_values = not isinstance(config.value, NoValue)
    rewards = [tokens.advantages, torch.ones_like(tokens.advantages), tokens.advantages * 1e6]
    return [
        AdvantageBatch(
            **_about(tokens),
            rewards=of_tokens.clone(),
            values=tokens.entropies.clone() if has_values else None,
            scores=tokens.response_sums(of_tokens).to(torch.float64),
        )
        for of_tokens in rewards
    ]


def _drawn_scores(tokens: ObjectiveBatch) -> list[ScoreBatch]:
    """Return batches for a placement: random scores, and scores that are all 0."""
    scores = tokens.response_sums(tokens.advantages).to(torch.float64)
    return [
        ScoreBatch(
            **_about(tokens),
            scores=of_responses,
            is_finished=scores > 0,
            token_ids=tokens.positions.clone(),
            words=tokens.positions // 2,
            old_logprobs=tokens.old_logprobs.clone(),
            ref_logprobs=tokens.ref_logprobs.clone(),
            entropies=tokens.entropies.clone(),
        )
        for of_responses in (scores, torch.zeros_like(scores))
    ]


def _about(tokens: Tokens) -> dict[str, Tensor]:
    return {field.name: getattr(tokens, field.name).clone() for field in fields(Tokens)}


def _result(
    own: Own, call: OfTokens, drawn: ObjectiveBatch, micro_batches: Sequence[Tensor], trains: bool, seed: int
) -> _Result:
    """Call a function for each micro-batch, and join its results."""
    empty = torch.zeros(len(drawn.responses))
    result = _Result(empty, empty.clone(), empty.clone())
    with _seeded(seed):
        for tokens in micro_batches:
            for column, values in zip(result, _micro_batch(own, call, drawn, tokens, trains), strict=True):
                column[tokens] = values
    return result


def _micro_batch(own: Own, call: OfTokens, drawn: ObjectiveBatch, tokens: Tensor, trains: bool) -> _Result:
    """Return losses and gradients of some tokens.

    Raises UserError if the function returns or does something forbidden.
    """
    columns = {field.name: getattr(drawn, field.name)[tokens] for field in fields(ObjectiveBatch)}
    new, entropies = (columns[name].clone().requires_grad_(trains) for name in ("new_logprobs", "entropies"))
    ratios = probability_ratios(new, columns["anchor_logprobs"])
    columns["ratios"] = ratios.detach().clone()
    copies = {name: column.clone() for name, column in columns.items()}
    batch = ObjectiveBatch(**{**copies, "new_logprobs": new, "entropies": entropies, "ratios": ratios})
    losses = call(batch)
    for name, column in columns.items():
        if not torch.equal(column, getattr(batch, name)):
            raise _refused(own, f"changes {name} in place; let it change a copy")
    if not trains:
        return _Result(losses, torch.zeros_like(losses), torch.zeros_like(losses))
    if not losses.requires_grad:
        raise _refused(own, "returned a loss without a gradient; it must depend on new_logprobs or entropies")
    own.function.guarded(torch.autograd.backward, losses, torch.full(losses.shape, 1.0 / 64))
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in (new, entropies)]
    for gradient, of in zip(gradients, ("new_logprobs", "entropies"), strict=True):
        wrong = (~gradient.isfinite()).nonzero()[:, 0].tolist()
        if wrong:
            raise own.refused(f"has a gradient in {of} that is not finite{place_of(batch, wrong[0])}")
    return _Result(losses.detach(), *gradients)


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
    """Describe which losses and gradients differ by more than `tolerance` times the largest; "" if none do."""
    changes = []
    for name, a, b in zip(("loss", "gradient", "gradient in entropies"), found, expected, strict=True):
        apart = (a - b).abs()
        wrong = (apart > tolerance * float(b.abs().max())).nonzero()[:, 0].tolist()
        if wrong:
            both = f"{float(a[wrong[0]]):.9g} instead of {float(b[wrong[0]]):.9g}"
            changes.append(f"{name} differs at {len(wrong)} tokens, first {both}{place_of(drawn, wrong[0])}")
    return "; ".join(changes)
