"""Dumps made with stock transformers in another way each; the audit says which side is wrong, and why."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.audit import trials, ways
from ppo_repro.audit.conditions import Settings, Subject
from ppo_repro.audit.dump import Response, turns_of
from ppo_repro.audit.judge import Audit, audit
from ppo_repro.audit.page import page
from ppo_repro.audit.ways import Special
from ppo_repro.audit.words import fields, lines
from ppo_repro.errors import UserError
from tests.support.html_page import check
from tests.support.small_models import CONTEXT, VOCAB, gpt2_config, qwen3_config, seeded, small_model

TEMPERATURE, BOS_ID, PAD_ID = 0.8, 1, 0
Values = list[list[float]]
Feed = Callable[["Material", int], tuple[list[int], list[int] | None]]  # of a response: what is before it, positions


@dataclass(frozen=True)
class Material:
    """Prompts and responses drawn at random, and how stock transformers scores them."""

    model: PreTrainedModel
    prompts: list[list[int]]
    responses: list[list[int]]

    def logits(self, model: PreTrainedModel | None = None, feed: Feed | None = None) -> list[Tensor]:
        """Of each response, by `model`; feed: what is there instead of the prompt, and instead of positions from 0."""
        found = []
        for i, response in enumerate(self.responses):
            before, positions = (self.prompts[i], None) if feed is None else feed(self, i)
            ids = [*before, *response[:-1]]
            given = torch.tensor([positions or list(range(len(ids)))])
            mask = torch.ones(1, len(ids), dtype=torch.int64)
            with torch.no_grad():
                scored = (model or self.model)(torch.tensor([ids]), attention_mask=mask, position_ids=given)
            found.append(scored.logits[0, len(before) - 1 :].float())
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
    for start, length in ((6, 9), (4, 17), (5, 12), (7, 20), (3, 15), (6, 11), (5, 8), (4, 16)):
        ids = torch.randint(3, VOCAB, (start,), generator=generator).tolist()
        prompts.append(list(ids))
        for _ in range(length):
            with torch.no_grad():
                scaled = model(input_ids=torch.tensor([ids])).logits[0, -1] / TEMPERATURE
            top = scaled.topk(8)
            ids.append(int(top.indices[torch.multinomial(top.values.softmax(-1), 1, generator=generator)]))
        responses.append(ids[start:])
    return Material(model, prompts, responses)


@pytest.fixture(scope="module")
def made() -> Material:
    return material(small_model(qwen3_config(), 4))


def special(learned: bool = False) -> Special:
    return Special(BOS_ID, PAD_ID, None, CONTEXT, learned)


@pytest.fixture(scope="module")
def subject(made: Material) -> Subject:
    return Subject(made.model, {"weights of old": small_model(qwen3_config(), 5)}, special())


def responses_of(made: Material, sampler: Values, trainer: Values) -> list[Response]:
    return [
        Response(
            *(i, tuple(p), tuple(r), np.array(s, np.float32), np.array(t, np.float32)),
            *((counts := np.ones(len(r), bool)), turns_of(counts)),
        )
        for i, (p, r, s, t) in enumerate(zip(made.prompts, made.responses, sampler, trainer, strict=True), 1)
    ]


def half(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """As a stack loads it: `from_pretrained` leaves rotary frequencies in float32."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return type(model).from_pretrained(folder, dtype=dtype, use_safetensors=True).eval()


def moved(values: Values) -> Values:
    return [[*v[1:], -3.0] for v in values]


def noisy(values: Values) -> Values:
    generator = seeded(3)
    return [(torch.tensor(v) + 0.3 * torch.randn(len(v), generator=generator)).tolist() for v in values]


def padding(m: Material, i: int) -> list[int]:
    return [PAD_ID] * (max(map(len, m.prompts)) - len(m.prompts[i]))


def at(m: Material, i: int, by: int) -> tuple[list[int], list[int]]:
    """The prompt, and positions of the response moved by `by`."""
    before, after = len(m.prompts[i]), len(m.responses[i]) - 1
    return m.prompts[i], [*range(before), *range(before + by, before + by + after)]


FEEDS: dict[str, Feed] = {
    ways.WITH_BOS: lambda m, i: ([BOS_ID, *m.prompts[i]], None),
    ways.WITHOUT_FIRST: lambda m, i: (m.prompts[i][1:], None),
    ways.PADDED: lambda m, i: ([*padding(m, i), *m.prompts[i]], None),
    ways.PACKED: lambda m, i: ([*(m.prompts[i - 1] + m.responses[i - 1] if i else []), *m.prompts[i]], None),
    ways.AGAIN: lambda m, i: at(m, i, -len(m.prompts[i])),
    ways.TOO_HIGH: lambda m, i: at(m, i, 1),
    ways.TOO_LOW: lambda m, i: at(m, i, -1),
}


