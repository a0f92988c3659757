"""Decoding without modules: the bits of the modules, for every family that is decoded so, and nobody else."""

from __future__ import annotations

import pytest
import torch

from ppo_repro.errors import NumericsError
from ppo_repro.numerics import backend, decoding
from ppo_repro.numerics.families import trunk_of
from ppo_repro.numerics.trunk import parts_of
from ppo_repro.rollout import torch_engine
from ppo_repro.rollout.engine import Completion, Request, Sampling
from ppo_repro.rollout.torch_engine import TorchEngine
from tests.models_for_tests import CONTEXT, bits, policy, ragged

DECODED = ("qwen3", "qwen2", "llama", "mistral", "qwen2 sliding", "qwen3 sliding, untied, biases", "llama yarn")
CALLED = ("gemma", "gpt2", "gpt_neox", "llama tied, biases, gelu")
SAMPLING = Sampling(temperature=0.9, top_k=0, top_p=1.0, max_response_tokens=8)


def sampled(architecture: str) -> list[Completion]:
    prompts, _ = ragged(5, seed=1)
    engine = TorchEngine(policy(architecture, "exact"), frozenset({3}), "exact", CONTEXT, slots=3, prefill_chunk=4)
    return engine.generate([Request(tuple(ids), seed) for seed, ids in enumerate(prompts)], SAMPLING)


@pytest.mark.parametrize("kernels", ["dgemm", "amx"])
@pytest.mark.parametrize("architecture", DECODED)
def test_decoding_gives_the_bits_of_the_modules(
    architecture: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == "amx" and not backend.has_amx():
        pytest.skip("this CPU has no AMX")
    backend.use(kernels, 1)
    calls = []
    monkeypatch.setattr(torch_engine, "decode", lambda *args: calls.append(1) or decoding.decode(*args))
    direct = sampled(architecture)
    assert calls, "the modules were called instead"
    monkeypatch.setattr(torch_engine, "parts_of", lambda trunk: None)
    for a, b in zip(direct, sampled(architecture), strict=True):
        assert a.response_ids == b.response_ids and a.finish_reason == b.finish_reason
        assert torch.equal(bits(a.logprobs), bits(b.logprobs))


@pytest.mark.parametrize("architecture", CALLED)
def test_other_families_and_activations_call_their_modules(architecture: str) -> None:
    assert parts_of(trunk_of(policy(architecture, "exact"))) is None


def test_a_watched_module_is_called() -> None:
    trunk = trunk_of(policy("llama", "exact"))
    assert parts_of(trunk) is not None
    handle = trunk.layers[1].mlp.register_forward_hook(lambda *_: None)
    try:
        assert parts_of(trunk) is None
    finally:
        handle.remove()


def test_a_weight_that_is_not_finite_is_named() -> None:
    backend.use("dgemm", 1)
    trunk = trunk_of(policy("llama", "exact"))
    weight = trunk.layers[1].mlp.up_proj.weight
    kept = weight.detach().clone()
    try:
        with torch.no_grad():
            weight[0, 0] = float("nan")
        with pytest.raises(NumericsError, match=r"layers\.1\.mlp\.up_proj"):
            sampled("llama")
    finally:
        with torch.no_grad():
            weight.copy_(kept)
