"""Rows of a forward pass: every response token is predicted from exactly the tokens before it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.buffers import Prompts, Rollout
from ppo_repro.models.batches import TokenBatch, input_tokens, lay_out, micro_batches
from ppo_repro.numerics.layers.attention import reach

PADDINGS = pytest.mark.parametrize("padding", ["right", "left", "none"])
tokens = st.lists(st.integers(1, 99), min_size=1, max_size=6)
pairs = st.lists(st.tuples(tokens, tokens), min_size=1, max_size=6)


def laid_out(batch: list[tuple[list[int], list[int]]], padding: str) -> TokenBatch:
    return lay_out([p for p, _ in batch], [r for _, r in batch], padding)


def seen_from(batch: TokenBatch, row: int, position: int) -> list[int]:
    return [j for j, visible in enumerate(reach(batch.first_key, None)[row, 0, position].tolist()) if visible]


def test_right_padding_by_hand() -> None:
    batch = laid_out([([5, 6], [7, 8]), ([9], [4])], "right")
    assert batch.input_ids.tolist() == [[5, 6, 7], [9, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2], [0, 0, 0]]
    assert reach(batch.first_key, None).int().tolist() == [
        [[[1, 0, 0], [1, 1, 0], [1, 1, 1]]],
        [[[1, 0, 0], [0, 1, 0], [0, 0, 1]]],
    ]
    assert batch.predictors.tolist() == [1, 2, 3] and batch.targets.tolist() == [7, 8, 4]
    assert batch.real_tokens == 4


@PADDINGS
def test_forced_tokens_are_inputs_and_not_targets(padding: str) -> None:
    prompts, responses = [[1, 2], [9]], [[3, 4, 5, 6], [7, 8]]
    forced = [[False, True, True, False], [False, False]]
    batch, free = lay_out(prompts, responses, padding, forced), lay_out(prompts, responses, padding)
    assert torch.equal(batch.input_ids, free.input_ids) and batch.real_tokens == free.real_tokens == 7
    # the 6 is predicted from the forced 5 before it
    assert batch.targets.tolist() == [3, 6, 7, 8]
    assert batch.predictors.tolist() == free.predictors[torch.tensor([0, 3, 4, 5])].tolist()
    assert batch.input_ids.flatten()[batch.predictors].tolist() == [2, 5, 9, 7]


def test_left_padding_by_hand() -> None:
    batch = laid_out([([5, 6], [7, 8]), ([9], [4])], "left")
    assert batch.input_ids.tolist() == [[5, 6, 7], [0, 0, 9]]
    assert batch.position_ids.tolist() == [[0, 1, 2], [0, 0, 0]]
    assert batch.predictors.tolist() == [1, 2, 5] and batch.targets.tolist() == [7, 8, 4]


def test_packing_by_hand() -> None:
    batch = laid_out([([5, 6], [7, 8]), ([9], [4])], "none")
    assert batch.input_ids.tolist() == [[5, 6, 7, 9]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0]]
    assert reach(batch.first_key, None).int().tolist() == [[[[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 1]]]]
    assert batch.predictors.tolist() == [1, 2, 3] and batch.targets.tolist() == [7, 8, 4]


@PADDINGS
@given(sequences=pairs)
def test_each_response_token_has_one_predictor_that_sees_what_came_before(
    padding: str, sequences: list[tuple[list[int], list[int]]]
) -> None:
    batch = laid_out(sequences, padding)
    width = batch.input_ids.shape[1]
    predictors = batch.predictors.tolist()
    assert len(set(predictors)) == len(predictors)
    assert batch.targets.tolist() == [token for _, response in sequences for token in response]
    wanted = [[*prompt, *response[:k]] for prompt, response in sequences for k in range(len(response))]
    for flat, history in zip(predictors, wanted, strict=True):
        row, position = divmod(flat, width)
        seen = seen_from(batch, row, position)
        assert seen[-1] == position, "the predictor is the last token it sees"
        assert batch.input_ids[row, seen].tolist() == history
        assert batch.position_ids[row, seen].tolist() == list(range(len(history)))


@PADDINGS
@given(sequences=pairs)
def test_padding_sees_itself_alone_and_is_seen_by_nothing_else(
    padding: str, sequences: list[tuple[list[int], list[int]]]
) -> None:
    batch = laid_out(sequences, padding)
    rows, width = batch.input_ids.shape
    assert (rows, width) == (
        (1, sum(len(p) + len(r) - 1 for p, r in sequences))
        if padding == "none"
        else (len(sequences), max(len(p) + len(r) - 1 for p, r in sequences))
    )
    pads = (batch.input_ids == 0).nonzero().tolist()  # no token of these sequences is 0
    assert batch.input_ids.numel() - len(pads) == batch.real_tokens == sum(len(p) + len(r) - 1 for p, r in sequences)
    assert padding != "none" or not pads
    for row, position in pads:
        assert seen_from(batch, row, position) == [position]
        assert reach(batch.first_key, None)[row, 0, :, position].sum().item() == 1
    assert bool(reach(batch.first_key, None).any(-1).all()), "an empty row of the mask would make a softmax of nothing"


@given(sequences=pairs)
def test_a_sequence_looks_the_same_in_every_layout(sequences: list[tuple[list[int], list[int]]]) -> None:
    views = []
    for padding in ("right", "left", "none"):
        batch = laid_out(sequences, padding)
        ids, positions = batch.input_ids.flatten(), batch.position_ids.flatten()
        views.append((ids[batch.predictors].tolist(), positions[batch.predictors].tolist(), batch.targets.tolist()))
    assert views[0] == views[1] == views[2]


def rollout_of(sequences: list[tuple[list[int], list[int]]]) -> Rollout:
    count, ids = len(sequences), [token for _, response in sequences for token in response]
    words, numbers, nothing = ("",) * count, (0,) * count, torch.zeros(len(ids))
    return Rollout(
        prompts=Prompts(words, numbers, numbers, words, words, tuple(tuple(prompt) for prompt, _ in sequences)),
        response_ids=torch.tensor(ids),
        lengths=torch.tensor([len(response) for _, response in sequences]),
        rollout_logprobs=nothing,
        log_kept_mass=nothing,
        kept_tokens=torch.zeros(len(ids), 0, dtype=torch.uint8),
        top_ids=torch.zeros(len(ids), 0, dtype=torch.int32),
        top_logits=torch.zeros(len(ids), 0),
        finish_reasons=words,
        servers=words,
        latencies=(None,) * count,
        responses=words,
        spans=(),
    )


@PADDINGS
@given(sequences=pairs, size=st.integers(0, 7), data=st.data())
def test_micro_batches_hold_the_chosen_sequences_and_their_tokens_are_counted(
    padding: str, sequences: list[tuple[list[int], list[int]]], size: int, data: st.DataObject
) -> None:
    rollout = rollout_of(sequences)
    chosen = data.draw(st.lists(st.integers(0, len(sequences) - 1), unique=True))
    indices = torch.tensor(chosen, dtype=torch.int64)
    parts = micro_batches(rollout, indices, size, padding)
    assert sum(m.batch.real_tokens for m in parts) == input_tokens(rollout, indices)
    assert [t for m in parts for t in m.batch.targets.tolist()] == [t for i in chosen for t in sequences[i][1]]
    assert len(parts) == (-(-len(chosen) // size) if size else bool(chosen))
