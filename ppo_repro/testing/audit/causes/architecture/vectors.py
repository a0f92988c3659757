"""Leave out biases, and replace other vectors that a stack may not know, such as sinks, by a constant."""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from functools import partial

import torch
from transformers import PreTrainedModel

from ppo_repro.testing.audit.causes.architecture.copies import by_kind, weights, with_weights
from ppo_repro.testing.audit.causes.architecture.norms import norms
from ppo_repro.testing.audit.causes.architecture.option import Option

CONSTANTS = (0.0, 1.0, -math.inf)  # that may stand for a vector which a stack does not know
ADVICE = "load every tensor of the folder on both sides"


def of_vectors(model: PreTrainedModel) -> Iterator[Option]:
    """Yield changes of the model's vectors and numbers, except the weights of norms."""
    scales = {f"{name}.weight" for name in norms(model)}
    kinds = by_kind(name for name, x in weights(model).items() if x.dim() < 2 and name not in scales)
    biases = [kind for kind in kinds if kind.endswith("bias")]
    together: dict[str, list[str]] = {}
    for kind in biases:
        together.setdefault(kind.rpartition(".")[0].rpartition(".")[0], []).append(kind)
    for of in (biases, *together.values()):
        if len(of) > 1:
            names = {name for kind in of for name in kinds[kind]}
            words = f"without {', '.join(of)}" if len(of) < len(biases) else "without any bias"
            yield Option(words, ADVICE, partial(_filled, model, names, 0.0))
    for kind, of_kind in kinds.items():
        for value in (0.0,) if kind in biases else CONSTANTS:
            words = f"without {kind}" if kind in biases else f"{kind} {value} instead of its values"
            yield Option(words, ADVICE, partial(_filled, model, set(of_kind), value))


def _filled(model: PreTrainedModel, names: Set[str], value: float) -> PreTrainedModel:
    return with_weights(model, lambda name, x: torch.full_like(x, value) if name in names else None)
