"""The mathematics of `ppo/` call no operation of torch whose bits depend on the machine, forward or backward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from itertools import chain
from types import ModuleType

import pytest
import torch
from torch import Tensor

from ppo_repro.base.seeding import bell
from ppo_repro.ppo import advantages, corrections, kl, losses, objectives, own_batches, preferences, rewards
from ppo_repro.ppo.objectives import Objective
from ppo_repro.user.operations import Watch, instead_of

LENGTHS = torch.tensor([3, 1, 4, 2])
RESPONSES = torch.repeat_interleave(torch.arange(4), LENGTHS)
POSITIONS = torch.tensor([0, 1, 2, 0, 0, 1, 2, 3, 0, 1])
WORDS = POSITIONS // 2
FLAGS = torch.zeros(10, dtype=torch.uint8)


def drawn(name: str, count: int = 10) -> Tensor:
    """Random numbers with a gradient, [count] float32."""
    return torch.from_numpy(bell(count, "operations", name)).to(torch.float32).requires_grad_()


ZERO = torch.zeros(33)
X, Y, Z, PAIRS = drawn("x"), drawn("y"), drawn("z"), [drawn(f"pair {i}", 4) for i in range(4)]
RATIOS = Z.detach().abs().requires_grad_()
SCORES = PAIRS[0].detach().to(torch.float64)
TOKENS = RESPONSES, RESPONSES // 2, POSITIONS, LENGTHS[RESPONSES]
BATCH = own_batches.AdvantageBatch(*TOKENS, rewards=X, values=Y, scores=SCORES)

Call = Callable[[], object]
CALLS: dict[Callable[..., object], Call] = {
    advantages.gae: lambda: advantages.gae(X, Y, LENGTHS, SCORES.float(), 0.99, 0.95),
    advantages.whiten: lambda: [advantages.whiten(X, shift) for shift in (False, True)],
    advantages.explained_variance: lambda: advantages.explained_variance(X, Y),
    corrections.correction_names: lambda: corrections.correction_names(FLAGS),
    corrections.removes_loss: lambda: corrections.removes_loss(FLAGS),
    corrections.importance_ratios: lambda: [
        corrections.importance_ratios(X, Y, LENGTHS, level) for level in ("token", "sequence", "geometric")
    ],
    corrections.truncated_weights: lambda: corrections.truncated_weights(RATIOS, 0.5, 2.0),
    corrections.masked_weights: lambda: corrections.masked_weights(RATIOS, 0.5, 2.0),
    corrections.normalized_weights: lambda: [
        corrections.normalized_weights(RATIOS, LENGTHS, by_response) for by_response in (False, True)
    ],
    corrections.outside_ratio: lambda: corrections.outside_ratio(RATIOS, 0.5, 2.0),
    corrections.beyond_divergence: lambda: [
        corrections.beyond_divergence(X, Y, LENGTHS, estimator, level, 0.1)
        for estimator in ("k2", "k3")
        for level in ("token", "sum", "mean", "max")
    ],
    corrections.vetoed: lambda: corrections.vetoed(RATIOS, LENGTHS, 0.1),
    kl.k1: lambda: kl.k1(X),
    kl.k2: lambda: kl.k2(X),
    kl.k3: lambda: kl.k3(X),
    kl.reverse_k1: lambda: kl.reverse_k1(X),
    kl.reverse_k3: lambda: kl.reverse_k3(X),
    kl.estimate: lambda: [kl.estimate(kind, X, reverse) for kind in ("k1", "k2", "k3") for reverse in (False, True)],
    kl.loss: lambda: [kl.loss(kind, X, Y) for kind in ("k1", "k2", "k3")],
    kl.k3_loss: lambda: kl.k3_loss(X),
    losses.value_losses: lambda: [losses.value_losses(X, Y, Z, clip_range) for clip_range in (None, 0.2)],
    losses.loss_weights: lambda: [
        losses.loss_weights(aggregation, LENGTHS, counted)
        for aggregation in ("token_mean", "sequence_mean", "sequence_sum")
        for counted in (None, POSITIONS > 0)
    ],
    objectives.flag_names: lambda: objectives.flag_names(FLAGS),
    objectives.removes_gradient: lambda: objectives.removes_gradient(FLAGS),
    objectives.no_flags: lambda: objectives.no_flags(X),
    objectives.probability_ratios: lambda: objectives.probability_ratios(X, Y),
    own_batches.Tokens.response_sums: lambda: BATCH.response_sums(X),
    own_batches.Tokens.response_means: lambda: BATCH.response_means(X),
    own_batches.Tokens.of_tokens: lambda: BATCH.of_tokens(PAIRS[0]),
    own_batches.AdvantageBatch.group_sums: lambda: BATCH.group_sums(PAIRS[0]),
    preferences.sequence_logprobs: lambda: preferences.sequence_logprobs(X, LENGTHS),
    preferences.bradley_terry_losses: lambda: preferences.bradley_terry_losses(PAIRS[0], PAIRS[1]),
    preferences.dpo_margins: lambda: preferences.dpo_margins(*PAIRS, beta=0.1),
    preferences.dpo_losses: lambda: preferences.dpo_losses(PAIRS[0]),
    preferences.preference_accuracy: lambda: preferences.preference_accuracy(PAIRS[0]),
    rewards.last_tokens: lambda: rewards.last_tokens(LENGTHS),
    rewards.word_lengths: lambda: rewards.word_lengths(WORDS, LENGTHS),
    rewards.place_scores: lambda: [
        rewards.place_scores(SCORES, LENGTHS, WORDS, placement) for placement in ("last", "word_ends")
    ],
    rewards.charge_penalties: lambda: [
        rewards.charge_penalties(X, LENGTHS, WORDS, charge)
        for charge in ("token", "word", "length_normalized", "last_sum", "last_mean")
    ],
    rewards.token_rewards: lambda: rewards.token_rewards(X.detach().double(), Y),
}

OBJECTIVES = [
    Objective(),
    objectives.PolicyGradient(),
    objectives.Penalty(0.5),
    objectives.Clip(0.2, 0.3, dual=3.0),
    objectives.SequenceClip(0.01, 0.01),
    objectives.Cispo(0.5, 2.0),
]


def tensors(result: object) -> Iterator[Tensor]:
    """The tensors in a result, which may be in lists and tuples."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, list | tuple):
        yield from chain.from_iterable(map(tensors, result))


