"""The precision of sampler and trainer as the configuration sets it, on the networks of a run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ppo_repro.config.mismatch import MismatchConfig, SamplerPrecision, TrainerPrecision
from ppo_repro.models.networks import freeze, make_policy
from ppo_repro.numerics.arithmetic.rounding import NARROW
from ppo_repro.numerics.layers.precision import Precision
from ppo_repro.numerics.layers.rounded import round_model, view_of
from ppo_repro.rollout.stock_engine import in_dtype


def precision_of(config: SamplerPrecision) -> Precision:
    """What each kind of number is rounded to, where the configuration names formats."""
    narrow_inputs = config.activations in NARROW
    return Precision(
        weights=_form(config.weights),
        other_weights=_form(config.rest if config.weights in NARROW else config.weights),
        linear_inputs=_form(config.activations) if narrow_inputs else None,
        activations=_form(config.rest if narrow_inputs else config.activations),
        kv_cache=_form(config.kv_cache),
        logits=_form(config.logits),
        gradients=_form(config.gradients) if isinstance(config, TrainerPrecision) else None,
        attention_weights=_form(config.attention_weights),
    )


def _form(name: str) -> str | None:
    return None if name == "float32" else name


def set_precision(config: MismatchConfig, policy: PreTrainedModel, reference: PreTrainedModel) -> PreTrainedModel:
    """Give policy and reference the trainer's precision in place; returns the policy as the sampler has it.

    That is `policy` itself where both have the same one, otherwise a view of the same parameters. The reference is
    scored by the trainer, so a policy that is still the reference has KL 0. UserError where the model is not covered.
    """
    sampler, trainer = precision_of(config.sampler.precision), precision_of(config.trainer.precision)
    sampled = policy
    if config.sampler.precision.forward_formats != config.trainer.precision.forward_formats:
        sampled = round_model(view_of(policy), sampler, "mismatch.sampler.precision")
    for model in (policy, reference):
        round_model(model, trainer, "mismatch.trainer.precision")
    return sampled


@dataclass(frozen=True)
class StockNetworks:
    """What the trainer computes with in place of policy and reference; unmodified models in one dtype."""

    policy: PreTrainedModel
    reference: PreTrainedModel


def stock_networks(source: PreTrainedModel, dtype: str, max_context: int) -> StockNetworks:
    """Copies of `source` in float32, bfloat16 or float16; the reference is frozen."""
    policy, reference = (in_dtype(make_policy(source, "native", max_context), getattr(torch, dtype)) for _ in range(2))
    return StockNetworks(policy, freeze(reference))
