"""The shapes of the models of a run, without their weights: from a configuration, or a folder with a config.json."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ppo_repro.config.algorithm import KLInLoss, LoraConfig, SeparateValue
from ppo_repro.config.layout import MeshConfig
from ppo_repro.config.mismatch import FORMATS_OF_8_BITS, MismatchConfig, SamplerPrecision
from ppo_repro.config.reward import RewardModelFolder
from ppo_repro.config.run import ModelFolder, RunConfig
from ppo_repro.errors import UserError
from ppo_repro.models.load import read_model_config
from ppo_repro.models.lora import choose_layers, linear_layers, shape_of
from ppo_repro.models.tiny import tiny_config
from ppo_repro.numerics.layers.families import (
    CAUSAL_MODELS,
    CLASSIFIERS,
    MIXTURES,
    check_visibility,
    head_dim,
    head_of,
    key_value_heads,
)
from ppo_repro.numerics.layers.lowering import check_config
from ppo_repro.numerics.sharding.layers import ATTENTION, INPUTS, MLP, OUTPUTS, check_divisible
from ppo_repro.numerics.sharding.stages import check_layers
from ppo_repro.plan.causes import Causes, Rounding
from ppo_repro.plan.memory import Plan
from ppo_repro.plan.mixtures import Mixture
from ppo_repro.plan.models import Linear, ModelShape, Saved, as_classifier
from ppo_repro.plan.phases import make_plan
from ppo_repro.plan.work import Work
from ppo_repro.shares import check_mesh, check_shares, pieces, share_ranges

_ALONE = MeshConfig()
# what a backward pass keeps in one layer of each family, checked by a test: multiples of the widths of residual
# stream, queries, keys and MLP, then norms with exponents of rows, norms of every head, mask rows
_DIVIDED = {**ATTENTION, **MLP, "embed_tokens": OUTPUTS, "lm_head": OUTPUTS}
_LIKE_LLAMA = ("llama", "mistral", "qwen2")
_EXACT = {
    **dict.fromkeys(_LIKE_LLAMA, Saved(4, 2, 2, 3, 6, 0, 0)),
    "qwen3": Saved(4, 3, 3, 3, 6, 1, 0),
    "gemma": Saved(4, 2, 2, 4, 2, 0, 0),
    "gpt2": Saved(4, 2, 2, 2, 4, 0, 0),
    "gpt_neox": Saved(3, 3, 3, 2, 4, 0, 0),
    "qwen3_moe": Saved(4, 3, 3, 4, 2, 1, 0),
    "mixtral": Saved(4, 2, 2, 4, 2, 0, 0),
    "olmoe": Saved(4, 3, 3, 4, 4, 0, 0),
}
_NATIVE = {
    **dict.fromkeys(_LIKE_LLAMA, Saved(6, 2, 2, 4, 2, 0, 1, number=4, upcast_hidden=2)),
    "gemma": Saved(6, 2, 2, 4, 2, 0, 1, number=4, upcast_hidden=4),
    "qwen3": Saved(6, 4, 4, 4, 2, 1, 1, number=4, upcast_hidden=2, upcast_heads=True),
    "gpt2": Saved(4, 2, 2, 5, 4, 0, 1, number=4),
    "gpt_neox": Saved(4, 3, 3, 2, 4, 0, 1, number=4),
    "qwen3_moe": Saved(6, 4, 4, 4, 2, 1, 1, number=4, upcast_hidden=2, upcast_heads=True),
    "mixtral": Saved(6, 2, 2, 4, 2, 0, 1, number=4, upcast_hidden=2),
    "olmoe": Saved(6, 4, 4, 4, 4, 0, 1, number=4, upcast_hidden=2, upcast_heads=True),
}


def without_weights(config: PretrainedConfig) -> PreTrainedModel:
    """A causal model on the meta device: every shape, no memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)


