"""Rows of a forward pass: every response token is predicted from exactly the tokens before it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.models.batches import lay_out

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
