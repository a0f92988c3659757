"""Layers as programs over rows: the bits of one kernel after the other, whatever the rows, threads and outliers."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.errors import NumericsError
from ppo_repro.models.batches import lay_out
from ppo_repro.models.networks import hidden_states, make_policy
from ppo_repro.numerics import backend, products
from ppo_repro.numerics.gradient_bins import GradientBins
from ppo_repro.numerics.gradients import GradientAccumulator
from ppo_repro.numerics.layers.families import trunk_of
from ppo_repro.numerics.layers.lowering import attach
from ppo_repro.numerics.trunk import backward_program, programs
from ppo_repro.numerics.trunk.weights import Layer, unpack
from tests.support.models import CONTEXT, bits, ragged, seeded, source_model

OUTLIER = 3e3  # times the other numbers


def model_of(architecture: str, changed: bool = False) -> PreTrainedModel:
    """A model with outliers in inputs and weights; `changed`: one weight of one layer is another."""
    model = source_model(architecture)
    with torch.no_grad():
        model.model.embed_tokens.weight[::3, 5] *= OUTLIER
        model.model.layers[1].mlp.down_proj.weight[2, 7] = OUTLIER
        model.model.layers[0].self_attn.o_proj.weight[1, 3] = -OUTLIER
        if changed:
            model.model.layers[0].mlp.gate_proj.weight[4, 4] += 1.0
    return make_policy(model, "exact", CONTEXT)


def passed(model: PreTrainedModel) -> dict[str, Tensor]:
    """Hidden states and the gradients of all parameters."""
    accumulator = GradientAccumulator(model.named_parameters())
    attach(model, accumulator)
    batch = lay_out(*ragged(6, 3, prompt=10), "right")
    for _ in range(3):
        accumulator.begin()
        hidden = hidden_states(trunk_of(model), batch)
        hidden.backward(torch.randn(hidden.shape, generator=seeded(5)))
        found = accumulator.finish()
        if found is not None:
            return {"hidden": hidden.detach(), **found}
    raise AssertionError("a grid does not settle")


def recorded(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> list[Any]:
    """The results of a function from now on."""
    results: list[Any] = []
    compute = getattr(module, name)

    def run(*arguments: Any) -> Any:
        results.append(compute(*arguments))
        return results[-1]

    monkeypatch.setattr(module, name, run)
    return results


def unequal(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name, tensor in one.items() if not torch.equal(bits(tensor), bits(other[name]))]


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2"])
def test_a_program_has_the_bits_of_one_kernel_after_the_other(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.use("float64", 1)
    forward, backward = (recorded(monkeypatch, programs, name) for name in ("forward", "backward"))
    found = passed(model_of(architecture))
    results = forward + backward
    assert forward and backward and all(result is not None for result in results), "programs gave up, or did not run"
    operands = recorded(monkeypatch, products, "_operand")
    monkeypatch.setattr(programs, "run_as_programs", lambda layer: False)
    expected = passed(model_of(architecture))
    assert any(operand.outliers.any for operand in operands), "no row had outliers"
    assert unequal(found, expected) == []
    assert "hidden" in unequal(passed(model_of(architecture, changed=True)), expected)  # the control


def test_bits_depend_neither_on_parts_nor_on_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of rows go to threads, pieces are as long as the sums of a norm's gradient may be."""
    backend.use("float64", 1)
    expected = passed(model_of("qwen3"))
    monkeypatch.setattr("ppo_repro.numerics.kernels.core.pool.LEAST_NANOSECONDS", 1.0)
    monkeypatch.setattr(backward_program, "PIECE", 64)
    for threads in (1, 2, 3):
        backend.use("float64", threads)
        assert unequal(passed(model_of("qwen3")), expected) == []


def test_hidden_states_are_as_close_to_float64_as_float32() -> None:
    """1e-5 of the largest: float32 rounds a sum of 64 terms to some 1e-6, and two layers follow one another."""
    backend.use("float64", 1)
    source, batch = source_model("qwen3"), lay_out(*ragged(6, 3, prompt=10), "right")
    found = hidden_states(trunk_of(make_policy(source, "exact", CONTEXT)), batch).detach()
    with torch.no_grad():
        expected = hidden_states(trunk_of(make_policy(source.double(), "native", CONTEXT)), batch)
    assert expected.dtype == torch.float64
    assert float((found.double() - expected).abs().max() / expected.abs().max()) < 1e-5


def layer_of(model: PreTrainedModel) -> Layer:
    trunk = unpack(trunk_of(model))
    assert trunk is not None
    return trunk.layers[0]


def test_layers_are_run_as_programs_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_policy(source_model("llama"), "exact", CONTEXT)
    backend.use("float64", 1)
    assert programs.run_as_programs(layer_of(model))
    with monkeypatch.context() as limited:
        limited.setattr(programs, "MOST_WEIGHTS", 100)
        assert not programs.run_as_programs(layer_of(model))
    attach(model, GradientBins(model.named_parameters()))
    assert not programs.run_as_programs(layer_of(model))
    backend.use("eager", 1)
    attach(model, GradientAccumulator(model.named_parameters()))
    assert not programs.run_as_programs(layer_of(model))


@pytest.mark.parametrize("where", ["self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"])
def test_a_program_gives_up_where_a_weight_is_not_finite(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernel after kernel then names it."""
    backend.use("float64", 1)
    model = make_policy(source_model("llama"), "exact", CONTEXT)
    with torch.no_grad():
        model.get_parameter(f"model.layers.1.{where}.weight")[0, 0] = math.nan
    results = recorded(monkeypatch, programs, "forward")
    with pytest.raises(NumericsError, match=where.replace(".", r"\.")):
        hidden_states(trunk_of(model), lay_out(*ragged(3, 3), "right"))
    assert [result is None for result in results] == [False, True]
