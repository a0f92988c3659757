"""Dumps made with stock transformers in another way each; the audit says which side is wrong, and why."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.audit.conditions import Subject
from ppo_repro.audit.dump import Response
from ppo_repro.audit.judge import Audit, audit
from ppo_repro.audit.page import fields, lines, page
from ppo_repro.audit.trials import Settings
from ppo_repro.testing.small_models import CONTEXT, VOCAB, qwen3_config, seeded, small_model

TEMPERATURE = 0.8
Values = list[list[float]]


@dataclass(frozen=True)
class Material:
    """Prompts and responses drawn at random, and how stock transformers scores them."""

    model: PreTrainedModel
    prompts: list[list[int]]
    responses: list[list[int]]

    def logits(self, model: PreTrainedModel | None = None, before: int | None = None, skip: int = 0) -> list[Tensor]:
        """Of each response, by `model`; `before`: a token in front of the prompts; skip: how many go."""
        found = []
        for prompt, response in zip(self.prompts, self.responses, strict=True):
            first = [] if before is None else [before]
            ids = [*first, *prompt[skip:], *response[:-1]]
            with torch.no_grad():
                logits = (model or self.model)(input_ids=torch.tensor([ids])).logits[0]
            found.append(logits[len(ids) - len(response) :].float())
        return found

    def logprobs(self, logits: list[Tensor], temperature: float = TEMPERATURE, top_k: int = 0) -> Values:
        found = []
        for x, ids in zip(logits, self.responses, strict=True):
            scaled = x / temperature
            if top_k:
                scaled = scaled.masked_fill(scaled < scaled.topk(top_k)[0][:, -1:], -torch.inf)
            found.append(scaled.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist())
        return found


def material(model: PreTrainedModel) -> Material:
    """Responses sampled from the 8 likeliest tokens, so that a cut at 8 keeps them all."""
    generator, prompts, responses = seeded(11), [], []
    for length in (9, 17, 12, 20, 15, 11, 8, 16):
        ids = torch.randint(3, VOCAB, (6,), generator=generator).tolist()
        prompts.append(list(ids))
        for _ in range(length):
            with torch.no_grad():
                scaled = model(input_ids=torch.tensor([ids])).logits[0, -1] / TEMPERATURE
            top = scaled.topk(8)
            ids.append(int(top.indices[torch.multinomial(top.values.softmax(-1), 1, generator=generator)]))
        responses.append(ids[6:])
    return Material(model, prompts, responses)


@pytest.fixture(scope="module")
def made() -> Material:
    return material(small_model(qwen3_config(), 4))


@pytest.fixture(scope="module")
def subject(made: Material) -> Subject:
    return Subject(made.model, {"weights of old": small_model(qwen3_config(), 5)}, 1, CONTEXT)


def responses_of(made: Material, sampler: Values, trainer: Values) -> list[Response]:
    return [
        Response(i, tuple(p), tuple(r), np.array(s, np.float32), np.array(t, np.float32), np.ones(len(r), bool))
        for i, (p, r, s, t) in enumerate(zip(made.prompts, made.responses, sampler, trainer, strict=True), 1)
    ]


def half(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    found: Any = copy.deepcopy(model)
    return found.to(dtype)  # type: ignore[no-any-return]


def moved(values: Values) -> Values:
    return [[*v[1:], -3.0] for v in values]


def noisy(values: Values) -> Values:
    generator = seeded(3)
    return [(torch.tensor(v) + 0.3 * torch.randn(len(v), generator=generator)).tolist() for v in values]


BF16, FP16 = "computed in bfloat16", "computed in float16"
NO_TEMPERATURE = "temperature 1 instead of 0.8"
CUT = "normalised over the tokens that top-p and top-k keep"
BOS, FIRST = "prompt with a BOS token before it", "prompt without its first token"
WRONG: dict[str, Callable[[Material], Values]] = {
    BF16: lambda m: m.logprobs(m.logits(half(m.model, torch.bfloat16))),
    FP16: lambda m: m.logprobs(m.logits(half(m.model, torch.float16))),
    NO_TEMPERATURE: lambda m: m.logprobs(m.logits(), 1.0),
    "temperature 0.65 instead of 0.8": lambda m: m.logprobs(m.logits(), 0.65),
    CUT: lambda m: m.logprobs(m.logits(), top_k=8),
    "moved by one token to the left": lambda m: moved(m.logprobs(m.logits())),
    "weights of old": lambda m: m.logprobs(m.logits(small_model(qwen3_config(), 5))),
    BOS: lambda m: m.logprobs(m.logits(before=1)),
    FIRST: lambda m: m.logprobs(m.logits(skip=1)),
    f"{BF16} and {NO_TEMPERATURE}": lambda m: m.logprobs(m.logits(half(m.model, torch.bfloat16)), 1.0),
    f"{BOS} and {NO_TEMPERATURE}": lambda m: m.logprobs(m.logits(before=1), 1.0),
    f"{NO_TEMPERATURE} and moved by one token to the left": lambda m: moved(m.logprobs(m.logits(), 1.0)),
    f"weights of old and {NO_TEMPERATURE}": lambda m: m.logprobs(m.logits(small_model(qwen3_config(), 5)), 1.0),
    "unknown": lambda m: noisy(m.logprobs(m.logits())),
}


def judged(made: Material, subject: Subject, sampler: Values, trainer: Values) -> Audit:
    return audit(subject, responses_of(made, sampler, trainer), Settings(TEMPERATURE, 1.0, 8))


def test_stock_float32_is_right_on_both_sides(made: Material, subject: Subject) -> None:
    good = made.logprobs(made.logits())
    found = judged(made, subject, good, good)
    assert found.sampler.is_right and found.trainer.is_right and found.sampler.cause == found.trainer.cause == ""
    assert 0 < found.sampler.rms < 2e-6 and lines(found)[-1] == "verdict: both sides are right"


QUICK = {("sampler", BF16), ("trainer", CUT), ("trainer", f"{NO_TEMPERATURE} and moved by one token to the left")}
EACH = [
    pytest.param(side, cause, marks=[] if (side, cause) in QUICK else pytest.mark.slow)
    for side in ("sampler", "trainer")
    for cause in WRONG
]


@pytest.mark.parametrize(("side", "cause"), EACH)
def test_the_wrong_side_and_its_cause_are_named(made: Material, subject: Subject, cause: str, side: str) -> None:
    good, bad = made.logprobs(made.logits()), WRONG[cause](made)
    found = judged(made, subject, *((bad, good) if side == "sampler" else (good, bad)))
    wrong, right = (found.sampler, found.trainer) if side == "sampler" else (found.trainer, found.sampler)
    assert right.is_right and right.cause == ""
    assert not wrong.is_right and wrong.cause == cause
    assert wrong.left <= (0.5 if "float16" in cause else 0.1) * wrong.rms or cause == "unknown"
    assert lines(found)[-1] == f"verdict: the {side} is wrong"


@pytest.mark.slow
def test_both_sides_may_be_wrong_each_in_its_own_way(made: Material, subject: Subject) -> None:
    found = judged(made, subject, WRONG[BF16](made), WRONG[NO_TEMPERATURE](made))
    assert (found.sampler.cause, found.trainer.cause) == (BF16, NO_TEMPERATURE)
    assert lines(found)[-1] == "verdict: both sides are wrong"


def test_zeros_and_missing_entries_are_counted_and_judge_nothing_else(made: Material, subject: Subject) -> None:
    good = made.logprobs(made.logits())
    bad = [[0.0, float("nan"), *v[2:]] for v in good]
    found = judged(made, subject, bad, good)
    assert found.sampler.empty == 16 and not found.sampler.is_right
    assert found.sampler.cause == "16 of 108 tokens have no log-prob or a 0" and found.sampler.rms < 2e-6


@pytest.mark.slow
def test_noise_of_the_size_of_bfloat16_is_not_taken_for_it(made: Material, subject: Subject) -> None:
    good, bf16 = made.logprobs(made.logits()), WRONG[BF16](made)
    sizes = [[b - g for b, g in zip(x, y, strict=True)] for x, y in zip(bf16, good, strict=True)]
    other = [[g + d for g, d in zip(y, x[1:] + x[:1], strict=True)] for x, y in zip(sizes, good, strict=True)]
    cause = judged(made, subject, other, good).sampler.cause
    assert cause.startswith("about as far as bfloat16 rounding is (") and cause.endswith("in other digits")


@pytest.fixture(scope="module")
def pages(made: Material, subject: Subject) -> str:
    return page(judged(made, subject, WRONG[BF16](made), made.logprobs(made.logits())), "<dump>", TEMPERATURE)


def test_the_page_says_what_the_lines_say_and_loads_nothing(pages: str) -> None:
    assert "<h1>&lt;dump&gt;</h1>" in pages and "sampler is wrong" in pages and BF16 in pages
    assert "src=" not in pages and "href=" not in pages and "<script" not in pages
    assert pages.count("<table>") == 4  # what was tried for the sampler, probability, position, worst tokens


def test_json_of_an_audit_can_be_read(made: Material, subject: Subject) -> None:

    tree: Mapping[str, Any] = json.loads(
        json.dumps(fields(judged(made, subject, WRONG[BF16](made), WRONG[BF16](made))))
    )
    assert tree["sampler"]["cause"] == tree["trainer"]["cause"] == BF16
    assert tree["sampler"]["tried"][0]["inputs"] == {"weights": "bfloat16", "prompt": "as dumped"}
