"""Prefill and decoding without modules: the bits of the modules, for the families that are run so and no others."""

from __future__ import annotations

import pytest
import torch

from ppo_repro.errors import NumericsError
from ppo_repro.numerics import backend
from ppo_repro.numerics.kernels import decoder_trunk
from ppo_repro.numerics.kernels.core import pool
from ppo_repro.numerics.kernels.float64 import digits
from ppo_repro.numerics.layers.families import trunk_of
from ppo_repro.numerics.layers.kv_cache import GridCache
from ppo_repro.numerics.trunk import decoding, forward, whole
from ppo_repro.numerics.trunk.decoding import Decoder
from ppo_repro.numerics.trunk.weights import unpack
from ppo_repro.rollout.engine import Completion, Request, Sampling
from ppo_repro.rollout.torch_engine import TorchEngine
from tests.support.models import CONTEXT, bits, policy, ragged

DECODED = ("qwen3", "qwen2", "llama", "mistral", "qwen2 sliding", "qwen3 sliding, untied, biases", "llama yarn")
CALLED = ("gemma", "gpt2", "gpt_neox", "llama tied, biases, gelu")
SAMPLING = Sampling(temperature=0.9, top_k=0, top_p=1.0, max_response_tokens=8)


def sampled(architecture: str, count: int = 5, slots: int = 3) -> list[Completion]:
    prompts, _ = ragged(count, seed=1)
    engine = TorchEngine(policy(architecture, "exact"), frozenset({3}), "exact", CONTEXT, slots=slots, prefill_chunk=4)
    return engine.generate([Request(tuple(ids), seed) for seed, ids in enumerate(prompts)], SAMPLING)


needs_amx = pytest.mark.skipif(not backend.has_amx(), reason="this CPU has no AMX")


def same(a: list[Completion], b: list[Completion]) -> bool:
    return all(
        (x.response_ids, x.finish_reason) == (y.response_ids, y.finish_reason)
        and torch.equal(bits(x.logprobs), bits(y.logprobs))
        for x, y in zip(a, b, strict=True)
    )


class Called:
    """How many passes read prompts, and how many decoded by the whole trunk, by whole layers and kernel by kernel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.prompts = self.trunks = self.layers = self.kernels = 0
        trunks, layers = decoding._through_whole_trunk, decoding._through_whole_layers
        kernels = decoding._through_kernels

        def through_whole_trunk(*arguments: object) -> None:
            self.trunks += 1
            trunks(*arguments)  # type: ignore[arg-type]

        def through_whole_layers(*arguments: object) -> None:
            self.layers += 1
            layers(*arguments)  # type: ignore[arg-type]

        def through_kernels(trunk: object, x: object, rotary: object, cache: GridCache, *arguments: object) -> object:
            one = cache.target.positions.shape[1] == 1
            self.kernels, self.prompts = self.kernels + one, self.prompts + (not one)
            return kernels(trunk, x, rotary, cache, *arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(decoding, "_through_whole_trunk", through_whole_trunk)
        monkeypatch.setattr(decoding, "_through_whole_layers", through_whole_layers)
        monkeypatch.setattr(decoding, "_through_kernels", through_kernels)


@pytest.mark.parametrize("kernels", ["float64", pytest.param("amx", marks=needs_amx)])
@pytest.mark.parametrize("architecture", DECODED)
def test_prefill_and_decoding_give_the_bits_of_the_modules(
    architecture: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.use(kernels, 1)
    called = Called(monkeypatch)
    direct = sampled(architecture)
    assert (called.layers > 0, called.trunks > 0, called.kernels) == (kernels == "amx", kernels == "float64", 0)
    assert called.prompts > 0
    before = vars(called).copy()
    monkeypatch.setattr(forward, "unpack", lambda trunk: None)
    assert same(direct, sampled(architecture)) and vars(called) == before


@pytest.mark.parametrize("kernels", ["float64", pytest.param("amx", marks=needs_amx)])
@pytest.mark.parametrize("architecture", DECODED)
def test_rows_on_several_threads_and_kernel_by_kernel(
    architecture: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.use(kernels, 1)
    called = Called(monkeypatch)
    whole = sampled(architecture)
    backend.use(kernels, 3)
    monkeypatch.setattr(pool, "LEAST_NANOSECONDS", 1e-9)  # else so few rows stay on one thread
    assert same(whole, sampled(architecture)) and called.kernels == 0
    # layers too large for that
    monkeypatch.setattr(decoding, "MOST_BYTES", 0)
    before = called.layers + called.trunks
    assert same(whole, sampled(architecture)) and called.layers + called.trunks == before and called.kernels > 0


@pytest.mark.parametrize("architecture", DECODED)
def test_rows_enough_for_digits_have_the_bits_of_float64_and_of_the_modules(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.use("float64", 1)
    made: list[bool] = []
    trunk = whole.WholeTrunk.__init__

    def remember(self: whole.WholeTrunk, weights: object, in_digits: bool) -> None:
        trunk(self, weights, in_digits)  # type: ignore[arg-type]
        made.append(bool(self._fields[:, decoder_trunk.DIGITS_AT :].all()))

    monkeypatch.setattr(whole.WholeTrunk, "__init__", remember)
    by_digits = sampled(architecture, count=17, slots=16)
    monkeypatch.setattr(decoding, "MOST_DIGIT_BYTES", 0)
    by_float64 = sampled(architecture, count=17, slots=16)
    assert made == [digits.IN_USE, False]
    monkeypatch.setattr(forward, "unpack", lambda trunk: None)
    assert same(by_digits, by_float64) and same(by_float64, sampled(architecture, count=17, slots=16))


@pytest.fixture
def packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend `amx` for tests that pack operands and multiply none, which ordinary instructions do."""
    monkeypatch.setattr(backend, "has_amx", lambda: True)


