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

from ppo_repro.numerics.description import describe
from ppo_repro.numerics.families import decoder_layers, head_of, trunk_of
from tests.support.models import CONFIGS, CONTEXT, MIXTURES, small_model

CHANNEL, OTHER, UNIT = 3, 11, 5  # a channel of the residual stream, its opposite where a mean is taken, a unit
SILENT = 1e-6  # what silences an outlier of 1e4
KEY_BIAS = 300.0


def matrix(linear: nn.Module) -> Tensor:
    """The weight of a linear layer, [outputs, inputs] whichever way it is stored; a view."""
    weight = linear.weight.data
    assert isinstance(weight, Tensor)
    return weight.t() if isinstance(linear, Conv1D) else weight


def norms_and_readers(model: PreTrainedModel) -> list[tuple[nn.Module | None, list[Tensor]]]:
    """Every norm over the residual stream, and the matrices [outputs, H] that read it; of experts [E, outputs, H].

    The norm is None if matrices read the residual stream itself.
    """
    trunk, found = describe(trunk_of(model)), list[tuple[nn.Module | None, list[Tensor]]]()
    for layer in trunk.layers:
        found.append((layer.norms.get("norm1"), [matrix(reader) for reader in layer.matrices["qkv"]]))
        readers = [matrix(reader) for name in ("up", "router") for reader in layer.matrices.get(name, ())]
        readers += [layer.experts["expert_up"].data] if layer.experts else []
        found.append((layer.norms.get("norm2"), readers))
    return [*found, (trunk.last_norm, [matrix(head_of(model))])]


def linear_layers(model: PreTrainedModel) -> list[Tensor]:
    """The matrices of all linear layers, the head among them."""
    layers = [m for layer in decoder_layers(model) for m in layer.modules() if isinstance(m, (nn.Linear, Conv1D))]
    return [matrix(m) for m in (*layers, head_of(model))]


def scale_factors(norm: nn.Module, factor: Tensor | float) -> None:
    """Multiply the factors [H] of a norm, which Gemma keeps as factor - 1."""
    weight = norm.weight.data
    assert isinstance(weight, Tensor)
    offset = 1.0 if type(norm).__name__.startswith("Gemma") else 0.0
    weight.add_(offset).mul_(factor).sub_(offset)


def input_sizes(model: PreTrainedModel) -> list[float]:
    """Root mean square of the numbers that each norm over the residual stream reads, on every token once."""
    found: list[float] = []

    def note(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        found.append(float(arguments[0].square().mean().sqrt()))

    handles = [norm.register_forward_pre_hook(note) for norm, _ in norms_and_readers(model) if norm is not None]
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
    outside = describe(trunk_of(model)).numbers["embedding_scale"]
    channels = [CHANNEL, OTHER] if isinstance(norms_and_readers(model)[-1][0], nn.LayerNorm) else [CHANNEL]
    sizes = size / outside * (1.0 + 0.1 * table[:, CHANNEL])  # a few percent apart from token to token
    for sign, channel in zip((1.0, -1.0), channels, strict=False):
        table[:, channel] = sign * sizes
    usual = iter(before)
    for norm, readers in norms_and_readers(model):
        if norm is not None:
            scale_factors(norm, size * (len(channels) / width) ** 0.5 / next(usual))
        for weight in readers:
            weight[..., channels] *= SILENT


def unit(model: PreTrainedModel, size: float) -> None:
    """An MLP unit in every layer, or in every expert, near `size`, and its outgoing weights as much smaller."""
    for layer in describe(trunk_of(model)).layers:
        if layer.experts:
            up, down = layer.experts["expert_up"].data, layer.experts["expert_down"].data
            up[:, up.shape[1] // 2 + UNIT] *= size  # gates come first
            down[:, :, UNIT] /= size
            continue
        into, down = layer.matrices["up"][-1], matrix(layer.matrices["down"][0])
        at = UNIT - down.shape[1]  # where there is a gate, it comes first, in a matrix of its own or in the same
        matrix(into)[at] *= size
        if isinstance(into.bias, Tensor):
            into.bias.data[at] *= size
        down[:, UNIT] /= size


def key_bias(model: PreTrainedModel, size: float) -> None:
    """A key bias of `size` in each head, on the channel that rotates slowest."""
    for layer in describe(trunk_of(model)).layers:
        bias = layer.matrices["qkv"][1].bias
        assert isinstance(bias, Tensor)
        heads = bias.data.view(model.config.num_key_value_heads, -1)
        heads[:, heads.shape[1] // 2 - 1] = size


def loud_column(model: PreTrainedModel, size: float) -> None:
    """Weights near `size` on a channel that every norm silences."""
    for norm, readers in norms_and_readers(model):
        if norm is None:
            continue
        factor = torch.ones_like(norm.weight.data)  # type: ignore[arg-type]
        factor[CHANNEL] = SILENT
        scale_factors(norm, factor)
        if isinstance(norm, nn.LayerNorm):
            norm.bias.data[CHANNEL] = 0.0
        for weight in readers:
            weight[..., CHANNEL] *= size / float(weight[..., CHANNEL].abs().max())


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
    """The cases that a family can have: a key bias needs biased keys of their own."""
    biased = architecture.startswith("qwen2")
    return tuple(name for name in CASES if biased or name != "key bias 300")


@torch.no_grad()
def outlier_model(architecture: str, case: str, seed: int, size: float | None = None) -> PreTrainedModel:
    """An unmodified model of a family with one of `CASES`, with an outlier of its size or of another."""
    config, chosen = {**CONFIGS, **MIXTURES}[architecture](), CASES[case]
    if chosen.untied:
        config.tie_word_embeddings = False
    model = small_model(config, seed)
    chosen.change(model, size or chosen.size)
    return model
