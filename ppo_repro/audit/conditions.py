"""Log-probs of the same tokens under the conditions that a stack may have computed them in, each really computed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.accuracy.scores import Text, policy_scores, stock_scores
from ppo_repro.audit.dump import Response
from ppo_repro.models.networks import make_policy

EXACT, AS_DUMPED = "exact", "as dumped"
HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}
WITHOUT_FIRST, WITH_BOS = "without its first token", "with a BOS token before it"


@dataclass(frozen=True)
class Inputs:
    """What a forward pass is of."""

    weights: str  # EXACT, a name in HALF, or the name of other weights
    prompt: str  # AS_DUMPED, WITHOUT_FIRST or WITH_BOS


@dataclass(frozen=True)
class Conditions:
    """How log-probs may have been computed: log p(token) of logits / temperature over the kept tokens, moved."""

    inputs: Inputs
    temperature: float
    is_cut: bool  # renormalised over the tokens that top-p and top-k keep
    shift: int  # 1: the entry of a token is that of the token after it

    def deviations(self, temperature: float) -> list[str]:
        """What differs from the exact model at the run's own temperature, in words."""
        found = []
        if self.inputs.weights != EXACT:
            found.append(f"computed in {self.inputs.weights}" if self.inputs.weights in HALF else self.inputs.weights)
        if self.inputs.prompt != AS_DUMPED:
            found.append(f"prompt {self.inputs.prompt}")
        if self.temperature != temperature:
            found.append(f"temperature {self.temperature:.4g} instead of {temperature:.4g}")
        if self.is_cut:
            found.append("normalised over the tokens that top-p and top-k keep")
        if self.shift:
            found.append("moved by one token to the " + ("left" if self.shift > 0 else "right"))
        return found


@dataclass(frozen=True)
class Subject:
    """The model of an audit, and what else may be tried."""

    model: PreTrainedModel
    others: Mapping[str, PreTrainedModel]  # older weights by name
    bos_token_id: int | None
    max_context: int


def all_inputs(subject: Subject, responses: Sequence[Response]) -> list[Inputs]:
    """Every combination of weights and prompts that can be tried."""
    prompts = [AS_DUMPED]
    if all(len(r.prompt_ids) > 1 for r in responses):
        prompts.append(WITHOUT_FIRST)
    if subject.bos_token_id is not None and any(r.prompt_ids[0] != subject.bos_token_id for r in responses):
        prompts.append(WITH_BOS)
    return [Inputs(weights, prompt) for weights in (EXACT, *HALF, *subject.others) for prompt in prompts]


def text_of(response: Response, prompt: str, bos_token_id: int | None) -> Text:
    """The tokens of one response behind its prompt, or behind a changed one."""
    ids = response.prompt_ids
    if prompt == WITHOUT_FIRST:
        ids = ids[1:]
    elif prompt == WITH_BOS:
        assert bos_token_id is not None
        ids = (bos_token_id, *ids)
    return Text([ids], [response.response_ids])


def logits_of(subject: Subject, inputs: Inputs) -> Callable[[Response], Tensor]:
    """A function of a response: the logits [n, V] float32 that predict its tokens."""
    source = subject.others.get(inputs.weights, subject.model)
    if inputs.weights in HALF:
        stock: Any = copy.deepcopy(source)
        stock.to(HALF[inputs.weights])
        score = partial(stock_scores, stock)
    else:
        score = partial(policy_scores, make_policy(source, "exact", subject.max_context))
    return lambda response: score(text_of(response, inputs.prompt, subject.bos_token_id)).logits.float()


def logprobs(logits: Tensor, ids: Sequence[int], temperature: float, eligible: Tensor | None) -> Tensor:
    """log p of each token, float64 [n]: of softmax(logits / temperature) over the eligible tokens; -inf for others."""
    scaled = logits.double() / temperature
    if eligible is not None:
        scaled = scaled.masked_fill(~eligible, -torch.inf)
    return scaled.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]


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