def bf16(m: Material) -> PreTrainedModel:
    return half(m.model, torch.bfloat16)


def old() -> PreTrainedModel:
    return small_model(qwen3_config(), 5)


BF16, FP16 = "computed in bfloat16", "computed in float16"
NO_TEMPERATURE = "temperature 1 instead of 0.8"
CUT = "normalised over the tokens that top-k keeps"
BOS, LEFT = ways.WITH_BOS, "moved by one token to the left"
WRONG: dict[str, Callable[[Material], Values]] = {
    BF16: lambda m: m.logprobs(m.logits(bf16(m))),
    FP16: lambda m: m.logprobs(m.logits(half(m.model, torch.float16))),
    NO_TEMPERATURE: lambda m: m.logprobs(m.logits(), 1.0),
    "temperature 0.65 instead of 0.8": lambda m: m.logprobs(m.logits(), 0.65),
    CUT: lambda m: m.logprobs(m.logits(), top_k=8),
    LEFT: lambda m: moved(m.logprobs(m.logits())),
    "weights of old": lambda m: m.logprobs(m.logits(old())),
    **{words: (lambda m, feed=feed: m.logprobs(m.logits(feed=feed))) for words, feed in FEEDS.items()},  # type: ignore[misc]
    f"{BF16} and {NO_TEMPERATURE}": lambda m: m.logprobs(m.logits(bf16(m)), 1.0),
    f"{BF16} and {BOS}": lambda m: m.logprobs(m.logits(bf16(m), FEEDS[BOS])),
    f"{BF16} and {LEFT}": lambda m: moved(m.logprobs(m.logits(bf16(m)))),
    f"{BOS} and {NO_TEMPERATURE}": lambda m: m.logprobs(m.logits(feed=FEEDS[BOS]), 1.0),
    f"{ways.PADDED} and {NO_TEMPERATURE}": lambda m: m.logprobs(m.logits(feed=FEEDS[ways.PADDED]), 1.0),
    f"{NO_TEMPERATURE} and {CUT}": lambda m: m.logprobs(m.logits(), 1.0, top_k=8),
    f"{ways.TOO_HIGH} and {LEFT}": lambda m: moved(m.logprobs(m.logits(feed=FEEDS[ways.TOO_HIGH]))),
    f"{NO_TEMPERATURE} and {LEFT}": lambda m: moved(m.logprobs(m.logits(), 1.0)),
    f"weights of old and {NO_TEMPERATURE}": lambda m: m.logprobs(m.logits(old()), 1.0),
    f"weights of old and {BOS}": lambda m: m.logprobs(m.logits(old(), FEEDS[BOS])),
    "unknown": lambda m: noisy(m.logprobs(m.logits())),
}


def judged(made: Material, subject: Subject, sampler: Values, trainer: Values) -> Audit:
    return audit(subject, responses_of(made, sampler, trainer), Settings(TEMPERATURE, 1.0, 8))


def test_stock_float32_is_right_on_both_sides(made: Material, subject: Subject) -> None:
    good = made.logprobs(made.logits())
    found = judged(made, subject, good, good)
    assert found.sampler.is_right and found.trainer.is_right and found.sampler.cause == found.trainer.cause == ""
    assert 0 < found.sampler.rms < 2e-6 and lines(found)[-1] == "verdict: both sides are right"


QUICK = {("sampler", BF16), ("trainer", CUT), ("sampler", ways.PADDED), ("trainer", f"{NO_TEMPERATURE} and {LEFT}")}
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
@pytest.mark.parametrize(
    ("sampler", "trainer"),
    [(BF16, NO_TEMPERATURE), (f"{BF16} and {NO_TEMPERATURE}", f"{BOS} and {NO_TEMPERATURE}"), ("unknown", ways.AGAIN)],
)
def test_both_sides_may_be_wrong_each_in_its_own_way(
    made: Material, subject: Subject, sampler: str, trainer: str
) -> None:
    found = judged(made, subject, WRONG[sampler](made), WRONG[trainer](made))
    assert (found.sampler.cause, found.trainer.cause) == (sampler, trainer)
    assert lines(found)[-1] == "verdict: both sides are wrong"


def only_some(good: Values, bad: Values, rows: set[int]) -> Values:
    return [b if i in rows else g for i, (g, b) in enumerate(zip(good, bad, strict=True))]


