"""Small random models with the outliers that real checkpoints have, one kind each.

An outlier is "silent" where its product with what follows stays small, so that the other numbers of its row
decide the result: float32 keeps them, and a grid that follows the largest number of a row must not lose them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ppo_repro.numerics.families import decoder_layers, head_of, trunk_of
from tests.support.models import CONFIGS, CONTEXT, small_model

CHANNEL, OTHER, UNIT = 3, 11, 5  # a channel of the residual stream, its opposite where a mean is taken, a unit
SILENT = 1e-6  # what silences an outlier of 1e4
KEY_BIAS = 300.0


@dataclass(frozen=True)
class Names:
    """Where a family keeps the parts of a decoder layer, and the last norm of its trunk."""

    norms: dict[str, tuple[str, ...]]  # each norm, and the linear layers that read it
    into_units: str  # gives the activation of an MLP unit, or its linear factor where there is a gate
    out_of_units: str
    last_norm: str


LLAMA = Names(
    {
        "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    },
    "mlp.up_proj",
    "mlp.down_proj",
    "norm",
)
GPT2 = Names({"ln_1": ("attn.c_attn",), "ln_2": ("mlp.c_fc",)}, "mlp.c_fc", "mlp.c_proj", "ln_f")
GPT_NEOX = Names(
    {
        "input_layernorm": ("attention.query_key_value",),
        "post_attention_layernorm": ("mlp.dense_h_to_4h",),
    },
    "mlp.dense_h_to_4h",
    "mlp.dense_4h_to_h",
    "final_layer_norm",
)


def names_of(model: PreTrainedModel) -> Names:
    """The names of a model's family."""
    return {"gpt2": GPT2, "gpt_neox": GPT_NEOX}.get(model.config.model_type, LLAMA)


def matrix(linear: nn.Module) -> Tensor:
    """The weight of a linear layer, [outputs, inputs] whichever way it is stored; a view."""
    weight = linear.weight.data
    assert isinstance(weight, Tensor)
    return weight.t() if isinstance(linear, Conv1D) else weight


def norms_and_readers(model: PreTrainedModel) -> list[tuple[nn.Module, list[Tensor]]]:
    """Every norm over the residual stream, and the matrices [outputs, H] that read it."""
    names = names_of(model)
    found = [
        (layer.get_submodule(norm), [matrix(layer.get_submodule(reader)) for reader in readers])
        for layer in decoder_layers(model)
        for norm, readers in names.norms.items()
    ]
    return [*found, (trunk_of(model).get_submodule(names.last_norm), [matrix(head_of(model))])]


def linear_layers(model: PreTrainedModel) -> list[Tensor]:
    """The matrices of all linear layers, the head among them."""
    layers = [m for layer in decoder_layers(model) for m in layer.modules() if isinstance(m, (nn.Linear, Conv1D))]
    return [matrix(m) for m in (*layers, head_of(model))]


def scale_factors(norm: nn.Module, factor: Tensor | float) -> None:
    """Multiply the factors [H] of a norm, which Gemma keeps as factor - 1."""
    weight = norm.weight.data
    assert isinstance(weight, Tensor)
    offset = 1.0 if type(norm).__name__ == "GemmaRMSNorm" else 0.0
    weight.add_(offset).mul_(factor).sub_(offset)


def takes_mean(norm: nn.Module) -> bool:
    return isinstance(norm, nn.LayerNorm)


def input_sizes(model: PreTrainedModel) -> list[float]:
    """Root mean square of the numbers that each norm over the residual stream reads, on every token once."""
    found: list[float] = []

    def note(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        found.append(float(arguments[0].square().mean().sqrt()))

    handles = [norm.register_forward_pre_hook(note) for norm, _ in norms_and_readers(model)]
    model(input_ids=torch.arange(min(model.config.vocab_size, CONTEXT))[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return found


def residual_channel(model: PreTrainedModel, size: float) -> None:
    """A channel of the residual stream near `size` in every token, through every norm up to a silent weight.

    Each norm gives the other channels the size they had without it. Where a norm takes off the mean, a second channel
    is the opposite of the first.
    """
    before = input_sizes(model)
    table = trunk_of(model).get_input_embeddings().weight.data
    assert isinstance(table, Tensor)
    width = table.shape[1]
    outside = width**0.5 if model.config.model_type == "gemma" else 1.0  # Gemma multiplies its embeddings
    channels = [CHANNEL, OTHER] if takes_mean(norms_and_readers(model)[0][0]) else [CHANNEL]
    sizes = size / outside * (1.0 + 0.1 * table[:, CHANNEL])  # a few percent apart from token to token
    for sign, channel in zip((1.0, -1.0), channels, strict=False):
        table[:, channel] = sign * sizes
    for (norm, readers), usual in zip(norms_and_readers(model), before, strict=True):
        scale_factors(norm, size * (len(channels) / width) ** 0.5 / usual)
        for weight in readers:
            weight[:, channels] *= SILENT


def unit(model: PreTrainedModel, size: float) -> None:
    """An MLP unit in every layer near `size`, and its outgoing weights as much smaller."""
    names = names_of(model)
    for layer in decoder_layers(model):
        into = layer.get_submodule(names.into_units)
        matrix(into)[UNIT] *= size
        if isinstance(into.bias, Tensor):
            into.bias.data[UNIT] *= size
        matrix(layer.get_submodule(names.out_of_units))[:, UNIT] /= size


def key_bias(model: PreTrainedModel, size: float) -> None:
    """A key bias of `size` in each head, on the channel that rotates slowest."""
    for layer in decoder_layers(model):
        bias = layer.get_submodule("self_attn.k_proj").bias
        assert isinstance(bias, Tensor)
        heads = bias.data.view(model.config.num_key_value_heads, -1)
        heads[:, heads.shape[1] // 2 - 1] = size


def loud_column(model: PreTrainedModel, size: float) -> None:
    """Weights near `size` on a channel that every norm silences."""
    for norm, readers in norms_and_readers(model):
        factor = torch.ones_like(norm.weight.data)  # type: ignore[arg-type]
        factor[CHANNEL] = SILENT
        scale_factors(norm, factor)
        if isinstance(norm, nn.LayerNorm):
            norm.bias.data[CHANNEL] = 0.0
        for weight in readers:
            weight[:, CHANNEL] *= size / float(weight[:, CHANNEL].abs().max())


@dataclass(frozen=True)
class Case:
    """What is done to a random model."""

    change: Callable[[PreTrainedModel, float], None]
    size: float
    untied: bool  # whether the head must not share the matrix of the embeddings


CASES = {
    "plain": Case(lambda *_: None, 1.0, False),
    "residual channel 1e4": Case(residual_channel, 1e4, True),
    "MLP unit 1e4": Case(unit, 1e4, False),
    "key bias 300": Case(key_bias, KEY_BIAS, False),
    "weight 1e4 on a silent channel": Case(loud_column, 1e4, True),
}


def cases_of(architecture: str) -> tuple[str, ...]:
    """The cases that a family of `CONFIGS` can have: a key bias needs biased keys of their own."""
    biased = architecture.startswith("qwen2")
    return tuple(name for name in CASES if biased or name != "key bias 300")


@torch.no_grad()
def outlier_model(architecture: str, case: str, seed: int) -> PreTrainedModel:
    """An unmodified model of a family of `CONFIGS` with one of `CASES`."""
    config, chosen = CONFIGS[architecture](), CASES[case]
    if chosen.untied:
        config.tie_word_embeddings = False
    model = small_model(config, seed)
    chosen.change(model, chosen.size)
    return model
