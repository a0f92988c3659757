"""Steps of a trainer of torch's own: how close its gradients are to float64's, loss scaling, state."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.errors import NumericsError
from ppo_repro.models.batches import lay_out
from ppo_repro.models.networks import hidden_states, make_policy
from ppo_repro.models.precision import stock_networks
from ppo_repro.numerics.layers.families import head_of, trunk_of
from ppo_repro.numerics.logprobs import token_statistics
from ppo_repro.numerics.optim.adamw import AdamWSettings
from ppo_repro.numerics.optim.stock import FIRST_EXPONENT, STEPS_TO_DOUBLE, StockOptimizer
from ppo_repro.numerics.sharding.layers import own_logits
from ppo_repro.ranks import ALONE, Ranks
from tests.support.models import CONTEXT, ragged, source_model
from tests.support.thread_ranks import ThreadRanks, in_threads

# without momentum and clipping the first moments after a step are its gradients
PLAIN = AdamWSettings(1e-3, 0.0, 0.95, 1e-8, 0.0, 1e30)


def optimizer_of(dtype: str, settings: AdamWSettings = PLAIN, family: str = "qwen3") -> StockOptimizer:
    source = source_model(family)
    policy = make_policy(source, "exact", CONTEXT)
    return StockOptimizer(policy, stock_networks(source, dtype, CONTEXT).policy, settings)


def backward_of(
    optimizer: StockOptimizer, weight: float = 0.02, size: int = 6, among: Ranks = ALONE
) -> Callable[[], None]:
    """Backward passes of `size` sequences each, of the sum over tokens of -weight log-prob, divided among ranks."""
    prompts, responses = ragged(6, 0)
    firsts = range(0, len(prompts), size)[among.rank :: among.size]
    batches = [lay_out(prompts[i : i + size], responses[i : i + size], "right") for i in firsts]

    def backward() -> None:
        for batch in batches:
            logits, _ = own_logits(head_of(optimizer.copy), hidden_states(trunk_of(optimizer.copy), batch))
            logprobs, _ = token_statistics(logits, batch.targets, 1.0, None, "exact")
            torch.autograd.backward(-logprobs, torch.full_like(logprobs, weight * optimizer.loss_scale))

    return backward


def gradients_of(dtype: str, weight: float = 0.02, **more: int) -> dict[str, Tensor]:
    optimizer = optimizer_of(dtype)
    optimizer.step(backward_of(optimizer, weight, **more), 60)
    return dict(optimizer.state().first)


def in_float64(weight: float) -> dict[str, Tensor]:
    """The same gradients of the unmodified model, each sequence alone."""
    model: PreTrainedModel = copy.deepcopy(source_model("qwen3")).double().eval()
    for prompt, response in zip(*ragged(6, 0), strict=True):
        ids = torch.tensor([[*prompt, *response]])
        logprobs = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        (-weight * logprobs.gather(-1, torch.tensor(response)[:, None]).sum()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Norm of all differences over the norm of all gradients."""
    assert set(found) == set(expected)
    differences = torch.cat([(found[n].double() - expected[n]).flatten() for n in expected])
    return float(differences.norm() / torch.cat([g.flatten() for g in expected.values()]).norm())


def test_gradients_have_the_error_of_their_dtype() -> None:
    expected = in_float64(0.02)
    errors = {dtype: error(gradients_of(dtype), expected) for dtype in ("bfloat16", "float16", "float32")}
    # halves of a unit in the last place: 2^-9, 2^-12, 2^-25; a pass through two layers adds a dozen of them
    assert 2**-9 < errors["bfloat16"] < 2**-4
    assert 2**-12 < errors["float16"] < 2**-7
    assert errors["float32"] < 2**-19
    # gradients of micro-batches are added in float32, so that their number does not show in the size of the error
    assert error(gradients_of("bfloat16", size=1), expected) < 2**-4


def test_small_gradients_vanish_in_float16_without_a_loss_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(gradients: dict[str, Tensor]) -> float:
        return float(torch.cat([(g == 0).flatten().float() for g in gradients.values()]).mean())

    weight = 2.0**-20  # of a token in a batch of a million
    scaled, expected = gradients_of("float16", weight), in_float64(weight)
    assert error(scaled, expected) < 2**-7 and zeros(scaled) < 0.01
    monkeypatch.setattr("ppo_repro.numerics.optim.stock.FIRST_EXPONENT", 0)
    unscaled = gradients_of("float16", weight)
    assert error(unscaled, expected) > 0.1 and zeros(unscaled) > 0.05


