"""Preference pairs: by a rule and from a recorded run, as documented and the same every time."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.base.errors import UserError
from ppo_repro.models.tiny import make_tokenizer
from ppo_repro.preferences.preference_pairs import Preference, hold_out, pairs_by_rule, wrong_answer
from ppo_repro.records import reader
from ppo_repro.runs.dpo_from_run import pairs_of_run
from ppo_repro.tasks.problems import Problem, arithmetic
from ppo_repro.tasks.tokenizer import decode

PROBLEMS = arithmetic(12)
ANSWERS = {p.key: p.answer for p in PROBLEMS}
TOKENIZER = make_tokenizer(PROBLEMS, 24)
IDS = {p.key: tuple(TOKENIZER(p.prompt)["input_ids"]) for p in PROBLEMS}
word = st.integers(0, 2**64 - 1)


def by_rule(count: int = 500, label_noise: float = 0.0, seed: int = 3, problems: list[Problem] = PROBLEMS):  # type: ignore[no-untyped-def]
    return pairs_by_rule(problems, IDS, TOKENIZER, count, label_noise, seed)


def texts(pair: Preference) -> tuple[str, str]:
    return decode(TOKENIZER, pair.chosen_ids), decode(TOKENIZER, pair.rejected_ids)


@given(st.integers(0, 10**6), st.tuples(word, word, word), st.sampled_from(["01", "0123456789", "39"]))
def test_a_wrong_answer_is_wrong_and_one_mistake_away(number: int, draws: tuple[int, ...], digits: str) -> None:
    right, wrong = str(number), wrong_answer(str(number), digits, draws)
    assert wrong != right
    assert abs(len(wrong) - len(right)) == (draws[0] % 3 > 0)
    if len(wrong) == len(right):
        assert sum(a != b for a, b in zip(right, wrong, strict=True)) == 1
    else:
        assert right.startswith(wrong) or wrong.startswith(right)
    assert set(wrong) <= set(right) | set(digits)


def test_the_right_answer_is_preferred_and_every_mistake_occurs() -> None:
    pairs = by_rule()
    mistakes = Counter()
    for pair in pairs:
        chosen, rejected = texts(pair)
        assert chosen == ANSWERS[pair.prompt_key] != rejected
        assert pair.chosen_ids[-1] == pair.rejected_ids[-1] == TOKENIZER.eos_token_id
        assert pair.prompt_ids == IDS[pair.prompt_key]
        mistakes[len(rejected) - len(chosen)] += 1
    # 500 draws of probability 1/3: six standard deviations are 63
    assert set(mistakes) == {-1, 0, 1}
    assert all(abs(n - 500 / 3) < 63 for n in mistakes.values())
    seen = Counter(pair.prompt_key for pair in pairs)
    assert set(seen.values()) == {2, 3}, "500 of 169 prompts, in turns"
    assert len(seen) == len(PROBLEMS), "500 of 169 prompts, in turns"


def test_every_pass_takes_each_prompt_once_in_an_order_of_its_own() -> None:
    keys = [pair.prompt_key for pair in by_rule(2 * len(PROBLEMS))]
    first, second = keys[: len(PROBLEMS)], keys[len(PROBLEMS) :]
    assert sorted(first) == sorted(second) == sorted(ANSWERS)
    assert first != second


def test_pairs_are_a_function_of_seed_prompt_and_turn() -> None:
    assert by_rule() == by_rule() != by_rule(seed=4)
    assert by_rule(100) == by_rule(500)[:100]
    key = PROBLEMS[5].key
    few = [PROBLEMS[5], PROBLEMS[30], PROBLEMS[60], *PROBLEMS[-30:]]  # the same digits, other neighbours
    first = next(p for p in by_rule(169) if p.prompt_key == key)
    assert next(p for p in by_rule(len(few), problems=few) if p.prompt_key == key) == first


def test_pairs_of_a_run_are_all_two_responses_of_different_score(deterministic_run: Path) -> None:
    rows = reader.read_sequences(deterministic_run)
    expected = set()
    for a in rows.itertuples():
        for b in rows.itertuples():
            if (a.iteration, a.prompt_key) == (b.iteration, b.prompt_key) and a.scores > b.scores:
                expected.add((a.iteration, a.prompt_key, *(tuple(x) for x in (a.response_ids, b.response_ids))))
    pairs = pairs_of_run(deterministic_run)
    assert len(pairs) == len(expected) > 10
    assert Counter((p.prompt_key, p.chosen_ids, p.rejected_ids) for p in pairs) == Counter(e[1:] for e in expected)
    prompts = {row.prompt_key: tuple(row.prompt_ids) for row in rows.itertuples()}
    assert all(p.prompt_ids == prompts[p.prompt_key] for p in pairs)
    assert pairs == pairs_of_run(deterministic_run)


def test_held_out_prompts_share_no_pair_with_training() -> None:
    pairs = by_rule(300)
    train, held = hold_out(pairs, 40, 1)
    assert len({p.prompt_key for p in held}) == 40
    assert len(train) + len(held) == 300
    assert not {p.prompt_key for p in held} & {p.prompt_key for p in train}
    assert {p.prompt_key for p in hold_out(pairs[::-1], 40, 1)[1]} == {p.prompt_key for p in held}
    assert {p.prompt_key for p in hold_out(pairs, 40, 2)[1]} != {p.prompt_key for p in held}
    with pytest.raises(UserError, match="num_eval_prompts = 169: "):
        hold_out(pairs, 169, 1)
