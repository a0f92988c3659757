"""What of a model this process holds, in whatever way the processes of a run divide it, and all of it again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo_repro.mesh.groups import MeshRanks
from ppo_repro.mesh.shards import ShardRanks
from ppo_repro.numerics.layers.families import decoder_layers, key_value_heads, modules_of
from ppo_repro.numerics.pieces import Divided
from ppo_repro.numerics.sharding.gathered import Sharded, shard
from ppo_repro.numerics.sharding.layers import OUTPUTS, DividedEmbedding, DividedLinear, divide
from ppo_repro.numerics.sharding.stages import StagedLayer, stage
from ppo_repro.numerics.tensor_parts import UNDIVIDED, TensorParts
from ppo_repro.ranks import Ranks


def hold(model: PreTrainedModel, ranks: Ranks, of: str = "the model") -> PreTrainedModel:
    """Keep what this process holds of a lowered model in the mesh of `ranks`, in place, and free the rest.

    UserError for a model that this mesh cannot divide.
    """
    if isinstance(ranks, ShardRanks):
        return shard(model, ranks, of)
    if isinstance(ranks, MeshRanks) and ranks.by_layers:
        return stage(model, ranks.holders, of)
    return divide(model, ranks.holders, of)


def cached_heads(model: PreTrainedModel) -> list[int]:
    """The number of key heads of each layer that this process caches."""
    heads = key_value_heads(model.config)
    return [_own_heads(layer, heads) for layer in decoder_layers(model)]


def _own_heads(layer: nn.Module, heads: int) -> int:
    if isinstance(layer, StagedLayer):
        return heads if layer.is_own else 0
    key = getattr(getattr(layer, "self_attn", None), "k_proj", None)
    return heads // key.share.holders.size if isinstance(key, DividedLinear) else heads


def whole_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The named parameters of a module, whole, one after the other; all processes that hold parts must ask for them."""
    return parts_of(module).whole(module.named_parameters())


def held_parameters(module: nn.Module) -> dict[str, Tensor | Divided]:
    """What this process holds of each parameter of a module, by name; a tied one once."""
    parts = parts_of(module)
    return {name: parts.held(name, parameter.detach()) for name, parameter in module.named_parameters()}


def held_state(model: nn.Module) -> dict[str, Tensor | Divided]:
    """The same of all that files of a model have, in the order of its state."""
    held = held_parameters(model)
    parameters = {id(parameter) for parameter in model.parameters()}
    state = model.state_dict(keep_vars=True)
    return {name: held.get(name, x.detach()) for name, x in state.items() if name in held or id(x) not in parameters}


def parts_of(module: nn.Module) -> TensorParts:
    """What of the parameters of a module, by name, this process holds."""
    modules = modules_of(module)
    sharded = [m for m in modules if isinstance(m, Sharded)]
    if sharded:
        return _in_pieces(module, sharded)
    layers = [m for m in modules if isinstance(m, DividedLinear | DividedEmbedding)]
    stages = [m for m in modules if isinstance(m, StagedLayer)]
    if not layers:
        return UNDIVIDED
    dims, sizes, summed = dict[int, int](), dict[int, int](), set[int]()
    for layer in layers:
        dims[id(layer.weight)], sizes[id(layer.weight)] = layer.dim, layer.share.length
        if isinstance(layer, DividedLinear) and layer.bias is not None and layer.dim == OUTPUTS:
            dims[id(layer.bias)], sizes[id(layer.bias)] = 0, layer.share.length
    for part in modules:
        if isinstance(getattr(part, "q_proj", None), DividedLinear):  # norms of heads see those of this process
            norms = (getattr(part, name, None) for name in ("q_norm", "k_norm"))
            summed |= {id(norm.weight) for norm in norms if norm is not None}
    named = {name: id(p) for name, p in module.named_parameters()}
    owners = {p: (layer.stage, size) for layer in stages for p, size in layer.sizes.items()}
    return TensorParts(
        layers[0].share.holders,
        {name: dims[p] for name, p in named.items() if p in dims},
        {name: sizes[p] for name, p in named.items() if p in sizes},
        frozenset(name for name, p in named.items() if p in summed),
        owners={name: owners[p] for name, p in named.items() if p in owners},
    )


def _in_pieces(module: nn.Module, sharded: Sequence[Sharded]) -> TensorParts:
    shapes = {id(m.weight): m.prepared.shape for m in sharded}
    flat = {name: shapes[id(p)] for name, p in module.named_parameters() if id(p) in shapes}
    return TensorParts(sharded[0].prepared.ranks, flat=flat)