def test_a_scale_that_is_too_large_is_halved_and_the_step_done_again() -> None:
    optimizer, weight = optimizer_of("float16"), 64.0
    report = optimizer.step(backward_of(optimizer, weight), 60)
    assert report.redos > 0 and optimizer.loss_scale == 2.0 ** (FIRST_EXPONENT - report.redos)
    assert error(dict(optimizer.state().first), in_float64(weight)) < 2**-7, "no minibatch is lost"
    assert optimizer.step(backward_of(optimizer, weight), 60).redos == 0, "the scale that fitted is kept"
    with pytest.raises(NumericsError, match=r"^a gradient is not finite in float16 at any loss scale; lower the "):
        optimizer.step(backward_of(optimizer, 1e30), 60)


def test_a_scale_that_fits_for_long_doubles() -> None:
    optimizer = optimizer_of("float16")
    state = optimizer.state()
    assert state.grids == {"loss_scale": FIRST_EXPONENT, "steps_at_this_scale": 0}
    optimizer.load(type(state)(**{**vars(state), "grids": {**state.grids, "steps_at_this_scale": STEPS_TO_DOUBLE - 1}}))
    optimizer.step(backward_of(optimizer), 60)
    assert optimizer.loss_scale == 2.0 ** (FIRST_EXPONENT + 1)
    assert optimizer_of("bfloat16").loss_scale == 1.0 and not optimizer_of("bfloat16").state().grids


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_copy_follows_the_weights_and_the_state_goes_on(dtype: str) -> None:
    one, other = optimizer_of(dtype), optimizer_of(dtype)
    one.step(backward_of(one), 60)
    with torch.no_grad():
        for name, parameter in other.adamw.parameters.items():
            parameter.copy_(one.adamw.parameters[name])
    other.load(one.state())
    for optimizer in (one, other):
        for name, parameter in optimizer.copy.named_parameters():
            live = optimizer.adamw.parameters[name]
            assert live.dtype == torch.float32 and torch.equal(parameter, live.to(getattr(torch, dtype)))
            assert parameter.grad is None
    assert other.state().grids == one.state().grids
    for name, moment in one.state().second.items():
        assert torch.equal(other.state().second[name], moment) and moment.abs().max() > 0
    foreign = optimizer_of("float16" if dtype == "bfloat16" else "bfloat16")
    with pytest.raises(ValueError, match=r"not that of mismatch.trainer.stock in this dtype"):
        foreign.load(one.state())


def test_ranks_add_their_gradients_up_and_have_the_same_weights() -> None:
    def step(ranks: ThreadRanks, together: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        optimizer = optimizer_of("bfloat16")
        backward = backward_of(optimizer, size=1, among=ranks)
        optimizer.step(backward, 60, ranks if together else ALONE)
        return dict(optimizer.state().first), {n: p.detach() for n, p in optimizer.adamw.parameters.items()}

    expected = in_float64(0.02)
    for gradients, weights in (found := in_threads(2, lambda ranks: step(ranks, True))):
        assert error(gradients, expected) < 2**-4
        assert all(torch.equal(weights[name], other) for name, other in found[0][1].items())
    # alone each has half of the sequences, and goes its own way
    (first, first_weights), (second, second_weights) = in_threads(2, lambda ranks: step(ranks, False))
    assert min(error(first, expected), error(second, expected)) > 0.1
    assert not all(torch.equal(first_weights[name], second_weights[name]) for name in first_weights)


def test_a_gradient_too_large_on_one_rank_lowers_the_scale_of_all() -> None:
    def step(ranks: ThreadRanks) -> tuple[int, float]:
        optimizer = optimizer_of("float16")
        weight = 64.0 if ranks.rank == 1 else 2.0**-10
        return optimizer.step(backward_of(optimizer, weight, 1, ranks), 60, ranks).redos, optimizer.loss_scale

    (redos, scale), other = in_threads(2, step)
    assert redos > 0 and scale == 2.0 ** (FIRST_EXPONENT - redos) and other == (redos, scale)
