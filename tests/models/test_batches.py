"""Rows of a forward pass: every response token is predicted from exactly the tokens before it."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.buffers import Rollout
from ppo_repro.models.batches import lay_out, micro_batches
from ppo_repro.numerics.rows import slots_of
from tests.support.bare import bare_rollout

tokens = st.lists(st.integers(1, 99), min_size=1, max_size=6)
pairs = st.lists(st.tuples(tokens, tokens), min_size=1, max_size=6)


def test_forced_tokens_are_inputs_and_not_targets() -> None:
    prompts, responses = [[1, 2], [9]], [[3, 4, 5, 6], [7, 8]]
    batch = lay_out(prompts, responses, is_forced=[[False, True, True, False], [False, False]])
    free = lay_out(prompts, responses)
    assert batch.sequences.ids.tolist() == free.sequences.ids.tolist() and len(batch.sequences.ids) == 7
    # the 6 is predicted from the forced 5 before it
    assert batch.targets.tolist() == [3, 6, 7, 8]
    assert batch.predictors.tolist() == free.predictors[[0, 3, 4, 5]].tolist()
    assert batch.sequences.ids[batch.predictors].tolist() == [2, 5, 9, 7]


@given(sequences=pairs)
def test_each_response_token_has_one_predictor_after_what_came_before(
    sequences: list[tuple[list[int], list[int]]],
) -> None:
    batch = lay_out([p for p, _ in sequences], [r for _, r in sequences])
    ids, start, rows = batch.sequences.ids, batch.sequences.start, batch.sequences.rows
    assert batch.targets.tolist() == [token for _, response in sequences for token in response]
    wanted = [[*prompt, *response[:k]] for prompt, response in sequences for k in range(len(response))]
    for row, history in zip(batch.predictors.tolist(), wanted, strict=True):
        first = start[rows.sequence[row]]
        assert ids[first : row + 1].tolist() == history
        assert rows.position[first : row + 1].tolist() == list(range(len(history)))


def rollout_of(sequences: list[tuple[list[int], list[int]]]) -> Rollout:
    rollout = bare_rollout(torch.tensor([len(response) for _, response in sequences]))
    prompts = replace(rollout.prompts, prompt_ids=tuple(tuple(prompt) for prompt, _ in sequences))
    return replace(rollout, prompts=prompts, response_ids=torch.tensor([i for _, r in sequences for i in r]))


@given(sequences=pairs, size=st.integers(0, 7), data=st.data())
def test_micro_batches_hold_the_chosen_sequences_and_their_tokens_are_counted(
    sequences: list[tuple[list[int], list[int]]], size: int, data: st.DataObject
) -> None:
    rollout = rollout_of(sequences)
    chosen = data.draw(st.lists(st.integers(0, len(sequences) - 1), unique=True))
    indices = torch.tensor(chosen, dtype=torch.int64)
    slots = slots_of(range(len(chosen)), len(chosen), 8)
    parts = micro_batches(rollout, indices, size, "right", slots=slots)
    assert sum(len(m.batch.sequences.ids) for m in parts) == sum(
        len(sequences[i][0] + sequences[i][1]) - 1 for i in chosen
    )
    assert [slot for m in parts for slot in m.batch.rows.slots.tolist()[:-1]] == slots.tolist()[:-1]
    after = [m.batch.rows.slots.tolist()[0] for m in parts[1:]] + [8]
    assert [m.batch.rows.slots.tolist()[-1] for m in parts] == after[: len(parts)]
    assert [t for m in parts for t in m.batch.targets.tolist()] == [t for i in chosen for t in sequences[i][1]]
    assert len(parts) == (-(-len(chosen) // size) if size else bool(chosen))
