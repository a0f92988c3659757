"""The precision of sampler and trainer as the configuration sets it, on the policy of a run."""

from __future__ import annotations

from transformers import PreTrainedModel

from ppo_repro.config.mismatch import MismatchConfig, SamplerPrecision
from ppo_repro.numerics.arithmetic.rounding import NARROW
from ppo_repro.numerics.layers.precision import Precision
from ppo_repro.numerics.layers.rounded import round_model, view_of


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
    )


def _form(name: str) -> str | None:
    return None if name == "float32" else name


def set_precision(config: MismatchConfig, policy: PreTrainedModel) -> PreTrainedModel:
    """Let the trainer round the policy's gradients, in place; returns the policy as the sampler has it.

    The sampler has `policy` itself, or a view of its parameters if the sampler rounds. UserError if rounding does not
    cover the model.
    """
    sampler, trainer = config.sampler.precision, config.trainer.precision
    sampled = policy
    if sampler.rounds:
        sampled = round_model(view_of(policy), precision_of(sampler), "mismatch.sampler.precision")
    round_model(policy, Precision(gradients=_form(trainer.gradients)), "mismatch.trainer.precision")
    return sampled