def model_shape(
    config: PretrainedConfig,
    exact: bool,
    lora_targets: Sequence[str] | None = None,
    section: str = "lora",
    mesh: MeshConfig = _ALONE,
) -> ModelShape:
    """The shape of a causal model, with adapters on `lora_targets` (None: without; see `choose_layers`).

    Of the processes of a mesh that hold it together, the part of the one with the most.
    """
    model = without_weights(config)
    adapted = set() if lora_targets is None else set(choose_layers(model, lora_targets, section))
    head = head_of(model)
    tied = config.tie_word_embeddings
    linears, stage = linear_layers(model), max(pieces(config.num_hidden_layers, mesh.pipeline), key=len)
    inner = max((shape_of(layer)[0] for name, layer in linears.items() if ".mlp." in name), default=0)
    mixture, of_mixtures = _mixture(model)
    own_head = _part(Linear(*shape_of(head)), "lm_head", mesh)
    return ModelShape(
        parameters=sum(_part_size(name, p, mesh) for name, p in model.named_parameters() if _is_of(stage, name)),
        layers=len(stage),
        hidden=config.hidden_size,
        heads=config.num_attention_heads // mesh.tensor,
        key_heads=key_value_heads(config) // mesh.tensor,
        head_dim=head_dim(config),
        intermediate=inner // mesh.tensor,
        vocab_size=config.vocab_size,
        linears=tuple(
            _part(Linear(*shape_of(layer), name in adapted, isinstance(layer, Conv1D)), name, mesh)
            for name, layer in linears.items()
            if _is_of(stage, name)
        )
        + of_mixtures,
        head=own_head,
        head_parameters=0 if tied else own_head.size if mesh.group > 1 else _size(head),
        saved=(_EXACT if exact else _NATIVE)[config.model_type],
        whole=_size(model),
        matrices=sum(p.numel() for _, p in model.named_parameters() if p.dim() > 1) - (0 if tied else _size(head)),
        mixture=mixture,
    )


def _mixture(model: PreTrainedModel) -> tuple[Mixture | None, tuple[Linear, ...]]:
    """The mixtures of a model, None without any, and the matrices of their routers and experts."""
    found = [cast(Any, module) for module in model.modules() if type(module) in MIXTURES]
    if not found:
        return None, ()
    router, (experts, hidden, inner) = found[0].gate, found[0].experts.down_proj.shape
    normalised = bool(getattr(router, "norm_topk_prob", True))  # Mixtral's always are
    expert = Linear(2 * inner, hidden, of_expert=True), Linear(hidden, inner, of_expert=True)
    matrices = (Linear(experts, hidden, by_rest=True), *(expert * experts))
    return Mixture(len(found), experts, int(router.top_k), inner, normalised), matrices * len(found)


def _is_of(stage: range, name: str) -> bool:
    """Whether a module or parameter is of these layers, or of none."""
    index = re.search(r"\.(\d+)\.", name)
    return index is None or int(index[1]) in stage


def _holders(module: str, mesh: MeshConfig) -> int:
    """How many processes divide a matrix; all of a group divide the vocabulary."""
    return mesh.group if module in ("embed_tokens", "lm_head") else mesh.tensor


def _part(matrix: Linear, name: str, mesh: MeshConfig) -> Linear:
    """What of a matrix a process holds, as `numerics.sharding` divides it: the largest part."""
    module = name.rpartition(".")[2]
    count = _holders(module, mesh)
    if count == 1:
        return matrix
    if _DIVIDED[module] == INPUTS:
        return replace(matrix, inputs=ceil(matrix.inputs / count), divided="inputs")
    return replace(matrix, outputs=ceil(matrix.outputs / count), divided="outputs")


