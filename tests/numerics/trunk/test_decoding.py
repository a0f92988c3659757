"""Decoding without modules: the bits of the modules, for every family that is decoded so, and nobody else."""

from __future__ import annotations

import pytest
import torch

from ppo_repro.errors import NumericsError
from ppo_repro.numerics import backend
from ppo_repro.numerics.kernels.core import pool
from ppo_repro.numerics.layers.families import trunk_of
from ppo_repro.numerics.layers.kv_cache import GridCache
from ppo_repro.numerics.trunk import decoding
from ppo_repro.numerics.trunk.decoding import Decoder
from ppo_repro.numerics.trunk.weights import parts_of
from ppo_repro.rollout import torch_engine
from ppo_repro.rollout.engine import Completion, Request, Sampling
from ppo_repro.rollout.torch_engine import TorchEngine
from tests.support.models import CONTEXT, bits, policy, ragged

DECODED = ("qwen3", "qwen2", "llama", "mistral", "qwen2 sliding", "qwen3 sliding, untied, biases", "llama yarn")
CALLED = ("gemma", "gpt2", "gpt_neox", "llama tied, biases, gelu")
SAMPLING = Sampling(temperature=0.9, top_k=0, top_p=1.0, max_response_tokens=8)


def sampled(architecture: str) -> list[Completion]:
    prompts, _ = ragged(5, seed=1)
    engine = TorchEngine(policy(architecture, "exact"), frozenset({3}), "exact", CONTEXT, slots=3, prefill_chunk=4)
    return engine.generate([Request(tuple(ids), seed) for seed, ids in enumerate(prompts)], SAMPLING)


needs_amx = pytest.mark.skipif(not backend.has_amx(), reason="this CPU has no AMX")


def same(a: list[Completion], b: list[Completion]) -> bool:
    return all(
        (x.response_ids, x.finish_reason) == (y.response_ids, y.finish_reason)
        and torch.equal(bits(x.logprobs), bits(y.logprobs))
        for x, y in zip(a, b, strict=True)
    )


class Called:
    """How often whole layers and single parts were decoded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.layers = self.parts = 0
        layers, parts = decoding._through_layers, decoding._through_parts

        def through_layers(*arguments: object) -> None:
            self.layers += 1
            layers(*arguments)  # type: ignore[arg-type]

        def through_parts(*arguments: object) -> None:
            self.parts += 1
            parts(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(decoding, "_through_layers", through_layers)
        monkeypatch.setattr(decoding, "_through_parts", through_parts)


@pytest.mark.parametrize("kernels", ["dgemm", pytest.param("amx", marks=needs_amx)])
@pytest.mark.parametrize("architecture", DECODED)
def test_decoding_gives_the_bits_of_the_modules(
    architecture: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.use(kernels, 1)
    called = Called(monkeypatch)
    direct = sampled(architecture)
    assert (called.layers > 0, called.parts > 0) == (kernels == "amx", kernels == "dgemm")
    monkeypatch.setattr(torch_engine, "parts_of", lambda trunk: None)
    assert same(direct, sampled(architecture))


@needs_amx
@pytest.mark.parametrize("architecture", DECODED)
def test_rows_on_several_threads_and_part_by_part(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend.use("amx", 1)
    called = Called(monkeypatch)
    whole = sampled(architecture)
    backend.use("amx", 3)
    monkeypatch.setattr(pool, "LEAST_NANOSECONDS", 1e-9)  # else so few rows stay on one thread
    assert same(whole, sampled(architecture)) and called.parts == 0
    # layers too large for that
    monkeypatch.setattr(decoding, "MOST_BYTES", 0)
    before = called.layers
    assert same(whole, sampled(architecture)) and called.layers == before and called.parts > 0


@needs_amx
def test_a_decoder_sees_that_a_weight_or_the_backend_has_changed() -> None:
    trunk = trunk_of(policy("llama", "exact"))
    parts = parts_of(trunk)
    assert parts is not None
    decoder = Decoder(parts)
    backend.use("amx", 1)
    first = decoder.layers()
    assert first and decoder.layers() is first
    scales = first[1].down.scales.copy()  # its memory is used again
    weight = trunk.layers[1].mlp.down_proj.weight
    kept = weight.detach().clone()
    try:
        with torch.no_grad():
            weight.mul_(0.5)
        second = decoder.layers()
        assert second is not first and (second[1].down.scales == 0.5 * scales).all()
        backend.use("dgemm", 1)
        assert decoder.layers() == []
    finally:
        with torch.no_grad():
            weight.copy_(kept)


INF = float("inf")
# what is done to which parameter, and what then is the first that is not finite
FAULTS = {
    "norm before attention": ("llama", "embed_tokens", lambda w: w[:, 0].fill_(INF)),
    "query": ("llama", "layers.1.input_layernorm", lambda w: w.fill_(3e38)),
    "query norm": ("qwen3", "layers.0.self_attn.q_proj", lambda w: w.fill_(3e38)),
    "key norm": ("qwen3", "layers.0.self_attn.k_proj", lambda w: w.fill_(3e38)),
    "attention": ("llama", "layers.1.self_attn.v_proj", lambda w: w.fill_(3e38)),
    "norm before the MLP": ("llama", "layers.0.self_attn.o_proj", lambda w: w.fill_(3e38)),
    "gate": ("llama", "layers.1.post_attention_layernorm", lambda w: w.fill_(3e38)),
    "down": ("llama", "layers.1.mlp.up_proj", lambda w: w.fill_(3e38)),
    "a weight": ("llama", "layers.1.mlp.up_proj", lambda w: w[0, 0].fill_(float("nan"))),
}


@needs_amx
@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_not_finite_is_named_as_part_by_part(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture, name, change = FAULTS[fault]
    backend.use("amx", 1)
    model = policy(architecture, "exact")
    trunk = trunk_of(model)
    parts = parts_of(trunk)
    assert parts is not None
    weight = trunk.get_parameter(f"{name}.weight")
    kept = weight.detach().clone()
    try:
        with torch.no_grad():
            change(weight)
        said = []
        for most in ("layers", "parts"):
            if most == "parts":
                monkeypatch.setattr(Decoder, "layers", lambda self: [])
            cache, slots = GridCache(model.config, 20, CONTEXT, torch.device("cpu")), torch.arange(20)
            cache.aim(slots, torch.zeros(20, 1, dtype=torch.int64), torch.ones(20, 1, dtype=torch.bool))
            with pytest.raises(NumericsError) as error:
                decoding.decode(Decoder(parts), slots + 5, cache)
            said.append(str(error.value))
        assert said[0] == said[1]
    finally:
        with torch.no_grad():
            weight.copy_(kept)


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
