"""Integer gradients: the same bits however a step is split up, and the values of autograd."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.errors import NumericsError, UserError
from ppo_repro.models.batches import TokenBatch, lay_out
from ppo_repro.models.networks import checkpoint_gradients, make_policy, policy_logits
from ppo_repro.numerics import backend
from ppo_repro.numerics.arithmetic.grid import quantise
from ppo_repro.numerics.gradients import MAX_TOKENS, GradientAccumulator, assert_no_wrap
from ppo_repro.numerics.token_statistics import token_statistics
from ppo_repro.numerics.optimizer import AdamWSettings, ExactOptimizer, exact_norm, make_optimizer, weights_digest
from tests.support.in_order import sum_in_order
from tests.support.models import (
    CONTEXT,
    EVERY_FAMILY,
    VARIANTS,
    ragged,
    scored,
    seeded,
    source_model,
    unequal,
)

SETTINGS = AdamWSettings(1e-3, 0.9, 0.95, 1e-8, 0.01, 1.0)
COUNT, STEPS = 11, 3
LAYOUTS = (  # micro-batch, padding, seed of the order of the sequences, threads, backend
    (0, "right", 0, 1, "eager"),
    (5, "left", 1, 2, "float64"),
    (1, "right", 2, 1, "auto"),
    (0, "none", 3, 2, "eager"),
    (5, "none", 4, 1, "float64"),
    (1, "left", 5, 2, "auto"),
)


def trained(architecture: str, mode: str, layout: tuple[int, str, int, int, str]) -> str:
    """Digest of the weights after a few optimizer steps on the same sequences."""
    micro_batch, padding, order_seed, threads, kernels = layout
    backend.use(kernels if mode == "deterministic" else "eager", threads)
    policy = make_policy(source_model(architecture), mode, CONTEXT)
    optimizer = make_optimizer(policy, SETTINGS, mode)
    prompts, responses = ragged(COUNT, 3, prompt=12)
    weights = torch.randn(COUNT, generator=seeded(4)).tolist()
    order = torch.randperm(COUNT, generator=seeded(order_seed)).tolist()
    prompts, responses, weights = ([x[i] for i in order] for x in (prompts, responses, weights))
    total = sum(map(len, responses))
    advantages = torch.tensor([w for w, r in zip(weights, responses, strict=True) for _ in r])

    def loss(batch: TokenBatch, first: int, last: int) -> Tensor:
        logprobs, entropies = token_statistics(policy_logits(policy, batch), batch.targets, 0.9, None, mode)
        losses = -logprobs * advantages[first:last] - 0.01 * entropies
        torch.autograd.backward(losses, torch.full_like(losses, 1.0 / total))
        return losses.detach()

    def backward() -> None:
        scored(prompts, responses, padding, micro_batch, loss)

    for _ in range(STEPS):
        optimizer.step(backward, 200)
    return weights_digest(policy.named_parameters())


@pytest.mark.parametrize("architecture", EVERY_FAMILY)
def test_weights_after_training_do_not_depend_on_the_layout(architecture: str) -> None:
    layouts = LAYOUTS if architecture == "qwen3" else LAYOUTS[1:5]
    assert len({trained(architecture, "exact", layout) for layout in layouts}) == 1


@pytest.mark.usefixtures("row_dependent")
@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
def test_native_weights_after_training_depend_on_the_layout(architecture: str) -> None:
    assert len({trained(architecture, "native", layout) for layout in LAYOUTS[:3]}) == 3


def reference_gradients(
    source: PreTrainedModel, prompts: list[list[int]], responses: list[list[int]], scale: float
) -> dict[str, Tensor]:
    """Autograd in float64 on the unmodified model, each sequence alone under the masks the model makes itself."""
    model = source.double()
    for prompt, response in zip(prompts, responses, strict=True):
        logits = model(input_ids=torch.tensor([[*prompt, *response[:-1]]]), use_cache=False).logits[0]
        logprobs = logits[len(prompt) - 1 :].log_softmax(-1).gather(-1, torch.tensor(response)[:, None])
        (-logprobs.sum() * scale).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def exact_gradients(source: torch.nn.Module, batch: TokenBatch, scale: float) -> dict[str, Tensor]:
    policy = make_policy(source, "exact", CONTEXT)
    accumulator = ExactOptimizer(policy, SETTINGS).accumulator
    for _ in range(2):
        accumulator.begin()
        logprobs, _ = token_statistics(policy_logits(policy, batch), batch.targets, 1.0, None, "exact")
        torch.autograd.backward(-logprobs, torch.full_like(logprobs, scale))
        result = accumulator.finish()
    assert result is not None
    return result


def worst_gradient(architecture: str, scale: float) -> float:
    """Largest relative distance of any parameter's gradient from autograd in float64."""
    # long prompts: in the last layer most queries have a gradient of exactly zero
    prompts, responses = ragged(10, 0, prompt=30)
    got = exact_gradients(source_model(architecture), lay_out(prompts, responses, "right"), scale)
    expected = reference_gradients(source_model(architecture), prompts, responses, scale)
    assert got.keys() == expected.keys() == dict(source_model(architecture).named_parameters()).keys()
    return max(float((got[n].double() - e).norm() / e.norm()) for n, e in expected.items())