def test_a_whole_trunk_sees_that_a_weight_or_the_backend_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    trunk = trunk_of(policy("llama", "exact"))
    weights = unpack(trunk)
    assert weights is not None
    decoder = Decoder(weights)
    backend.use("float64", 1)
    first = decoder.whole(1)
    assert first is not None and decoder.whole(1) is first
    weight = trunk.layers[1].mlp.down_proj.weight
    kept = weight.detach().clone()
    before = sampled("llama")
    try:
        with torch.no_grad():
            weight.mul_(0.5)
        assert decoder.whole(1) is not first
        halved = sampled("llama")
        assert not same(before, halved)
        monkeypatch.setattr(Decoder, "whole", lambda self, rows: None)
        assert same(halved, sampled("llama"))
        monkeypatch.undo()
        backend.use("eager", 1)
        assert decoder.whole(1) is None
        backend.use("float64", 1)
        monkeypatch.setattr(decoding, "MOST_BYTES", 0)
        # layers that are large, and many rows or threads
        assert decoder.whole(decoding.MANY_ROWS - 1) is not None and decoder.whole(decoding.MANY_ROWS) is None
        backend.use("float64", 2)
        assert decoder.whole(1) is None
    finally:
        with torch.no_grad():
            weight.copy_(kept)


@pytest.mark.usefixtures("packing")
def test_a_decoder_sees_that_a_weight_or_the_backend_has_changed() -> None:
    trunk = trunk_of(policy("llama", "exact"))
    weights = unpack(trunk)
    assert weights is not None
    decoder = Decoder(weights)
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
        backend.use("float64", 1)
        assert decoder.layers() == []
    finally:
        with torch.no_grad():
            weight.copy_(kept)


def stand_out(weight: torch.Tensor) -> None:
    weight[3] *= 2.0**12


# a number of an input that stands out, by the parameter that makes it so
INPUTS = {
    "of query, key and value": ("llama", "layers.1.input_layernorm"),
    "of out": ("qwen3", "layers.0.self_attn.v_proj"),
    "of gate and up": ("qwen2", "layers.0.post_attention_layernorm"),
    "of down": ("mistral", "layers.1.mlp.up_proj"),
}