def _part_size(name: str, parameter: Tensor, mesh: MeshConfig) -> int:
    path, _, own = name.rpartition(".")
    module = path.rpartition(".")[2]
    count = _holders(module, mesh)
    dim = _DIVIDED.get(module) if count > 1 else None
    if dim is None or (own == "bias" and dim == INPUTS):
        return parameter.numel()
    size = parameter.shape[dim]
    return parameter.numel() // size * ceil(size / count)


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def work_of(config: RunConfig, processes: int = 1) -> Work:
    """How one of the processes of a run computes on this machine: the one with the largest share.

    UserError for a CUDA device, and where the mesh or the shares are not for so many processes.
    """
    layout = config.layout
    mesh = layout.mesh
    check_mesh(mesh.data, processes, mesh.tensor, mesh.pipeline)
    check_shares(layout.rank_shares, processes, mesh.group)
    sequences, step, evaluated = (
        max(map(len, share_ranges(count, layout.rank_shares or [1] * (processes // mesh.group))))
        for count in (config.sequences_per_iteration, config.ppo.minibatch_size, config.task.num_eval_prompts)
    )
    exact = config.numerics.mode == "exact"
    if layout.device != "cpu":
        raise UserError(f"layout.device = {layout.device}: plan is for CPUs; take cpu")
    return Work(
        kernels="float64" if exact else "native",
        slots=min(layout.rollout_slots, max(sequences, evaluated)),
        max_context=config.numerics.max_context,
        max_response_tokens=config.rollout.max_response_tokens,
        sequences=sequences,
        forward_sequences=min(layout.forward_micro_batch or sequences, sequences),
        update_sequences=min(layout.update_micro_batch or step, step),
        packed=layout.padding == "none",
        recompute=layout.gradient_checkpointing,
        lora_rank=0 if config.lora is None else config.lora.rank,
        step_sequences=config.ppo.minibatch_size,
        side_by_side=exact and processes == 1 and layout.threads > 1 and isinstance(config.value, SeparateValue),
        value_lora_rank=0 if (lora := _value_lora(config)) is None else lora.rank,
        older_policies=0 if (lag := config.mismatch.sampler.lag) is None else min(lag.most, config.ppo.iterations - 1),
        causes=_causes(config.mismatch),
        reference_in_steps=isinstance(config.kl, KLInLoss) and config.kl.estimator == "exact",
        processes=processes,
        tensor=mesh.tensor,
        pipeline=mesh.pipeline,
        zero=mesh.zero,
    )


def _causes(config: MismatchConfig) -> Causes:
    sampler, trainer = config.sampler, config.trainer
    return Causes(
        sampler=_rounding(sampler.precision),
        trainer=Rounding(renews_head=trainer.precision.rounds, renews_layers=trainer.precision.rounds),
        sampler_differs=sampler.precision.rounds,
        sampler_stock=0 if sampler.stock is None else getattr(torch, sampler.stock).itemsize,
    )


def _rounding(config: SamplerPrecision) -> Rounding:
    narrow = config.weights in FORMATS_OF_8_BITS
    return Rounding(
        layers=config.weights != "float32",
        rest=(config.rest if narrow else config.weights) != "float32",
        activations=config.activations != "float32",
        renews_head=config.rounds,
        renews_layers=config.rounds and not config.only_logits,
    )


def _value_lora(config: RunConfig) -> LoraConfig | None:
    return config.value.lora if isinstance(config.value, SeparateValue) else None


def plan_run(config: RunConfig, processes: int | None = None) -> Plan:
    """The memory of a run in each of `processes`, by default those of its mesh, or one.

    UserError where the model is not supported, or the mesh or the shares are not for so many processes.
    """
    shares, mesh = len(config.layout.rank_shares), config.layout.mesh
    processes = processes or (mesh.data or shares or 1) * mesh.group
    max_context, exact = config.numerics.max_context, config.numerics.mode == "exact"
    if isinstance(config.model, ModelFolder):
        path = config.model.path
        source = read_model_config(Path(path), CAUSAL_MODELS, f"model.path = {path}")
    else:  # its tokenizer may have as many tokens as the configuration allows
        source = tiny_config(config.model, config.model.vocab_size, max_context, None)
    (check_config if exact else check_visibility)(source, max_context)
    check_divisible(source, mesh.tensor, "the model")
    check_layers(source, mesh.pipeline, "the model")
    shape, term = model_shape(source, exact), config.reward.model
    policy = shape if mesh.group == 1 else model_shape(source, exact, mesh=mesh)
    if config.lora is not None:
        policy = model_shape(source, exact, config.lora.target_modules)
    classifier: PretrainedConfig | None = None
    if isinstance(term, RewardModelFolder):
        classifier = read_model_config(Path(term.path), CLASSIFIERS, f"reward model {term.path}")
    reward: ModelShape | None = None
    if term is not None:
        labels = 1 if classifier is None else classifier.num_labels
        reward = as_classifier(shape if classifier is None else model_shape(classifier, exact), labels)
    value: ModelShape | None = None
    from_reward = isinstance(config.value, SeparateValue) and config.value.init == "reward_model"
    if isinstance(config.value, SeparateValue):
        begun_as = classifier if from_reward and classifier is not None else source
        lora = config.value.lora
        check_divisible(begun_as, mesh.tensor, "the value model")
        check_layers(begun_as, mesh.pipeline, "the value model")
        value = model_shape(begun_as, exact, None if lora is None else lora.target_modules, "value.lora", mesh)
        if from_reward:
            value = as_classifier(value, 1)
    return make_plan(policy, value, reward, work_of(config, processes), from_reward)
