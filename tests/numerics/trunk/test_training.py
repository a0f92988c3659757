"""Training passes without modules: the bits of modules and autograd, for every family that is run so."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.errors import NumericsError
from ppo_repro.models.batches import lay_out
from ppo_repro.models.networks import checkpoint_gradients, hidden_states, make_policy
from ppo_repro.numerics import backend
from ppo_repro.numerics.gradients import GradientAccumulator
from ppo_repro.numerics.layers.families import head_of, trunk_of
from ppo_repro.numerics.layers.lowering import attach
from ppo_repro.numerics.logprobs import token_statistics
from ppo_repro.numerics.trunk import forward, training
from tests.support.models import CONTEXT, bits, kept_bytes, policy, ragged, seeded, source_model

RUN = ("qwen3", "qwen2", "llama", "mistral", "qwen2 sliding", "qwen3 sliding, untied, biases", "llama yarn")
KERNELS = ("float64", "amx")


def use(kernels: str, threads: int = 1) -> None:
    if kernels == "amx" and not backend.has_amx():
        pytest.skip("this CPU has no AMX")
    backend.use(kernels, threads)


def fresh(architecture: str) -> tuple[PreTrainedModel, GradientAccumulator]:
    model = make_policy(source_model(architecture), "exact", CONTEXT)
    accumulator = GradientAccumulator(model.named_parameters())
    attach(model, accumulator)
    return model, accumulator


def gradients(model: PreTrainedModel, accumulator: GradientAccumulator, padding: str) -> dict[str, Tensor]:
    """Hidden states, log-probs and the gradients of all parameters, after as many passes as their grids take."""
    batch = lay_out(*ragged(6, 3, prompt=10), padding)
    seeds = torch.randn(len(batch.targets), generator=seeded(5))
    for _ in range(3):
        accumulator.begin()
        hidden = hidden_states(trunk_of(model), batch)
        logprobs, entropies = token_statistics(head_of(model)(hidden), batch.targets, 0.9, None, "exact")
        torch.autograd.backward(logprobs * seeds - 0.01 * entropies, torch.ones_like(seeds))
        found = accumulator.finish()
        if found is not None:
            return {"hidden": hidden.detach(), "logprobs": logprobs.detach(), **found}
    raise AssertionError("a grid does not settle")


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("architecture", RUN)
def test_a_pass_has_the_bits_of_modules_and_autograd(
    architecture: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(kernels)
    calls = []
    whole = training.hidden_states
    monkeypatch.setattr(training, "hidden_states", lambda *args: calls.append(1) or whole(*args))
    direct = {padding: gradients(*fresh(architecture), padding) for padding in ("right", "none")}
    assert calls, "the modules were called instead"
    monkeypatch.setattr(forward, "unpack", lambda trunk: None)
    for padding, found in direct.items():
        expected = gradients(*fresh(architecture), padding)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(bits(found[name]), bits(tensor)), (padding, name)
    assert any(bool(tensor.any()) for tensor in direct["right"].values())


def test_bits_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ppo_repro.numerics.kernels.core.pool.LEAST_NANOSECONDS", 1.0
    )  # so that these small parts are shared out
    found = []
    for threads in (1, 2, 3):
        use("float64", threads)
        found.append(gradients(*fresh("qwen3"), "left"))
    for other in found[1:]:
        assert all(torch.equal(bits(other[name]), bits(tensor)) for name, tensor in found[0].items())


def test_only_what_is_trained_gets_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen weight beside a trained bias, the other way round, a frozen norm and a frozen embedding."""
    use("float64")
    found = []
    for unpack in (forward.unpack, lambda trunk: None):
        monkeypatch.setattr(forward, "unpack", unpack)
        model, _ = fresh("qwen2")
        trunk = trunk_of(model)
        attention = trunk.layers[1].self_attn
        frozen = (
            attention.q_proj.weight,
            attention.k_proj.bias,
            model.model.norm.weight,
            model.model.embed_tokens.weight,
        )
        for parameter in frozen:
            parameter.requires_grad_(False)
        accumulator = GradientAccumulator((n, p) for n, p in model.named_parameters() if p.requires_grad)
        attach(model, accumulator)
        found.append(gradients(model, accumulator, "right"))
    assert len(found[0]) == 2 + sum(1 for _ in fresh("qwen2")[0].named_parameters()) - 4
    for name, tensor in found[1].items():
        assert torch.equal(bits(found[0][name]), bits(tensor)), name


def test_layers_computed_again_give_the_same_bits_and_keep_their_inputs_alone() -> None:
    use("float64")
    expected = gradients(*fresh("qwen3"), "right")
    model, accumulator = fresh("qwen3")
    batch = lay_out(*ragged(3, 3), "right")
    whole = kept_bytes(hidden_states(trunk_of(model), batch))
    checkpoint_gradients(model)
    inputs = 2 * 4 * batch.input_ids.numel() * model.config.hidden_size
    last_norm = 2 * 4 * len(batch.predictors) * model.config.hidden_size + 8 * len(batch.predictors)
    assert kept_bytes(hidden_states(trunk_of(model), batch)) == inputs + last_norm < whole / 4
    found = gradients(model, accumulator, "right")
    assert all(torch.equal(bits(found[name]), bits(tensor)) for name, tensor in expected.items())


def test_without_gradients_nothing_is_kept() -> None:
    use("float64")
    batch = lay_out(*ragged(3, 3), "right")
    with torch.no_grad():
        assert not hidden_states(trunk_of(policy("llama", "exact")), batch).requires_grad
    assert hidden_states(trunk_of(fresh("llama")[0]), batch).grad_fn is not None
    frozen, _ = fresh("llama")
    for parameter in frozen.parameters():
        parameter.requires_grad_(False)
    assert hidden_states(trunk_of(frozen), batch).grad_fn is None


def test_a_second_backward_is_refused() -> None:
    use("float64")
    hidden = hidden_states(trunk_of(fresh("llama")[0]), lay_out(*ragged(3, 3), "right"))
    hidden.backward(torch.ones_like(hidden))
    with pytest.raises(RuntimeError, match="second backward"):
        hidden.backward(torch.ones_like(hidden))


def test_a_number_that_is_not_finite_is_named() -> None:
    use("float64")
    model, _ = fresh("llama")
    batch = lay_out(*ragged(3, 3), "right")
    hidden = hidden_states(trunk_of(model), batch)
    with pytest.raises(NumericsError, match="not finite"):
        hidden.backward(torch.full_like(hidden, math.inf))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = math.nan
    with pytest.raises(NumericsError, match=r"layers\.1\.mlp\.up_proj"):
        hidden_states(trunk_of(model), batch)


def test_more_tokens_than_the_context_are_refused() -> None:
    use("float64")
    with pytest.raises(NumericsError, match="max_context"):
        hidden_states(trunk_of(policy("llama", "exact")), lay_out([[5] * CONTEXT], [[6, 7]], "right"))
    with pytest.raises(IndexError, match="rotary"):  # a window lets no query see more than 6 keys
        hidden_states(trunk_of(policy("mistral", "exact")), lay_out([[5] * CONTEXT], [[6, 7]], "right"))