# the smallest scale is that of 10^5 tokens with small advantages: nothing may be lost beside zero gradients
@pytest.mark.parametrize("scale", [1.0 / 40, 2.0**-40])
@pytest.mark.parametrize("architecture", EVERY_FAMILY)
def test_gradients_are_those_of_autograd_in_float64(architecture: str, scale: float) -> None:
    # 0.9e-6 to 2.5e-6 was measured
    assert 0 < worst_gradient(architecture, scale) < 6e-6


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_of_other_settings_are_those_of_autograd_in_float64(variant: str) -> None:
    # scores that are not scaled down by sqrt(12) lose as much more: 5.4e-6 was measured there, 2.7e-6 elsewhere
    assert 0 < worst_gradient(variant, 1.0 / 40) < 1.2e-5


def test_the_padding_token_gets_no_embedding_gradient_like_in_the_unmodified_model() -> None:
    batch = lay_out([[0, 5, 0, 7]], [[3, 0, 2]], "right")
    row = exact_gradients(source_model("qwen2"), batch, 1.0)["model.embed_tokens.weight"].abs().amax(-1)
    assert row[0] == 0 and row[5] > 0
    # an untied head has a gradient for it nevertheless
    assert exact_gradients(source_model("qwen2"), batch, 1.0)["lm_head.weight"][0].abs().amax() > 0


def accumulator_of(shape: tuple[int, int], grid: int | None) -> tuple[GradientAccumulator, Tensor]:
    weight = torch.zeros(shape)
    accumulator = GradientAccumulator([("w", weight)])
    if grid is not None:
        accumulator.grids["w"] = grid
    return accumulator, weight


def linear_case(tokens: int, seed: int, spread: int) -> tuple[Tensor, Tensor]:
    """Inputs and output gradients [tokens, 6] and [tokens, 4] of sizes 2^-spread..1, some rows zero."""
    generator = seeded(seed)
    sizes = torch.randint(-spread, 1, (2, tokens, 1), generator=generator).to(torch.float32)
    x, grad = (torch.randn(tokens, n, generator=generator) * 2.0**s for n, s in zip((6, 4), sizes, strict=True))
    grad[::7] = 0.0
    x[::11] = 0.0
    return x, grad


def once(accumulator: GradientAccumulator, weight: Tensor, x: Tensor, grad: Tensor, split: int) -> Tensor | None:
    accumulator.begin()
    for a, b in zip(x.split(split), grad.split(split), strict=True):
        accumulator.add_linear(weight, a, b)
    result = accumulator.finish()
    return result["w"] if result else None


