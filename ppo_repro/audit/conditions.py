"""Log-probs of the same tokens under the conditions that a stack may have computed them in, each really computed."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from ppo_repro.audit.dump import Response
from ppo_repro.audit.ways import AS_DUMPED, Fed, Special
from ppo_repro.rollout.engine import Sampling
from ppo_repro.rollout.sampler import cut

FLOAT32 = "float32"
HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}
WHOLE, TOP_P, TOP_K, BOTH = "all", "top-p", "top-k", "top-p and top-k"


@dataclass(frozen=True)
class Settings:
    """What the stack says it sampled with."""

    temperature: float
    top_p: float
    top_k: int

    def cuts(self) -> list[str]:
        """Which tokens probabilities may be normalised over."""
        given = [name for name, is_given in ((TOP_P, self.top_p < 1.0), (TOP_K, self.top_k > 0)) if is_given]
        return [WHOLE, *given, *([BOTH] if len(given) > 1 else [])]


@dataclass(frozen=True)
class Inputs:
    """What a forward pass is of."""

    weights: str  # FLOAT32, a name in HALF, or the name of other weights
    way: str  # AS_DUMPED, or the words of another way

    def deviations(self) -> list[str]:
        """What differs from the model and the dump, in words."""
        found = []
        if self.weights != FLOAT32:
            found.append(f"computed in {self.weights}" if self.weights in HALF else self.weights)
        return [*found, self.way] if self.way != AS_DUMPED else found


@dataclass(frozen=True)
class Conditions:
    """How log-probs may have been computed: log p(token) of logits / temperature over the kept tokens, moved."""

    inputs: Inputs
    temperature: float
    kept: str  # WHOLE, or which cut they were renormalised after
    shift: int  # 1: the entry of a token is that of the token after it

    def deviations(self, temperature: float) -> list[str]:
        """What differs from the model, the dump and the run's own temperature, in words."""
        found = self.inputs.deviations()
        if self.temperature != temperature:
            found.append(f"temperature {self.temperature:.4g} instead of {temperature:.4g}")
        if self.kept != WHOLE:
            found.append(f"normalised over the tokens that {self.kept} keep{'s' * (self.kept != BOTH)}")
        if self.shift:
            found.append("moved by one token to the " + ("left" if self.shift > 0 else "right"))
        return found


@dataclass(frozen=True)
class Subject:
    """The model of an audit, and what else may be tried."""

    model: PreTrainedModel
    others: Mapping[str, PreTrainedModel]  # older weights by name
    special: Special


def weights_of(subject: Subject, name: str) -> PreTrainedModel:
    """Unmodified transformers, float32 or a copy in 16 bits."""
    if name not in HALF:
        return subject.others.get(name, subject.model)
    # parameters only: from_pretrained leaves rotary frequencies in float32
    halved: dict[int, Any] = {id(p): Parameter(p.detach().to(HALF[name]), False) for p in subject.model.parameters()}
    return copy.deepcopy(subject.model, halved)


def logits_of(model: PreTrainedModel, fed: Fed, response: Response) -> Tensor:
    """Logits [n, V] float32 that predict the response tokens, by the model's own forward."""
    ids = [*fed.before, *response.response_ids[:-1]]
    positions = range(len(ids)) if fed.positions is None else fed.positions
    stock: Any = model
    logits = stock(
        input_ids=torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),  # else positions that begin again cut the sequence
        position_ids=torch.tensor([list(positions)]),
        use_cache=False,
        logits_to_keep=len(response.response_ids),
    ).logits[0]
    return torch.as_tensor(logits).float()


def logprobs(logits: Tensor, ids: Sequence[int], temperature: float, eligible: Tensor | None) -> Tensor:
    """log p of each token, float64 [n]: of softmax(logits / temperature) over the eligible tokens; -inf for others.

    The softmax is in the logits' own dtype.
    """
    scaled = logits / temperature
    if eligible is not None:
        scaled = scaled.masked_fill(~eligible, -torch.inf)
    return scaled.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0].double()


def eligible_of(logits: Tensor, temperature: float, kept: str, settings: Settings) -> Tensor | None:
    """Which tokens a cut keeps, bool [n, V]; None: all."""
    if kept == WHOLE:
        return None
    top_k, top_p = settings.top_k if kept != TOP_P else 0, settings.top_p if kept != TOP_K else 1.0
    return cut(logits / temperature, Sampling(temperature, top_k, top_p, 1))[0]


def shifted(values: Tensor, by: int) -> Tensor:
    """values[i + by] at i, NaN where there is none."""
    moved = torch.full_like(values, torch.nan)
    if by == 0:
        return values
    if by > 0:
        moved[:-by] = values[by:]
    else:
        moved[-by:] = values[:by]
    return moved