def machine_dependent(call: Call) -> list[str]:
    """The operations of a call, and of the backward pass from its results, whose bits depend on the machine."""
    with Watch() as seen:
        for result in tensors(call()):
            if result.requires_grad:
                result.backward(torch.full_like(result, 1.0 / 64), inputs=[X, Y, Z, RATIOS, *PAIRS], retain_graph=True)
    return sorted(seen.machine_dependent)


def results(objective: Objective) -> list[Tensor | None]:
    """What an objective computes in one update."""
    ratios = objective.ratios(X, Y.detach(), RESPONSES)
    return [
        objective.surrogates(ratios, Z.detach(), X),
        objective.penalties(X - Y.detach()),
        objective.flags(ratios.detach(), Z.detach()),
    ]


@pytest.mark.parametrize("function", CALLS, ids=lambda function: f"{function.__module__}.{function.__qualname__}")
def test_no_function_of_ppo_depends_on_the_machine(function: Callable[..., object]) -> None:
    assert machine_dependent(CALLS[function]) == []


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: type(objective).__name__)
def test_no_objective_depends_on_the_machine(objective: Objective) -> None:
    assert machine_dependent(lambda: results(objective)) == []


TWICE = torch.tensor([0, 0])
DEPENDENT: list[tuple[str, Call, list[str]]] = [
    ("sum", lambda: X * X.sum(), ["sum"]),
    ("sum in backward", lambda: RATIOS[:1] * X, ["sum"]),
    ("exp", lambda: kl.k1(X).exp(), ["exp"]),
    ("exp of one number", lambda: X[0].exp(), ["exp"]),
    ("sinh", lambda: torch.sinh(X), ["cosh", "sinh"]),
    ("atan", lambda: torch.atan(X), ["atan"]),
    ("elu", lambda: torch.nn.functional.elu(X), ["elu", "elu_backward"]),
    ("mish", lambda: torch.nn.functional.mish(X), ["mish", "mish_backward"]),
    ("xlogy", lambda: torch.xlogy(Y.detach(), RATIOS), ["xlogy"]),
    ("mse_loss", lambda: torch.nn.functional.mse_loss(X, Y), ["mse_loss", "mse_loss_backward"]),
    ("of a list", lambda: torch._foreach_exp([X.detach(), Y.detach()]), ["_foreach_exp"]),
    ("of integers", lambda: torch.exp(POSITIONS), ["exp"]),
    ("index_add", lambda: torch.zeros(4).index_add(0, RESPONSES, X.detach()), ["index_add"]),
    ("repeated index in backward", lambda: X[TWICE], ["index_put"]),
    ("repeated index of gather in backward", lambda: X.gather(0, TWICE), ["scatter_add"]),
    ("factor in a sum", lambda: torch.add(X.detach(), Y.detach(), alpha=0.1), ["add"]),
    ("quotient rounded down", lambda: torch.div(X, RATIOS, rounding_mode="floor").detach(), ["div"]),
    ("complex", lambda: torch.view_as_real(X.detach().to(torch.complex64) * 1j), ["_to_copy", "mul", "view_as_real"]),
    ("square root", lambda: RATIOS.sqrt(), ["sqrt"]),
    ("cube", lambda: X**3, ["pow"]),
    ("the larger of two zeros", lambda: ZERO.maximum(-ZERO), ["maximum"]),
    ("a bound that is a zero", lambda: (-ZERO).clamp(min=ZERO), ["clamp"]),
    ("the largest of zeros", lambda: torch.stack([ZERO, -ZERO]).amax(), ["amax"]),
]