@settings(max_examples=60)
@given(st.integers(2, 400), st.integers(0, 10**6), st.integers(0, 30), st.integers(1, 400))
def test_a_linear_gradient_is_the_integer_sum_of_its_definition(t: int, seed: int, spread: int, split: int) -> None:
    x, grad = linear_case(t, seed, spread)
    accumulator, weight = accumulator_of((4, 6), None)
    first = once(accumulator, weight, x, grad, t)
    got = once(accumulator, weight, x, grad, split) if first is None else first
    assert got is not None
    if not accumulator.grids:
        assert not got.any()
        return
    integers, scales = quantise(x, 22)
    exponents = [math.frexp(s)[1] - 1 + 22 for s in scales[:, 0].tolist()]
    live = [i for i in range(t) if grad[i].any() and x[i].any()]
    grid = max(math.frexp(float(grad[i].abs().max()))[1] + exponents[i] for i in live)
    assert accumulator.grids == {"w": grid}
    expected = torch.zeros(4, 6)
    for n in range(4):
        units = {i: round(Fraction(float(grad[i, n])) * Fraction(2) ** (exponents[i] - grid - 3 + 27)) for i in live}
        for k in range(6):
            total = sum(z * int(integers[i, k]) for i, z in units.items())
            expected[n, k] = float(total) * 2.0 ** (grid + 3 - 49)
    assert unequal(got + 0.0, expected + 0.0) == 0


@pytest.mark.parametrize("kind", ["rows", "embedding"])
def test_row_gradients_ignore_order_and_splits_and_plain_sums_do_not(kind: str) -> None:
    values = torch.randn(300, 5, generator=seeded(0)).double() * 2.0 ** torch.randint(-20, 1, (300, 1))
    values = values.to(torch.float32)
    ids = torch.randint(0, 3, (300,), generator=seeded(1))
    exact, plain = set(), set()
    for seed, split in ((0, 300), (1, 7), (2, 100), (3, 1)):
        order = torch.randperm(300, generator=seeded(seed))
        parameter = torch.zeros(5) if kind == "rows" else torch.zeros(3, 5)
        accumulator = GradientAccumulator([("w", parameter)])
        result = None
        while result is None:
            accumulator.begin()
            for piece in order.split(split):
                if kind == "rows":
                    accumulator.add_rows(parameter, values[piece])
                else:
                    accumulator.add_rows(parameter, values[piece], ids[piece])
            result = accumulator.finish()
        exact.add(tuple(result["w"].flatten().tolist()))
        if kind == "rows":
            in_order = sum_in_order(values[order])
            reference = values.double().sum(0)
        else:
            in_order = torch.stack([sum_in_order(values[order][ids[order] == row]) for row in range(3)])
            reference = torch.zeros(3, 5).double().index_add_(0, ids, values.double())
        plain.add(tuple(in_order.flatten().tolist()))
        # contributions are rounded to 2^-45 of the largest, sums to float32
        assert torch.allclose(result["w"].double(), reference, rtol=2.0**-23, atol=300 * 2.0**-41)
    assert len(exact) == 1 and len(plain) > 1


@pytest.mark.parametrize("shift", [-40, -5, -4, 0, 3, 4, 40])
def test_a_grid_outside_the_window_is_replaced_and_the_step_redone(shift: int) -> None:
    x, grad = linear_case(50, 0, 3)
    calibrated, weight = accumulator_of((4, 6), None)
    assert once(calibrated, weight, x, grad, 50) is None
    reference = once(calibrated, weight, x, grad, 50)
    fitting = calibrated.grids["w"]
    preset, weight = accumulator_of((4, 6), fitting - shift)
    first = once(preset, weight, x, grad, 50)
    assert (first is None) == (not -4 <= shift <= 3)
    assert preset.grids["w"] == fitting
    second = once(preset, weight, x, grad, 50)
    assert reference is not None and second is not None and unequal(second, reference) == 0


def test_inside_the_window_nothing_saturates_or_wraps() -> None:
    # the largest contribution allowed on a grid, 3 powers of two above it, in many equal tokens
    accumulator, weight = accumulator_of((1, 1), 1)
    tokens = 4096
    x, grad = torch.full((tokens, 1), 1.0 - 2.0**-20), torch.full((tokens, 1), 2.0**3 - 2.0**-20)
    got = once(accumulator, weight, x, grad, tokens)
    assert got is not None
    integers, scale = quantise(x[:1], 22)
    exact = tokens * Fraction(float(integers[0, 0] * scale[0, 0])) * Fraction(2**3 - 2.0**-20)
    # the gradient itself is rounded to 27 bits, the result to 24
    assert abs(Fraction(float(got)) / exact - 1) < Fraction(1, 2**23)