@needs_amx
@pytest.mark.parametrize("place", INPUTS)
def test_whole_layers_leave_inputs_with_outliers_to_the_kernels(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture, name = INPUTS[place]
    backend.use("amx", 3)
    monkeypatch.setattr(pool, "LEAST_NANOSECONDS", 1e-9)
    called, again, repeat = Called(monkeypatch), [], decoding._again
    monkeypatch.setattr(decoding, "_again", lambda *a: (again.append(a[1].index), repeat(*a))[1])
    weight = trunk_of(policy(architecture, "exact")).get_parameter(f"{name}.weight")
    kept = weight.detach().clone()
    try:
        with torch.no_grad():
            stand_out(weight)
        whole = sampled(architecture)
        assert called.layers > 0 and called.kernels == 0 and set(again) == {int(name.split(".")[1])}
        monkeypatch.setattr(Decoder, "layers", lambda self: [])
        assert same(whole, sampled(architecture)) and called.kernels > 0
        backend.use("float64", 1)
        assert same(whole, sampled(architecture))
    finally:
        with torch.no_grad():
            weight.copy_(kept)


@pytest.mark.parametrize("place", [*INPUTS, "of a weight"])
def test_a_whole_trunk_adds_products_with_outliers(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture, name = INPUTS.get(place, ("llama", "layers.1.mlp.up_proj"))
    backend.use("float64", 1)
    weight = trunk_of(policy(architecture, "exact")).get_parameter(f"{name}.weight")
    kept = weight.detach().clone()
    try:
        with torch.no_grad():
            if place == "of a weight":
                weight[2, 5] = 2.0**10
            else:
                stand_out(weight)
        called = Called(monkeypatch)
        whole = sampled(architecture)
        assert called.trunks > 0 and called.kernels == 0
        with monkeypatch.context() as changed:
            changed.setattr(Decoder, "whole", lambda self, rows: None)
            assert same(whole, sampled(architecture)) and called.kernels > 0
    finally:
        with torch.no_grad():
            weight.copy_(kept)


@pytest.mark.usefixtures("packing")
def test_weights_with_outliers_are_left_to_the_kernels() -> None:
    trunk = trunk_of(policy("llama", "exact"))
    weights = unpack(trunk)
    assert weights is not None
    weight = trunk.layers[1].mlp.up_proj.weight
    kept = weight.detach().clone()
    backend.use("amx", 1)
    decoder = Decoder(weights)
    assert decoder.layers()
    try:
        with torch.no_grad():
            weight[2, 5] = 2.0**10
        assert decoder.layers() == []
    finally:
        with torch.no_grad():
            weight.copy_(kept)
    assert decoder.layers()


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


@pytest.mark.parametrize("kernels", ["float64", pytest.param("amx", marks=needs_amx)])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_not_finite_is_named_as_kernel_by_kernel(
    fault: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture, name, change = FAULTS[fault]
    backend.use(kernels, 1)
    model = policy(architecture, "exact")
    trunk = trunk_of(model)
    weights = unpack(trunk)
    assert weights is not None
    weight = trunk.get_parameter(f"{name}.weight")
    kept = weight.detach().clone()
    try:
        with torch.no_grad():
            change(weight)
        messages = []
        for path in ("whole", "kernels"):
            if path == "kernels":
                monkeypatch.setattr(Decoder, "layers", lambda self: [])
                monkeypatch.setattr(Decoder, "whole", lambda self, rows: None)
            cache, slots = GridCache(model.config, 20, CONTEXT, torch.device("cpu")), torch.arange(20)
            cache.aim(slots, torch.zeros(20, 1, dtype=torch.int64), torch.ones(20, 1, dtype=torch.bool))
            with pytest.raises(NumericsError) as error:
                decoding.hidden_states(Decoder(weights), slots[:, None] + 5, cache)
            messages.append(str(error.value))
        assert messages[0] == messages[1]
    finally:
        with torch.no_grad():
            weight.copy_(kept)


@pytest.mark.parametrize("architecture", CALLED)
def test_other_families_and_activations_call_their_modules(architecture: str) -> None:
    assert unpack(trunk_of(policy(architecture, "exact"))) is None


def test_a_module_with_hooks_is_called() -> None:
    trunk = trunk_of(policy("llama", "exact"))
    assert unpack(trunk) is not None
    handle = trunk.layers[1].mlp.register_forward_hook(lambda *_: None)
    try:
        assert unpack(trunk) is None
    finally:
        handle.remove()


def test_a_weight_that_is_not_finite_is_named() -> None:
    backend.use("float64", 1)
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
