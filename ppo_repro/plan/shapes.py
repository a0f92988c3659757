"""The sizes of the models of a run, without their weights: from a configuration, or a folder with a config.json."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from ppo_repro.config.algorithm import KLInLoss, SeparateValue
from ppo_repro.config.reward import RewardModelFolder
from ppo_repro.config.run import ModelFolder, RunConfig
from ppo_repro.models.load import read_model_config
from ppo_repro.models.lora import choose_layers, linear_layers, shape_of
from ppo_repro.models.tiny import tiny_config
from ppo_repro.numerics.description import check_config
from ppo_repro.numerics.families import (
    CAUSAL_MODELS,
    CLASSIFIERS,
    MIXTURES,
    check_visibility,
    head_dim,
    head_of,
    key_value_heads,
)
from ppo_repro.numerics.optimizer import SLOTS
from ppo_repro.plan.memory import Plan, Sizes, Work, frozen_model, make_plan, trained_model


def sizes_of(
    config: PretrainedConfig, deterministic: bool, lora_targets: Sequence[str] | None = None, section: str = "lora"
) -> Sizes:
    """The sizes of a causal model, with adapters on `lora_targets` (None: without; see `choose_layers`)."""
    with torch.device("meta"):  # every shape, no memory
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    shapes = {name: shape_of(layer) for name, layer in linear_layers(model).items()}
    adapted = [] if lora_targets is None else [shapes[n] for n in choose_layers(model, lora_targets, section)]
    mlps = [shape for name, shape in shapes.items() if ".mlp." in name]
    mixtures = [cast(Any, module) for module in model.modules() if type(module) in MIXTURES]
    hidden, layers, inner = config.hidden_size, config.num_hidden_layers, mlps[0][0] if mlps else 0
    heads, key_heads = config.num_attention_heads, key_value_heads(config)
    queries, keys = head_dim(config) * heads, head_dim(config) * key_heads
    qk_norm = any(name.endswith("q_norm") for name, _ in model.named_modules())
    chosen = int(mixtures[0].gate.top_k) if mixtures else 0
    expert = mixtures[0].experts.down_proj.shape[-1] if mixtures else 0
    of_mlp = len(mlps) * inner // max(1, layers - len(mixtures))
    if deterministic:  # see Saved in numerics/c/model.c
        attention = 4 * hidden + 3 * queries + 2 * keys + 2 * heads + 4 + qk_norm * (heads + key_heads)
        of_mixture = chosen * (3 * expert + 2 * hidden + 2) + (mixtures[0].experts.num_experts if mixtures else 0)
    else:  # torch keeps the inputs of norms and activations too
        attention = 6 * hidden + (2 + 2 * qk_norm) * (queries + keys)
        of_mlp, of_mixture = of_mlp + inner, chosen * (3 * hidden + 4 * expert)
    head = head_of(model).get_parameter("weight").numel()
    experts = sum(p.numel() for mixture in mixtures for p in mixture.parameters())
    return Sizes(
        parameters=sum(p.numel() for p in model.parameters()),
        linears=sum(outputs * inputs for outputs, inputs in shapes.values()) + experts,
        head=head,
        own_head=0 if config.tie_word_embeddings else sum(p.numel() for p in head_of(model).parameters()),
        adapted=sum(outputs * inputs for outputs, inputs in adapted),
        factors=sum(outputs + inputs for outputs, inputs in adapted),
        layers=layers,
        hidden=hidden,
        keys=keys,
        inner=max(inner, chosen * expert),
        vocab_size=config.vocab_size,
        kept=layers * attention + (layers - len(mixtures)) * of_mlp + len(mixtures) * of_mixture,
        kept_in_layer=attention + max(of_mlp, of_mixture),
        kept_in_row=0 if deterministic else 1,
    )


def work_of(config: RunConfig, processes: int = 1) -> Work:
    """How one of the processes of a run computes."""
    layout = config.layout
    sequences, step, evaluated = (
        ceil(count / processes)
        for count in (config.sequences_per_iteration, config.ppo.minibatch_size, config.task.num_eval_prompts)
    )
    deterministic, sampler = config.numerics.mode == "deterministic", config.mismatch.sampler
    update_sequences = min(layout.update_micro_batch or step, step)
    slots = SLOTS // processes
    return Work(
        deterministic=deterministic,
        slots=min(layout.rollout_slots, max(sequences, evaluated)),
        max_context=config.numerics.max_context,
        max_response_tokens=config.rollout.max_response_tokens,
        forward_sequences=min(layout.forward_micro_batch or sequences, sequences),
        update_sequences=update_sequences,
        gradient_arrays=slots.bit_length() if deterministic and update_sequences < step else 1,
        packed=layout.padding == "none",
        recompute=layout.gradient_checkpointing,
        older_policies=min(sampler.lag, config.ppo.iterations - 1),
        sampler_stock=0 if sampler.stock is None else getattr(torch, sampler.stock).itemsize,
        sampler_rounds=sampler.precision.weights != "float32",
        reference_in_steps=isinstance(config.kl, KLInLoss) and config.kl.estimator == "exact",
        processes=processes,
    )


def plan_run(config: RunConfig, processes: int = 1) -> Plan:
    """The memory of a run in each of `processes`. UserError where the model is not supported."""
    max_context, deterministic = config.numerics.max_context, config.numerics.mode == "deterministic"
    if isinstance(config.model, ModelFolder):
        path = config.model.path
        source = read_model_config(Path(path), CAUSAL_MODELS, f"model.path = {path}")
    else:  # its tokenizer may have as many tokens as the configuration allows
        source = tiny_config(config.model, config.model.vocab_size, max_context, None)
    (check_config if deterministic else check_visibility)(source, max_context)
    policy = sizes_of(source, deterministic, None if config.lora is None else config.lora.target_modules)
    models = [trained_model("policy", policy, 0 if config.lora is None else config.lora.rank)]
    classifier, term = source, config.reward.model
    if isinstance(term, RewardModelFolder):
        classifier = read_model_config(Path(term.path), CLASSIFIERS, f"reward model {term.path}")
    value: Sizes | None = None
    if isinstance(config.value, SeparateValue):
        begun_as, lora = classifier if config.value.init == "reward_model" else source, config.value.lora
        value = sizes_of(begun_as, deterministic, None if lora is None else lora.target_modules, "value.lora")
        models.append(trained_model("value model", value, 0 if lora is None else lora.rank, is_value=True))
    models.append(frozen_model("reference", policy))
    if term is not None:
        labels = classifier.num_labels if isinstance(term, RewardModelFolder) else 1
        models.append(frozen_model("reward model", sizes_of(classifier, deterministic), labels))
    return make_plan(policy, tuple(models), value, work_of(config, processes))
