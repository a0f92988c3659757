"""The precision of the sampler as the configuration sets it, on the policy of a run."""

from __future__ import annotations

import copy
from dataclasses import replace

from transformers import PreTrainedModel

from ppo_repro.config.mismatch import MismatchConfig, SamplerPrecision
from ppo_repro.numerics.network import Lowered, lower, lowered_of
from ppo_repro.numerics.precision import NARROW, Precision


def precision_of(config: SamplerPrecision) -> Precision:
    """What each kind of number is rounded to, as the configuration names formats."""
    narrow_inputs = config.activations in NARROW
    return Precision(
        weights=config.weights,
        other_weights=config.rest if config.weights in NARROW else config.weights,
        linear_inputs=config.activations if narrow_inputs else "float32",
        activations=config.rest if narrow_inputs else config.activations,
        kv_cache=config.kv_cache,
        logits=config.logits,
    )


def sampled_view(config: MismatchConfig, policy: PreTrainedModel) -> PreTrainedModel:
    """The policy as the sampler has it: `policy` itself, or a view of its parameters if the sampler rounds."""
    lowered = lowered_of(policy)
    return policy if lowered is None else rounded_view(policy, lowered, precision_of(config.sampler.precision))


def rounded_view(policy: PreTrainedModel, lowered: Lowered, precision: Precision) -> PreTrainedModel:
    """A model over the very parameters of another one that rounds; the model itself if there is nothing to round."""
    if precision == Precision():
        return policy
    shared = (*policy.parameters(), *policy.buffers())
    view = copy.deepcopy(policy, {id(tensor): tensor for tensor in shared})
    return lower(view, replace(lowered, precision=precision))
