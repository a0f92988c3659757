"""The backend `triton`: whole layers and passes through it in the interpreter, beside the eager code."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ppo_repro.errors import NumericsError
from ppo_repro.numerics import backend
from ppo_repro.numerics.gradients import GradientAccumulator
from ppo_repro.numerics.layers.activations import ExactSiLU
from ppo_repro.numerics.layers.linear import ExactLinear
from ppo_repro.numerics.layers.norms import ExactRMSNorm
from ppo_repro.numerics.proof import proof
from tests.support.models import seeded, unequal
from tests.support.triton_kernels import as_on_a_card, using_triton

from ppo_repro.numerics.kernels.triton import operands  # isort: skip - only where Triton is


def trained() -> list[Tensor]:
    """A norm, a linear layer and an activation: outputs, the input's gradient, integer sums of the parameters'."""
    source = nn.Linear(24, 10)
    with torch.no_grad():
        source.weight.copy_(torch.randn(10, 24, generator=seeded(1)))
        source.bias.copy_(torch.randn(10, generator=seeded(2)))
    layers = ExactRMSNorm(nn.Parameter(torch.ones(24)), 1e-6, "norm"), ExactLinear(source, "linear"), ExactSiLU()
    accumulator = GradientAccumulator(nn.ModuleList(layers).named_parameters())
    for layer in layers[:2]:
        layer.accumulator = accumulator  # type: ignore[assignment]
    x = torch.randn(5, 24, generator=seeded(3)).requires_grad_()
    for _ in range(2):  # the first pass finds the grids
        accumulator.begin()
        y = layers[2](layers[1](layers[0](x)))
        y.backward(torch.randn(5, 10, generator=seeded(4)))
        if not accumulator.grids:
            assert accumulator.finish() is None
    assert x.grad is not None and len(accumulator.sums) == 3
    return [y.detach(), x.grad, *accumulator.sums.values()]


def test_layers_and_their_gradients() -> None:
    expected = trained()
    with using_triton():
        assert all(unequal(a, b) == 0 for a, b in zip(trained(), expected, strict=True))


def test_another_grid_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: inputs on a grid of 14 bits."""
    monkeypatch.setattr(operands, "INPUT_BITS", 14)
    expected = trained()
    with using_triton():
        assert unequal(trained()[0], expected[0]) > 0


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_backend_proves_itself() -> None:
    with as_on_a_card():
        assert proof.first_difference("triton") == proof.PASSED


@pytest.mark.slow
def test_a_backend_with_another_grid_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operands, "INPUT_BITS", 25)
    with as_on_a_card():
        assert proof.first_difference("triton") == "products"


def test_it_is_no_backend_of_the_cpu() -> None:
    assert "triton" not in backend.BACKENDS
    backend.use("triton", 1)
    assert not backend.has_kernels(torch.zeros(1)) and backend.has_triton(torch.zeros(1))


def test_an_input_that_is_not_finite_is_refused_by_the_name_of_the_module() -> None:
    layer = ExactLinear(nn.Linear(4, 3), "layers.3.mlp")
    with using_triton(), pytest.raises(NumericsError, match=r"layers\.3\.mlp is not finite"):
        layer(torch.full((1, 4), float("nan")))