SAME: list[tuple[str, Call]] = [
    ("arithmetic", lambda: (X + 2 * Y - 1.0 / RATIOS).abs() / Z - X**2),
    ("choice", lambda: torch.where(X > 0, X, Y).clamp(-1, 1).minimum(Z).maximum(Y)),
    ("largest", lambda: X.amax() - X.max()),
    ("largest of other numbers than zeros", lambda: torch.stack([ZERO, -ZERO, ZERO + 1]).amax()),
    ("zeros and a bound", lambda: torch.stack([ZERO, -ZERO]).clamp(min=0.0)),
    ("a zero and a number", lambda: (-ZERO).clamp(min=0.0).minimum(ZERO + 1).maximum(-ZERO)),
    ("order", lambda: (X.sort().values, X.view(5, 2).max(1).values, X.gather(0, torch.tensor([2, 0])))),
    ("sum of one number", lambda: (X[:1].sum(), X[:0].sum())),
    ("indices", lambda: torch.stack([X[torch.tensor([3, 1])], X[1:3], X[[-1, 0]]]).T.reshape(-1)),
    ("mask", lambda: X[POSITIONS > 0]),
    ("of many dimensions", lambda: X.view(5, 2)[:, torch.tensor([1, 0])]),
    ("sums of integers", lambda: POSITIONS.cumsum(0).sum().float()),
]


@pytest.mark.parametrize(("call", "names"), [pytest.param(*rest, id=name) for name, *rest in DEPENDENT])
def test_an_operation_that_may_depend_on_the_machine_is_named(call: Call, names: list[str]) -> None:
    assert machine_dependent(call) == names


@pytest.mark.parametrize("call", [pytest.param(call, id=name) for name, call in SAME])
def test_an_operation_with_the_same_bits_on_every_machine_is_not_named(call: Call) -> None:
    assert machine_dependent(call) == []


def test_an_operation_that_nobody_listed_has_advice() -> None:
    assert instead_of("exp") == "ppo_repro.numerics.exp"
    assert "the functions of ppo_repro.numerics" in instead_of("mish")


def taking_tensors(owner: ModuleType | type, module: str) -> set[object]:
    """The public functions of a module or class, written in a module, that have a parameter that is a tensor."""
    written = (f for f in vars(owner).values() if inspect.isfunction(f) and f.__module__ == module)
    public = [function for function in written if not function.__name__.startswith("_")]
    return {f for f in public if any("Tensor" in kind for name, kind in f.__annotations__.items() if name != "return")}


def test_every_function_and_objective_of_ppo_is_called() -> None:
    batches = [kind for kind in vars(own_batches).values() if isinstance(kind, type)]
    modules = (advantages, corrections, kl, losses, objectives, preferences, rewards)
    expected = [taking_tensors(module, module.__name__) for module in modules]
    expected += [taking_tensors(kind, own_batches.__name__) for kind in batches]
    assert CALLS.keys() == set.union(*expected)
    kinds = {kind for kind in vars(objectives).values() if isinstance(kind, type) and issubclass(kind, Objective)}
    assert {type(objective) for objective in OBJECTIVES} == kinds
