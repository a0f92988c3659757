"""Make the networks of a run and their optimizers: the state before the first step."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn
from transformers import PreTrainedModel

from ppo_repro.base.ranks import Ranks
from ppo_repro.config.algorithm import LoraConfig, PPOConfig, SeparateValue, ValueHead
from ppo_repro.config.run import RunConfig
from ppo_repro.models import networks
from ppo_repro.models.lora import Adaptable, Lora, add_lora, share_frozen
from ppo_repro.models.reward_model import value_model_from
from ppo_repro.models.state import TrainState, Versions
from ppo_repro.numerics.adamw import AdamWSettings
from ppo_repro.numerics.devices import Card, kernels_of
from ppo_repro.numerics.families import trunk_of
from ppo_repro.numerics.interface import CPU
from ppo_repro.numerics.optimizer import Optimizer
from ppo_repro.sampling.faults.trainer import dropout
from ppo_repro.stages.coefficients import first_coefficients


def train_state(
    config: RunConfig, source: PreTrainedModel, reward_model: PreTrainedModel | None, share: bool, ranks: Ranks
) -> tuple[TrainState, Lora | None]:
    """Make the state before the first step, and the policy's adapters.

    Args:
        source: policy, reference, and a value model that does not start as the reward model, are copies of it.
        share: let adapted models use the weights of frozen models for all weights that they do not train.
    """
    numerics = config.numerics
    mode, max_context, precision = numerics.mode, numerics.max_context, numerics.precision
    policy = networks.make_policy(source, mode, max_context, precision)
    reference = networks.make_policy(source, mode, max_context, precision).requires_grad_(False)
    lora = _adapted(policy, config.lora, config.seed, reference if share else None)
    versions = _versions(config.mismatch.sampler.lag, policy, lora)
    sampler = _sampler(config, policy, source)
    if config.layout.gradient_checkpointing:
        networks.checkpoint_gradients(trunk_of(policy))
    trained: nn.Module = policy
    value_model, value_optimizer = None, None
    if isinstance(config.value, ValueHead):
        head = networks.make_value_head(source.config.hidden_size, config.seed).to(source.device)
        value_model = networks.ValueModel(trunk_of(policy), head)
        trained = nn.ModuleDict({"policy": policy, "value_head": head})
    elif isinstance(config.value, SeparateValue):
        value_model, adapters = _value_model(config, config.value, source, reference, reward_model, share)
        settings = _adamw(config.ppo, config.value.learning_rate)
        value_optimizer = Optimizer(value_model, settings, mode, ranks, adapters)
    on_card = mode == "deterministic" and isinstance(kernels_of(source.device), Card)
    state = TrainState(
        policy=policy,
        value_model=value_model,
        reference=reference,
        policy_optimizer=Optimizer(trained, _adamw(config.ppo, config.ppo.learning_rate), mode, ranks, lora),
        value_optimizer=value_optimizer,
        coefficients=first_coefficients(config.kl, config.ppo.objective),
        versions=versions,
        sampler=sampler,
        hidden_hook=dropout(config.mismatch.trainer.dropout, config.seed),
        cpu_policy=nn.Module.to(deepcopy(policy), CPU) if on_card and config.numerics.cross_check else None,
    )
    return state, lora


def _versions(lag: int, policy: PreTrainedModel, lora: Lora | None) -> Versions | None:
    """Make the store of older policies that sample in place of the policy; None unless a mismatch asks for a lag."""
    if not lag:
        return None
    if lora is None:
        return Versions(dict(policy.named_parameters()), lag)
    return Versions(lora.trained(), lag, lora.merge)


def _sampler(config: RunConfig, policy: PreTrainedModel, source: PreTrainedModel) -> PreTrainedModel | None:
    """Make the model that samples in place of the policy; None unless a mismatch asks for stock code or rounding."""
    faults = config.mismatch.sampler
    if faults.stock:
        stock = networks.make_policy(source, "native", config.numerics.max_context)
        return networks.in_dtype(stock, getattr(torch, faults.stock))
    sampler = networks.rounded_view(policy, networks.rounding_of(faults.precision))
    return None if sampler is policy else sampler


def _value_model(
    config: RunConfig,
    settings: SeparateValue,
    source: PreTrainedModel,
    reference: PreTrainedModel,
    reward_model: PreTrainedModel | None,
    share: bool,
) -> tuple[networks.ValueModel, Lora | None]:
    """Make a value model with a trunk of its own, and its adapters. `share` is the argument of `train_state`."""
    numerics = config.numerics
    mode, max_context, precision = numerics.mode, numerics.max_context, numerics.precision
    if settings.init == "reward_model":
        assert reward_model is not None
        starts_as, value_model = reward_model, value_model_from(reward_model, mode, max_context, precision)
    else:
        starts_as = reference
        value_model = networks.make_value_model(source, mode, max_context, config.seed, precision)
    lora = _adapted(value_model, settings.lora, config.seed, trunk_of(starts_as) if share else None)
    if config.layout.gradient_checkpointing:
        networks.checkpoint_gradients(value_model.trunk)
    return value_model, lora


def _adamw(ppo: PPOConfig, learning_rate: float) -> AdamWSettings:
    return AdamWSettings(
        learning_rate=learning_rate,
        beta2=ppo.adam_beta2,
        eps=ppo.adam_eps,
        weight_decay=ppo.weight_decay,
        max_grad_norm=ppo.max_grad_norm,
    )


def _adapted(model: Adaptable, config: LoraConfig | None, seed: int, base: PreTrainedModel | None) -> Lora | None:
    """Add adapters to a model if `config` is not None; unless `base` is None, share its frozen weights."""
    if config is None:
        return None
    lora = add_lora(model, config.rank, config.alpha, config.target_modules, seed)
    return lora if base is None else share_frozen(model, base, lora)