def test_only_gradients_that_are_finite_are_accepted() -> None:
    for bad in (math.inf, -math.inf, math.nan):
        x, grad = linear_case(9, 0, 3)
        grad[3, 1] = bad
        for grid in (None, 0):
            accumulator, weight = accumulator_of((4, 6), grid)
            with pytest.raises(NumericsError, match="gradient of w is not finite"):
                once(accumulator, weight, x, grad, 9)
        accumulator, bias = GradientAccumulator([("b", (b := torch.zeros(4)))]), b
        with pytest.raises(NumericsError, match="gradient of b is not finite"):
            accumulator.add_rows(bias, grad)
        accumulator, table = GradientAccumulator([("e", (e := torch.zeros(3, 4)))]), e
        with pytest.raises(NumericsError, match="gradient of e is not finite"):
            accumulator.add_rows(table, grad, torch.zeros(9, dtype=torch.int64))


def test_a_step_has_at_most_a_million_tokens() -> None:
    assert_no_wrap(2**20)
    with pytest.raises(UserError, match=r"1048577 tokens .* up to 1048576"):
        assert_no_wrap(2**20 + 1)
    # the upper limbs of a matrix are int32: a tied weight counts each token twice, a term is at most 2^49
    assert 2 * MAX_TOKENS * 2**49 < 2 ** (31 + 42)


norms = st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 40), st.integers(-60, 30)), min_size=1, max_size=4)


@settings(max_examples=200)
@given(norms)
def test_the_norm_is_the_root_of_an_integer_sum_in_any_order(cases: list[tuple[int, int, int]]) -> None:
    tensors = [torch.randn(n, generator=seeded(seed)) * 2.0**e for seed, n, e in cases]
    total = Fraction(0)
    for t in tensors:
        shift = 26 - math.frexp(float(t.abs().max()))[1]
        total += (
            sum(Fraction(round(Fraction(x) * Fraction(2) ** shift)) ** 2 for x in t.tolist()) / Fraction(4) ** shift
        )
    norm = exact_norm(tensors)
    # the integer root is cut off at 64 bits or more and then rounded to float64
    assert abs(Fraction(norm) ** 2 / total - 1) < Fraction(1, 2**51)
    shuffled = [t[torch.randperm(len(t), generator=seeded(0))] for t in reversed(tensors)]
    assert exact_norm(shuffled) == norm
    # 26 bits of each tensor's largest element
    assert norm == pytest.approx(math.sqrt(sum(float((t.double() ** 2).sum()) for t in tensors)), rel=1e-6)


def test_the_norm_of_nothing_is_zero() -> None:
    assert exact_norm([]) == 0.0 and exact_norm([torch.zeros(3)]) == 0.0
    assert exact_norm([torch.tensor([3.0]), torch.tensor([[-4.0]])]) == 5.0


def test_gradient_checkpointing_changes_no_bit_and_saves_less() -> None:
    source = source_model("qwen3")
    prompts, responses = ragged(COUNT, 3, prompt=12)
    batch = lay_out(prompts, responses, "right")
    digests: set[tuple[str, ...]] = set()
    saved_bytes: list[int] = []
    for recompute in (False, True):
        policy = make_policy(source, "exact", CONTEXT)
        if recompute:
            checkpoint_gradients(policy)
        optimizer = make_optimizer(policy, SETTINGS, "exact")
        sizes: list[int] = []

        def keep(x: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(x.numel() * x.element_size())
            return x

        def backward(policy: PreTrainedModel = policy, keep: Callable[[Tensor], Tensor] = keep) -> None:
            # the tensors that checkpointed layers save while they recompute go to their own hooks
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                logprobs, _ = token_statistics(policy_logits(policy, batch), batch.targets, 1.0, None, "exact")
            torch.autograd.backward(-logprobs, torch.ones_like(logprobs))

        optimizer.step(backward, batch.real_tokens)
        digests.add((weights_digest(policy.named_parameters()),))
        saved_bytes.append(sum(sizes))
    assert len(digests) == 1
    assert saved_bytes[1] < saved_bytes[0] / 2
