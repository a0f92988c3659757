"""The audit names the wrong side, and why, on faults made from stock transformers (`material`); else it says
unknown."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from ppo_repro.base.errors import UserError
from ppo_repro.testing.advice import ADVICE
from ppo_repro.testing.audit import forward, limits, reference
from ppo_repro.testing.audit.audit import Audit, audit
from ppo_repro.testing.audit.causes.cause import Cause, OtherDistribution, Parameter
from ppo_repro.testing.audit.causes.chat_templates import CHANGES
from ppo_repro.testing.audit.causes.inputs import INPUTS, of_inputs
from ppo_repro.testing.audit.causes.models import of_models
from ppo_repro.testing.audit.causes.recorded import RECORDED
from ppo_repro.testing.audit.causes.softmax import DISTRIBUTIONS
from ppo_repro.testing.audit.distributions import (
    EACH_CUT_OF_ALL,
    RAW,
    TEMPERED,
    Chunk,
    Definition,
    sampled_from,
    target_logprobs,
)
from ppo_repro.testing.audit.draws import absent_ends
from ppo_repro.testing.audit.measure import Format, rms
from ppo_repro.testing.audit.reference import Reference
from ppo_repro.testing.audit.report import lines
from ppo_repro.testing.audit.search import other_bits, search
from ppo_repro.testing.audit.search.combination import Combination
from ppo_repro.testing.audit.search.hypothesis import Hypotheses, Hypothesis, hypotheses_of
from ppo_repro.testing.audit.search.trial import Trial, trial_of
from ppo_repro.testing.audit.sides import RecordedSide, WrongSide
from ppo_repro.testing.audit.stack import StackModel, StackSampling
from ppo_repro.testing.diagnosis import ROWS
from tests.support.models import VOCAB, qwen3_config, seeded, small_model
from tests.testing.audit.families import made as made_family
from tests.testing.audit.material import (
    BOS_ID,
    EOS_ID,
    FAULTS,
    KNOWN,
    NO_T,
    PAD_ID,
    TEMPERATURE,
    Material,
    Values,
    cause_of,
    first,
    from_point,
    half,
    kept,
    material,
    old,
    sampled_by,
    top_k,
)
from tests.testing.audit.outsider import OF_OUTSIDER, OUTSIDER

GIVEN = StackSampling(TEMPERATURE, 1.0, 8)


@pytest.fixture(scope="module")
def made() -> Material:
    return material(small_model(qwen3_config(), 4))


@pytest.fixture(scope="module")
def stack(made: Material) -> StackModel:
    return StackModel(made.model, {"weights of old": old()}, BOS_ID, EOS_ID, PAD_ID)


def judged(made: Material, stack: StackModel, sampler: Values, trainer: Values) -> Audit:
    return audit(stack, made.dump(sampler, trainer), GIVEN)


def test_stock_float32_is_right_on_both_sides(made: Material, stack: StackModel) -> None:
    good = made.logprobs()
    found = judged(made, stack, good, good)
    assert found.sampler.is_right
    assert found.trainer.is_right
    assert cause_of(found.sampler) == cause_of(found.trainer) == ""
    assert 0 < found.sampler.distance.rms < 2e-6
    assert len(found.tokens) == 109
    assert (found.tokens["trainer"] - found.tokens["reference"]).abs().max() < 1e-5
    assert lines(found)[-1] == "verdict: both sides are right"


# a fault of each stage, and one of no known cause
QUICK = {"base 2", "moved left by 5", "BOS", "logits cast to bfloat16", "EOS banned", "constant"}
EVERY = FAULTS | OUTSIDER


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in EVERY])
def test_the_cause_is_named_or_unknown_and_never_another(made: Material, stack: StackModel, name: str) -> None:
    fault, cause = EVERY[name]
    bad, good = fault(made), made.logprobs()
    is_sampler = len(name) % 2 == 0  # either side may be the wrong one
    found = judged(made, stack, *((bad, good) if is_sampler else (good, bad)))
    wrong, right = (found.sampler, found.trainer) if is_sampler else (found.trainer, found.sampler)
    assert right.is_right
    assert cause_of(right) == ""
    assert not wrong.is_right
    # where token id 2 is unlikely, its ban is smaller than rounding
    assert re.sub(r"at \d+ of", "at some of", cause_of(wrong)).startswith(cause), cause_of(wrong)
    assert wrong.state in ("explained", "unknown")
    assert (KNOWN | OF_OUTSIDER).get(name, "") in "; ".join(wrong.known)
    best, tried = wrong.hypotheses.best, wrong.hypotheses.shown()
    if wrong.state == "explained" and wrong.left is not None:
        assert wrong.left <= 0.5 * wrong.distance.rms
        assert wrong.left == best[0].left < 1e-4 or "float16" in wrong.cause
        assert tried[0] is best[0]
        assert wrong.advice
        assert all(a.left <= b.left for a, b in pairwise(tried) if (a in best) == (b in best))
    assert len({t.words for t in tried}) == len(tried)
    printed = lines(found)
    assert [line.partition(" are left by: ")[2] for line in printed if " are left by: " in line] == [
        t.words for t in tried
    ]
    assert printed[-1] == f"verdict: the {wrong.name} is wrong"


@pytest.fixture(scope="module")
def prompts() -> Material:
    """30 prompts, for responses of 55 tokens each."""
    ids = torch.randint(3, VOCAB, (30, 5), generator=seeded(1)).tolist()
    return Material(small_model(qwen3_config(), 4), ids, [[0] * 55 for _ in ids])


@pytest.mark.parametrize(
    ("sampler", "cause"),
    [
        (StackSampling(TEMPERATURE), ""),
        (StackSampling(TEMPERATURE, 1.0, 8), "top-k 8"),
        (StackSampling(TEMPERATURE, 0.8), "top-p 0.79"),
        (StackSampling(TEMPERATURE, min_p=0.25), "min-p 0.2"),
        (StackSampling(0.7 * TEMPERATURE), "temperature 0.56"),
        ((68,), "a ban of token 68"),
        ((EOS_ID,), f"a ban of token {EOS_ID}"),
        (range(3, VOCAB, 2), f"a grammar or bans that leave {3 + (VOCAB - 3) // 2} of {VOCAB} tokens"),
    ],
)
def test_draws_that_the_log_probs_do_not_describe_are_found_and_explained(
    prompts: Material, stack: StackModel, sampler: StackSampling | Sequence[int], cause: str
) -> None:
    """Right log-probs of all tokens on both sides; only what the sampler drew from differs."""
    generator = seeded(3)

    def draw(logits: Tensor) -> int:
        if isinstance(sampler, StackSampling):
            target, counts = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.bool)
            row = Chunk(logits[None].double(), target, (), (), sampler, counts)
            changed = sampled_from(sampler)[0].logits(row)
        else:
            changed = logits[None].double() / TEMPERATURE
            changed[0, list(sampler)] = -math.inf
        return int(torch.multinomial(changed[0].softmax(-1), 1, generator=generator))

    made = sampled_by(prompts, draw)
    found = audit(stack, made.dump(made.logprobs(), made.logprobs()), StackSampling(TEMPERATURE))
    assert found.sampler.is_right
    assert found.trainer.is_right
    assert found.is_right == (not cause)
    right, wrong = "both sides are right", "the log-probs of both sides are right, but tokens were not drawn from them"
    assert lines(found)[-1] == f"verdict: {wrong if cause else right}"
    assert found.drawn_by.startswith(cause), found.drawn_by
    assert ("or sample without the cut" in " ".join(lines(found))) == cause.startswith(("top", "min"))
    if cause.startswith(("top", "min")):  # both sides know the cut
        assert isinstance(sampler, StackSampling)
        told = audit(
            stack,
            made.dump(made.logprobs(), made.logprobs()),
            replace(sampler, sampler_logprobs="tempered", trainer_logprobs="tempered"),
        )
        assert told.is_right, lines(told)


def test_every_cause_has_a_fault_that_it_names(made: Material, stack: StackModel) -> None:
    """A cause that nothing here shows is not tested: these few are shown in tests of their own."""

    def is_shown(cause: Cause) -> bool:
        words = re.sub(r"\\{.*?\\}", ".+", re.escape(cause.words))  # any value of a parameter
        words = re.sub(r"(last|first)\\ \d+\\ ", r"\1\\ \\d+\\ ", words)  # any length of a cut prompt
        named = [words for _, words in EVERY.values()]
        return any(re.search(f"(^| and ){words}($| and )", x) or cause.words.startswith(x) for x in named)

    inputs = [*of_inputs(made.dump(made.logprobs(), made.logprobs()), stack)]
    assert {row.words for row in INPUTS} - {cause.words for cause in inputs} == {
        *(row.words for row in CHANGES),  # and others that need a tokenizer, several turns or a prompt with BOS
        "ids that were decoded and encoded again",
        *(f"context without {what}" for what in ("the tokens between turns", "the earlier turns")),
        "context without the sampled tokens of earlier turns",
        "prompt without its BOS token",
        "prompt with a second BOS token before it",
    }
    assert {cause.words for cause in (*inputs, *DISTRIBUTIONS, *RECORDED) if not is_shown(cause)} == {
        *(f"of the processed distribution{order}, not of all tokens" for order in ORDERS if order),
        "of all tokens, not of the processed distribution",
        "the logit, not normalised",
        "positions that count the padding before the prompt",  # to which rotary positions are blind
    }
    assert not FAULTS.keys() & OUTSIDER.keys()


def causes(made: Material, stack: StackModel, sampling: StackSampling, definition: Definition) -> list[Cause]:
    before = search.causes_before_logits(stack, made.dump(made.logprobs(), made.logprobs()))
    return [*before, *search.causes_after_logits(sampling, definition)]


def test_audit_and_diagnosis_have_one_list_of_causes(made: Material, stack: StackModel) -> None:
    rows = causes(made, stack, ALL_CUTS, RAW)
    assert len({row.words for row in rows}) == len(rows)  # by which a reader tells them apart
    without_a_row = {"none", "floating_point_noise", "non_finite", "unknown", "coarse_records"}
    assert {row.name for row in rows} | {row.cause for row in ROWS} | without_a_row == set(ADVICE)


@pytest.mark.parametrize(("name", "parts"), [("bfloat16", {"output matrix", "rotary table"}), ("float16", set[str]())])
def test_rounding_is_compared_with_the_weights_and_the_parts_in_its_own_format(
    made: Material, stack: StackModel, name: Format, parts: set[str]
) -> None:
    rows = causes(made, stack, GIVEN, TEMPERED)
    assert [row.words for row in other_bits._of_format(rows, "weights", name)] == [f"weights rounded to {name}"]
    assert {row.words.partition(" computed")[0] for row in other_bits._of_format(rows, "part", name)} == parts


def test_causes_not_words_tell_hypotheses_apart() -> None:
    at_1, twice, multiplied, at_x = DISTRIBUTIONS[:4]

    def of(cause: Cause, x: float | None, left: float, explains: bool = True) -> Hypothesis:
        return Hypothesis(Combination((cause,), x), torch.tensor([left]), explains, "these words")

    def combinations(found: Sequence[Hypothesis]) -> list[Combination]:
        return [t.combination for t in found]

    tried = [of(twice, None, 2e-7), of(multiplied, None, 1e-7), of(twice, None, 3e-7), of(at_1, None, 5e-7)]
    found = hypotheses_of([*tried, of(at_x, 0.9999, 4e-7), of(at_x, 0.9, 6e-7)])
    assert combinations(found.best) == [Combination((cause,)) for cause in (multiplied, twice, at_1)]
    assert combinations(found.others) == [Combination((at_x,), 0.9)]
    found = hypotheses_of([of(at_1, None, 3e-4, explains=False), of(at_x, 0.9997, 1e-7)])
    assert combinations(found.best) == [Combination((at_x,), 0.9997)], "the fitted value explains, 1 does not"


def wrong_sampler(made: Material, causes: Sequence[Cause]) -> Trial:
    """Numbers of temperature 0.7, beside the right ones."""
    responses = made.dump(made.logprobs(temperature=0.7), made.logprobs())
    right = [torch.tensor(r.trainer).double() for r in responses]
    recorded = RecordedSide("sampler", responses, StackSampling(TEMPERATURE), TEMPERED, Reference(right, 1e-7, 0.0, 0))
    return trial_of(made.model, WrongSide(recorded, range(len(responses))), causes)


@pytest.mark.parametrize(("least", "low", "high"), [(0.1, 0.6999, 0.7001), (0.9, 0.9, 1.0), (2.0, math.nan, math.nan)])
@torch.no_grad()
def test_a_fit_refuses_values_that_predict_nothing(made: Material, least: float, low: float, high: float) -> None:
    """A temperature that predicts from `least` on; the fit starts at 1."""
    trial = wrong_sampler(made, [])

    def divided(chunk: Chunk, logits: Tensor, x: float) -> Tensor:
        return logits / x if x >= least else torch.full_like(logits, math.nan)

    row = OtherDistribution("a temperature", "temperature", divided, parameter=Parameter((1.0,), is_fitted=True))
    at_1 = Combination((row,), 1.0)
    fitted = [candidate.combination.value for candidate in search._fitted(trial, at_1, trial.few)]
    if least > 1.0:
        assert fitted == []
        return
    (x,) = fitted
    assert x is not None
    assert low <= x <= high


@pytest.mark.slow
def test_a_single_wrong_token_among_many_is_seen(made: Material, stack: StackModel) -> None:
    good = made.logprobs()
    bad = [v.clone() for v in good]
    bad[3][7] -= 2e-4  # of the rms it is 2e-5
    assert not judged(made, stack, bad, good).sampler.is_right


def test_a_single_token_that_hardly_changes_the_rms_has_no_cause(
    made: Material, stack: StackModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "TOKEN_OVER_RMS", 1.0)  # as in a response of a thousand tokens
    good = made.logprobs()
    bad = [v.clone() for v in good]
    bad[1][7] -= 30 * judged(made, stack, good, good).floor
    found = judged(made, stack, bad, good).sampler
    assert (found.is_right, cause_of(found), len(found.distance.wrong_responses)) == (False, "unknown", 1)


@pytest.mark.parametrize(("tokens", "cause"), [(3, "unknown"), (4, "temperature 1 instead of 0.8")])
def test_a_cause_needs_four_tokens(made: Material, stack: StackModel, tokens: int, cause: str) -> None:
    short = material(made.model, ((5, tokens),))
    assert cause_of(judged(short, stack, short.logprobs(temperature=1.0), short.logprobs()).sampler) == cause


def test_other_weights_without_the_tokens_of_the_dump_are_refused(made: Material) -> None:
    good = made.logprobs()
    most = max(map(max, made.responses))
    for config, words in (
        (qwen3_config(vocab_size=most), f"is not in the vocabulary of {most} of the weights of other"),
        (qwen3_config(max_position_embeddings=20), "the weights of other has 20 positions"),
    ):
        with pytest.raises(UserError, match=words):
            judged(made, StackModel(made.model, {"weights of other": small_model(config, 4)}), good, good)


def test_end_tokens_are_judged_where_a_limit_ended_the_responses(made: Material, stack: StackModel) -> None:
    """Several responses of one length, longer than one token; other dumps without end tokens are of texts."""
    values = made.logprobs()

    def left_out(tokens: int, responses: int) -> bool:
        ids = {"response_ids": (68,) * tokens, "counts": np.ones(tokens, bool)}
        return EOS_ID in absent_ends(stack, [replace(r, **ids) for r in made.dump(values, values)[:responses]])

    assert [left_out(2, 5), left_out(1, 5), left_out(2, 1)] == [False, True, True]


def test_zeros_and_missing_entries_are_counted_and_judge_nothing_else(made: Material, stack: StackModel) -> None:
    good = made.logprobs()
    bad = [torch.cat([torch.tensor([0.0, math.nan]), v[2:]]) for v in good]
    found = judged(made, stack, bad, good)
    assert found.sampler.gaps.count == 16
    assert not found.sampler.is_right
    assert found.sampler.distance.rms < 2e-6
    assert cause_of(found.sampler) == "16 of 109 tokens have no log-prob or a 0"
    zeros = judged(made, stack, [0 * v for v in good], good)
    assert cause_of(zeros.sampler) == "all 109 numbers are exactly 0; nothing was recorded"


def test_zeros_that_no_cause_was_tried_on_are_not_explained(
    made: Material, stack: StackModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "TRIED", 16)  # as in a dump of many responses
    monkeypatch.setattr(limits, "LONG_WINDOW", 8)
    bad = made.logprobs(temperature=1.0)
    for values in bad[5:]:
        values[-1] = 0.0
    found = judged(made, stack, bad, made.logprobs()).sampler
    assert found.gaps.count == 3
    assert cause_of(found) == f"3 of 109 tokens have no log-prob or a 0 and {NO_T}"


# which distribution is meant


def in_order(m: Material, s: StackSampling, order: Sequence[str], cut_at: float) -> tuple[Values, list[list[bool]]]:
    """Log-probs over the tokens that cuts keep, each of what the cut before it left, at a temperature; which exist."""
    values: Values = []
    for x, r in zip(m.plain, m.responses, strict=True):
        found = []
        for logits, token in zip(x.double().numpy(), r, strict=True):
            left = np.argsort(-logits)
            for name in order:
                p = np.exp(logits[left] / cut_at)
                p /= p.sum()
                before = np.concatenate([[0.0], np.cumsum(p)[:-1]])
                keeps = {"top-k": np.arange(len(p)) < (s.top_k or VOCAB), "min-p": p >= s.min_p * p[0]}
                left = left[keeps.get(name, before <= s.top_p)]
            own, every = logits[token] / s.temperature, np.log(np.exp(logits[left] / s.temperature).sum())
            found.append(own - every if token in left else math.nan)
        values.append(torch.tensor(found))
    return values, [(~v.isnan()).tolist() for v in values]


# what engines do, and how a definition of the audit says it
ORDERS: dict[str, tuple[tuple[str, ...], bool]] = {
    "": (("top-p", "min-p", "top-k"), False),
    ", top-p of what top-k leaves (Transformers, vLLM)": (("top-k", "top-p", "min-p"), False),
    ", top-p of what min-p and top-k leave (vLLM)": (("min-p", "top-k", "top-p"), False),
    ", the cuts before the temperature (MLX)": (("top-p", "min-p", "top-k"), True),
    ", top-p of what top-k leaves, before the temperature (llama.cpp)": (("top-k", "top-p", "min-p"), True),
}
ALL_CUTS = StackSampling(0.8, 0.8, 6, 0.1)


@pytest.mark.parametrize(
    ("sampling", "order"),
    [
        *((StackSampling(*x), "") for x in ((0.8,), (1.3, 1.0, 8), (0.8, 0.97), (0.8, 0.97, 8), (0.8, 1.0, 0, 0.01))),
        *((ALL_CUTS, order) for order in ORDERS),
    ],
)
def test_log_probs_of_the_processed_distribution_are_right_if_both_sides_have_them(
    made: Material, stack: StackModel, sampling: StackSampling, order: str
) -> None:
    cuts, is_last = ORDERS[order]
    values, mask = in_order(made, sampling, cuts, 1.0 if is_last else sampling.temperature)
    found = audit(stack, made.dump(values, values, mask), sampling)
    assert found.sampler.is_right
    assert found.trainer.is_right
    assert found.sampler.definition.words == (f"processed{order}" if sampling.is_processed() else "tempered")


def test_with_a_penalty_alone_no_cause_is_about_cuts(made: Material, stack: StackModel) -> None:
    values = made.logprobs(temperature=1.0)
    found = audit(stack, made.dump(values, values), StackSampling(0.8, repetition_penalty=1.2))
    assert cause_of(found.sampler) == "temperature 1 instead of 0.8"


@pytest.mark.parametrize(
    ("of_sampler", "cause"),
    [(lambda right: right, ""), (lambda right: right - 3.0, "unknown"), (lambda right: math.nan, "1 of 108 tokens")],
)
def test_a_drawn_token_counts_as_kept_by_a_cut(
    made: Material, stack: StackModel, of_sampler: Callable[[float], float], cause: str
) -> None:
    """Rounding moved one token across the end of top-k; its log-prob is judged like others."""
    sampling = StackSampling(TEMPERATURE, 1.0, 7, sampler_logprobs="processed", trainer_logprobs="processed")
    right, mask = in_order(made, sampling, ("top-k",), TEMPERATURE)
    (i, t), *others = [(i, t) for i, row in enumerate(mask) for t, there in enumerate(row) if not there]
    mask[i][t], right[i][t] = True, kept(top_k(7))(made)[i][t]
    wrong = [v.clone() for v in right]
    wrong[i][t] = of_sampler(float(right[i][t]))
    found = audit(stack, made.dump(wrong, right, mask), sampling)
    assert found.trainer.is_right
    assert found.sampler.is_right == (cause == "")
    assert cause in cause_of(found.sampler)
    assert len(found.tokens) == 109 - len(others)


@torch.no_grad()
def test_rounding_across_the_end_of_a_cut_is_rounding(made: Material) -> None:
    """The 16-bit model drops a drawn token."""
    sampling = StackSampling(TEMPERATURE, 1.0, 7)
    right, mask = in_order(made, sampling, ("top-k",), TEMPERATURE)
    responses, reference = made.dump(made.logprobs(), right, mask), Reference(right, 1e-7, 0.0, 0)
    recorded = RecordedSide("sampler", responses, sampling, EACH_CUT_OF_ALL, reference)
    trial = trial_of(made.model, WrongSide(recorded, range(len(right))), [*of_models(made.model, {})])
    narrow = next(cause for cause in trial.causes if cause.words == "computed in bfloat16")
    chunks = trial.chunks(Combination((narrow,)), trial.many)
    cut = torch.cat([target_logprobs(x.chunk.targets, EACH_CUT_OF_ALL.logits(x.chunk))[x.usable] for x in chunks])
    assert cut.isinf().any()
    assert 0.0 < rms(trial.narrow_errors(narrow, trial.many)) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_the_order_of_cuts_on_one_side_is_named(made: Material, stack: StackModel, order: str) -> None:
    cuts, is_last = ORDERS[order]
    values, mask = in_order(made, ALL_CUTS, cuts, 1.0 if is_last else 0.8)
    found = audit(stack, made.dump(values, made.logprobs(), mask), ALL_CUTS)
    assert cause_of(found.sampler) == f"of the processed distribution{order}, not of all tokens"
    assert found.trainer.is_right
    said = replace(ALL_CUTS, sampler_logprobs="processed", trainer_logprobs="tempered")
    assert audit(stack, made.dump(values, made.logprobs(), mask), said).sampler.is_right


@pytest.mark.parametrize("said", ["auto", "processed"])
def test_sides_with_different_orders_of_cuts_are_of_different_distributions(
    made: Material, stack: StackModel, said: str
) -> None:
    sampling = replace(ALL_CUTS, sampler_logprobs=said, trainer_logprobs=said)
    names = ", top-p of what top-k leaves (Transformers, vLLM)", ""
    (sampler, a), (trainer, b) = (in_order(made, ALL_CUTS, ORDERS[name][0], 0.8) for name in names)
    both = [[u and v for u, v in zip(*masks, strict=True)] for masks in zip(a, b, strict=True)]
    found = audit(stack, made.dump(sampler, trainer, both), sampling)
    assert cause_of(found.sampler) == f"processed{names[0]}"
    assert cause_of(found.trainer) == "processed, each cut of all tokens"
    assert not found.sampler.is_right
    assert not found.trainer.is_right
    assert lines(found)[-1].startswith("verdict: the sides are processed in different orders of the cuts")


OF_TOP_K = ", top-p of what top-k leaves (Transformers, vLLM)"
OTHER_ORDER = f"draws: explained by another order of cuts: processed{OF_TOP_K}"


@pytest.mark.parametrize(
    ("sampler", "trainer", "temperature", "line"),
    [
        (OF_TOP_K, "", 0.8, "draws: right: "),
        (OF_TOP_K, "", 0.3, "draws: explained by temperature "),
        ("", OF_TOP_K, 0.8, OTHER_ORDER),
        ("", "", 0.8, OTHER_ORDER),
    ],
)
def test_draws_are_judged_by_the_samplers_order_of_cuts(
    prompts: Material, stack: StackModel, sampler: str, trainer: str, temperature: float, line: str
) -> None:
    """The tokens are drawn with a top-p of what top-k leaves, whatever the sampler reports."""
    sampling = StackSampling(0.8, 0.8, 6)
    drawn_from = next(d for d in sampled_from(sampling) if d.order == OF_TOP_K)
    generator = seeded(3)

    def draw(logits: Tensor) -> int:
        target, counts = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.bool)
        kept = drawn_from.logits(Chunk(logits[None].double(), target, (), (), sampling, counts))
        return int(torch.multinomial((kept * 0.8 / temperature).softmax(-1)[0], 1, generator=generator))

    made = sampled_by(prompts, draw)
    sides = [in_order(made, sampling, ORDERS[order][0], 0.8)[0] for order in (sampler, trainer)]
    found = audit(stack, made.dump(*sides), sampling)
    assert found.sampler.state == found.trainer.state == ("right" if sampler == trainer else "of its own order")
    assert any(said.startswith(line) for said in lines(found)), lines(found)
    assert ("tokens were not drawn" in lines(found)[-1]) == (line != "draws: right: ")
    assert not any("without the cut" in said for said in lines(found))


@pytest.mark.slow
def test_each_side_is_judged_by_the_distribution_that_it_is_said_to_have(made: Material, stack: StackModel) -> None:
    raw, tempered, of_8 = made.logprobs(temperature=1.0), made.logprobs(), kept(top_k(8))(made)
    dump, said = made.dump(raw, tempered), replace(GIVEN, sampler_logprobs="raw", trainer_logprobs="tempered")
    of_each = audit(stack, dump, said)
    assert of_each.sampler.is_right
    for side, column in (("sampler", "reference"), ("trainer", "trainer_reference")):
        assert (of_each.tokens[side] - of_each.tokens[column]).abs().max() < 1e-5
    assert not audit(stack, dump, GIVEN).sampler.is_right
    processed = replace(GIVEN, sampler_logprobs="processed", trainer_logprobs="processed")
    found = audit(stack, made.dump(of_8, tempered), processed)
    assert found.sampler.is_right
    assert cause_of(found.trainer) == "of all tokens, not of the processed distribution"


def test_sides_that_share_no_token_are_judged_one_by_one(made: Material, stack: StackModel) -> None:
    bad = FAULTS["noise"][0](made)
    halves = [torch.arange(len(v)) % 2 == 0 for v in bad]
    sampler, trainer = (
        [v.masked_fill(half == k, math.nan) for v, half in zip(bad, halves, strict=True)] for k in (0, 1)
    )
    found = judged(made, stack, sampler, trainer)
    assert found.sampler.state == "unknown"
    assert found.trainer.state == "unknown"


def test_an_end_token_that_the_model_does_not_have_is_in_no_distribution(made: Material) -> None:
    outside = StackModel(made.model, {}, eos_token_id=VOCAB)  # of a tokenizer with more tokens
    good = made.logprobs()
    assert VOCAB not in absent_ends(outside, made.dump(good, good))
    assert audit(outside, made.dump(good, good), StackSampling(TEMPERATURE)).sampler.is_right


# a large vocabulary, long responses


@pytest.mark.slow
def test_logits_in_chunks_give_the_same_verdict(
    made: Material, stack: StackModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = FAULTS["repetition penalty"][0](made)
    whole = judged(made, stack, bad, made.logprobs())
    monkeypatch.setattr(forward, "CHUNK", 5 * VOCAB)
    monkeypatch.setattr(forward, "TOGETHER", 30)
    monkeypatch.setattr(reference, "AT_ONCE", 7)
    parts = judged(made, stack, bad, made.logprobs())
    assert cause_of(parts.sampler) == cause_of(whole.sampler) == "repetition penalty 1.3"
    assert (parts.tokens["reference"] - whole.tokens["reference"]).abs().max() < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("no temperature", NO_T),
        ("BOS", "prompt with a BOS token before it"),
        ("sum", "the sum over the response at every token"),
        ("moved left by 5", "each entry is of the token +5 places on"),
        ("reversed", "in the opposite order"),
        ("BOS, no temperature", f"prompt with a BOS token before it and {NO_T}"),
    ],
)
@pytest.mark.parametrize("start", [0, 30])
def test_causes_of_long_responses_are_found_in_windows(
    made: Material, stack: StackModel, monkeypatch: pytest.MonkeyPatch, fault: str, cause: str, start: int
) -> None:
    long = material(made.model, ((5, 55), (6, 50), (4, 58)))
    for name, size in {"WINDOW": 6, "LONG_WINDOW": 24, "SCREENED": 12, "TRIED": 27}.items():
        monkeypatch.setattr(limits, name, size)
    found = judged(long, stack, from_point(FAULTS[fault][0], start)(long), long.logprobs())
    part = re.sub(r"^at \d+ of \d+ tokens", "in part:", cause_of(found.sampler))
    assert part in ({f"in part: {cause}", "unknown"} if start else {cause})
    assert found.trainer.is_right


def test_a_temperature_that_nobody_gave_is_a_question(made: Material, stack: StackModel) -> None:
    values = made.logprobs()
    with pytest.raises(UserError, match=r"temperature 0.8 explains the sampler; did you forget --temperature 0.8\?"):
        audit(stack, made.dump(values, made.logprobs(temperature=1.0)), StackSampling(is_temperature_given=False))
    found = audit(stack, made.dump(values, made.logprobs(temperature=1.0)), StackSampling())
    assert cause_of(found.sampler) == "temperature 0.8 instead of 1"


# turns


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "keep"),
    [
        ("context without the tokens between turns", lambda turn, now, counts: counts),
        ("context without the earlier turns", lambda turn, now, counts: turn == now),
        ("context without the sampled tokens of earlier turns", lambda turn, now, counts: turn == now or not counts),
    ],
)
def test_context_that_a_later_turn_does_not_see(
    made: Material, stack: StackModel, words: str, keep: Callable[[int, int, bool], bool]
) -> None:
    """Three turns: 3 sampled tokens, 2 of a tool, 3 sampled, 1 of a tool, the others sampled."""
    counts = [[(t not in (3, 4, 8)) for t in range(len(r))] for r in made.responses]
    turns = [[1] * 3 + [2] * 5 + [3] * (len(r) - 8) for r in made.responses]  # a tool's tokens lead to the next turn
    values = []
    for i, r in enumerate(made.responses):
        row = []
        for t, token in enumerate(r):
            seen = [k for k in range(t) if keep(turns[i][k], turns[i][t], counts[i][k])]
            ids = [*made.prompts[i], *(r[k] for k in seen)]
            with torch.no_grad():
                logits = made.model(torch.tensor([ids])).logits[0, -1].double()
            row.append(float((logits / TEMPERATURE).log_softmax(-1)[token]))
        values.append(torch.tensor(row))
    found = audit(stack, made.dump(values, made.logprobs(), counts), GIVEN)
    assert cause_of(found.sampler) == words
    assert found.trainer.is_right


# 16 bits that overflow


@pytest.mark.parametrize(
    ("name", "cause"),
    [("no temperature", NO_T), ("bfloat16", "computed in bfloat16"), ("constant", "unknown"), ("noise", "unknown")],
)
def test_a_model_that_overflows_in_float16_gets_no_verdict_from_its_rounding(name: str, cause: str) -> None:
    model = small_model(qwen3_config(), 4)
    with torch.no_grad():
        for layer in model.get_decoder().layers:
            layer.mlp.up_proj.weight.mul_(2.0**17)
            layer.mlp.down_proj.weight.mul_(2.0**-17)
    overflowing = material(model)
    assert not all(bool(x.isfinite().all()) for x in overflowing.logits(half(model, torch.float16)))
    bad = FAULTS[name][0](overflowing)
    found = judged(overflowing, StackModel(model, {}), bad, overflowing.logprobs())
    assert found.trainer.is_right
    assert cause_of(found.sampler) == cause
    assert all(math.isfinite(t.left) for t in found.sampler.hypotheses.shown())


# experts


@pytest.mark.parametrize(
    ("family", "factor", "cause"),
    [
        ("llama3", 1.8, "as large as bfloat16 rounding"),
        pytest.param("llama3", 3.2, "as large as 16-bit rounding", marks=pytest.mark.slow),
        ("mixtral", 1.8, "unknown"),
    ],
)
def test_errors_like_16_bit_rounding_have_a_format_by_their_size_and_no_cause_with_experts(
    family: str, factor: float, cause: str
) -> None:
    m = first(3, made_family(family))
    good, rounded = m.logprobs(), m.logprobs(m.logits(half(m.model, torch.bfloat16)))
    bad = [g + factor * (r - g) for g, r in zip(good, rounded, strict=True)]
    found = judged(m, StackModel(m.model, {}), good, bad)
    assert found.sampler.is_right
    assert cause_of(found.trainer).startswith(cause)


# any architecture of transformers


@pytest.mark.parametrize(
    "family", ["phi", "xglm", *(pytest.param(n, marks=pytest.mark.slow) for n in ("falcon", "bloom", "opt"))]
)
def test_an_architecture_that_the_kernels_do_not_know(family: str) -> None:
    """The positions of XGLM do not compute in 16 bits."""
    other = first(3, made_family(family))
    alone = StackModel(other.model, {}, BOS_ID, EOS_ID, PAD_ID)
    good = other.logprobs()
    assert judged(other, alone, good, good).sampler.is_right
    with_bos = other.logprobs(other.logits(prompt=lambda i: [BOS_ID, *other.prompts[i]]))
    found = judged(other, alone, with_bos, other.logprobs(temperature=1.0))
    assert cause_of(found.sampler) == "prompt with a BOS token before it"
    assert cause_of(found.trainer) == "temperature 1 instead of 0.8"


def test_the_numbers_as_they_are_stay_on_a_long_list() -> None:
    small = torch.full((9,), 0.1)
    near = [Hypothesis(Combination(), small, False, str(i), "of other tokens") for i in range(9)]
    plain = Hypothesis(Combination(), torch.ones(9), False, "as it is")
    shown = Hypotheses([], [*near, plain]).shown()
    assert (len(shown), shown[-1]) == (limits.SHOWN, plain)
    assert plain.advice == "", "float32 numbers are not told to be recorded in float32"
