"""Compute the sizes of a run's models, and the memory of their passes, from shapes alone: no weight is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from ppo_repro.config.algorithm import LoraConfig, SeparateValue
from ppo_repro.config.model import ModelFolder
from ppo_repro.config.numerics import NumericsConfig
from ppo_repro.config.run import RunConfig
from ppo_repro.config.tasks import RewardModelFolder
from ppo_repro.models.load import read_model_config
from ppo_repro.models.lora import choose_layers, shape_of
from ppo_repro.models.tiny import tiny_config
from ppo_repro.numerics.description import check_config, check_visibility, plain
from ppo_repro.numerics.families import CAUSAL_MODELS, CLASSIFIERS, head_of, trunk_of
from ppo_repro.numerics.lowering import Lowered
from ppo_repro.numerics.network import KEEP_ALL, KEEP_INPUTS, KEEP_NOTHING
from ppo_repro.numerics.packed_model import PackedModel
from ppo_repro.runs.kept_checkpoints import FLOAT


@dataclass(frozen=True)
class Model:
    """Sizes of one model of a run, in numbers of floats."""

    name: str
    weights: int  # without weights that the model shares with another
    trained: int
    frozen: int
    collected: int  # floats with a gradient; with an adapter, of the merged weights
    packed: int  # floats of the packed weights, which the kernels read


class Shape:
    """Causal model without allocated weights, and the kernels' description of its shape."""

    def __init__(self, config: PretrainedConfig, numerics: NumericsConfig) -> None:
        with torch.device("meta"):  # tensors have shapes, but no memory
            self.model = AutoModelForCausalLM.from_config(plain(config), dtype=torch.float32, trust_remote_code=False)
        self.kernels = PackedModel(trunk_of(self.model), Lowered(numerics.max_context, precision=numerics.precision))
        self.struct = self.kernels.struct
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.head = head_of(self.model).get_parameter("weight").numel()
        self.own_head = 0 if config.tie_word_embeddings else sum(p.numel() for p in head_of(self.model).parameters())

    def packed(self, outputs: int) -> int:
        """Return the floats of the packed weights with a head of `outputs` outputs."""
        return self.kernels.packed_floats(outputs)

    def trained(self, name: str, lora: LoraConfig | None, section: str, is_value: bool = False) -> Model:
        """Return the sizes of a policy, or of a value model, whose head is a score with a bias.

        Args:
            lora: the adapter, with which the trunk stays shared; None for no adapter.
            section: section of the configuration, for errors.
        """
        head = self.struct.hidden + 1 if is_value else self.own_head
        packed = self.packed(1 if is_value else self.struct.vocabulary)
        if lora is None:
            parameters = self.parameters - self.own_head + head
            twice = self.head if head == 0 else 0  # a tied head and embedding have a sum each
            return Model(name, parameters, parameters, 0, parameters + twice, packed)
        shapes = [shape_of(layer) for layer in choose_layers(self.model, lora.target_modules, section).values()]
        own_head, adapted = (head if is_value else 0), sum(n * k for n, k in shapes)
        trained = lora.rank * sum(n + k for n, k in shapes) + own_head
        frozen = self.parameters - self.own_head
        return Model(name, adapted + trained, trained, frozen, adapted + own_head, packed)

    def frozen(self, name: str, labels: int | None = None) -> Model:
        """Return the sizes of a reference model, or of a classifier with `labels` labels."""
        parameters, outputs = self.parameters, self.struct.vocabulary
        if labels is not None:
            parameters, outputs = parameters - self.own_head + labels * self.struct.hidden, labels
        return Model(name, parameters, 0, parameters, 0, self.packed(outputs))

    def cache(self, tokens: int) -> int:
        """Return the bytes of the keys and values of `tokens` tokens, a multiple of 16."""
        return 2 * FLOAT * self.struct.layers * self.struct.kv_heads * self.struct.head_dim * tokens

    def forward(self, tokens: int) -> int:
        """Return the bytes of a pass without gradients over `tokens` tokens."""
        return FLOAT * (self.kernels.kept_floats(tokens, KEEP_NOTHING) + 2 * tokens * self.struct.hidden)

    def step(self, tokens: int, recompute: bool) -> int:
        """Return the bytes of a pass with gradients over `tokens` tokens."""
        widest = max(matrix.struct.n for matrix in self.kernels.matrices)
        kept = self.kernels.kept_floats(tokens, KEEP_INPUTS if recompute else KEEP_ALL)
        backward = tokens * (6 * self.struct.hidden + 3 * widest)
        return FLOAT * (kept + backward) + self.cache(tokens)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a run's models."""

    policy: Shape
    value: Shape | None  # None without a value model of its own
    models: tuple[Model, ...]  # the policy first, then every other model


def sizes_of(config: RunConfig) -> Sizes:
    """Return the sizes of all models of a run. Raises UserError for an unknown model."""
    max_context = config.numerics.max_context
    if isinstance(config.model, ModelFolder):
        path = config.model.path
        source = read_model_config(Path(path), CAUSAL_MODELS, f"model.path = {path}")
    else:  # the tokenizer does not exist yet; it may have as many tokens as the configuration allows
        source = tiny_config(config.model, config.model.vocab_size, max_context, None)
    (check_config if config.numerics.mode == "deterministic" else check_visibility)(source, max_context)
    policy = Shape(source, config.numerics)
    models = [policy.trained("policy", config.lora, "lora")]
    classifier, term, value = source, config.reward.model, None
    if isinstance(term, RewardModelFolder):
        classifier = read_model_config(Path(term.path), CLASSIFIERS, f"reward model {term.path}")
    if isinstance(config.value, SeparateValue):
        value = Shape(classifier if config.value.init == "reward_model" else source, config.numerics)
        models.append(value.trained("value model", config.value.lora, "value.lora", is_value=True))
    models.append(policy.frozen("reference"))
    if term is not None:
        labels = classifier.num_labels if isinstance(term, RewardModelFolder) else 1
        models.append(Shape(classifier, config.numerics).frozen("reward model", labels))
    return Sizes(policy, value, tuple(models))