def test_a_fault_of_some_responses_is_found_in_those(made: Material, subject: Subject) -> None:
    good = made.logprobs(made.logits())
    found = judged(made, subject, only_some(good, made.logprobs(made.logits(old())), {2, 7}), good)
    assert found.sampler.wrong_responses == 2 and found.sampler.cause == "weights of old"
    assert ", in 2 of 8 responses; weights of old" in lines(found)[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "spoil",
    [
        lambda v: [sorted(row) for row in v],  # entries of other tokens
        lambda v: [[max(x, -1.0) for x in row] for row in v],  # clipped
        lambda v: [[x / 0.6931 for x in row] for row in v],  # bits instead of nats
        lambda v: [[*row[:3], *(x - 0.5 for x in row[3:])] for row in v],
    ],
)
def test_what_no_trial_is_like_is_unknown(made: Material, subject: Subject, spoil: Callable[[Values], Values]) -> None:
    good = made.logprobs(made.logits())
    found = judged(made, subject, good, spoil(good))
    assert found.sampler.is_right and found.trainer.cause.startswith("unknown")
    assert lines(found)[-1] == "verdict: the trainer is wrong"


@pytest.mark.slow
def test_of_a_known_and_an_unknown_fault_the_known_one_is_named_as_a_part(made: Material, subject: Subject) -> None:
    good, bad = made.logprobs(made.logits()), made.logprobs(made.logits(feed=FEEDS[BOS]))
    generator = seeded(5)
    noise = [(torch.tensor(v) + 0.2 * torch.randn(len(v), generator=generator)).tolist() for v in bad]
    cause = judged(made, subject, noise, good).sampler.cause
    assert cause == f"unknown, in part {BOS}"


@pytest.mark.slow
@pytest.mark.parametrize("cause", [BF16, f"{BOS} and {NO_TEMPERATURE}"])
def test_what_is_given_up_changes_no_result(
    made: Material, subject: Subject, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = made.logprobs(made.logits()), WRONG[cause](made)
    shortened = [judged(made, subject, bad, good), judged(made, subject, noisy(bad), good)]
    monkeypatch.setattr(trials, "_least", lambda *_: -np.inf)  # computes every token of every input that is begun
    whole = [judged(made, subject, bad, good), judged(made, subject, noisy(bad), good)]
    assert sum(found.sampler.given_up for found in shortened) > 0
    for short, all_of_it in zip(shortened, whole, strict=True):
        assert all_of_it.sampler.given_up == 0
        assert short.sampler.tried[0] == all_of_it.sampler.tried[0]
        assert (short.sampler.cause, short.sampler.left) == (all_of_it.sampler.cause, all_of_it.sampler.left)


def test_sides_that_agree_on_another_model_are_refused(made: Material, subject: Subject) -> None:
    other = made.logprobs(made.logits(small_model(qwen3_config(), 6)))
    with pytest.raises(UserError, match="give the folder of the weights that the dump was made with"):
        judged(made, subject, other, other)


@pytest.mark.slow
def test_an_offset_of_learned_positions_is_found(made: Material) -> None:
    model = small_model(gpt2_config(), 4)
    gpt2 = Material(model, made.prompts, made.responses)

    def counted(m: Material, i: int) -> tuple[list[int], list[int]]:
        by = len(padding(m, i))
        return m.prompts[i], list(range(by, by + len(m.prompts[i]) + len(m.responses[i]) - 1))

    good, bad = gpt2.logprobs(gpt2.logits()), gpt2.logprobs(gpt2.logits(feed=counted))
    found = judged(gpt2, Subject(model, {}, special(learned=True)), bad, good)
    assert found.sampler.cause == ways.COUNTED and found.trainer.is_right


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
    found = judged(made, subject, WRONG[BF16](made), made.logprobs(made.logits()))
    return page(found, "<dump>", TEMPERATURE, lambda i: f"<{i}>\u202e")


def test_the_page_says_what_the_lines_say_and_loads_nothing(pages: str) -> None:
    check(pages)
    assert "<h1>&lt;dump&gt;</h1>" in pages and "sampler is wrong" in pages and BF16 in pages
    assert "src=" not in pages and "<script" not in pages and "\u202e" not in pages
    # what was tried for the sampler, probability, position, token, response, worst tokens; one turn has no table
    assert pages.count("<table>") == 6 and "By turn" not in pages


def test_json_of_an_audit_can_be_read(made: Material, subject: Subject) -> None:
    bad = WRONG[NO_TEMPERATURE](made)
    tree: Mapping[str, Any] = json.loads(json.dumps(fields(judged(made, subject, bad, bad))))
    assert tree["sampler"]["cause"] == tree["trainer"]["cause"] == NO_TEMPERATURE
    best = tree["sampler"]["tried"][0]
    assert best["inputs"] == {"weights": "float32", "way": "as dumped"} and best["temperature"] == 1.0
    assert tree["verdict"] == "both sides are wrong"
