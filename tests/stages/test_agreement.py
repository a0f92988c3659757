"""Which columns are compared, and what the error says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.stages.agreement import UnequalBits, require_same_bits, sampler_is_exact
from tests.support.runs import small_config


@given(st.data())
def test_the_first_token_in_the_order_of_the_records_is_named(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    total = sum(lengths)
    tokens = data.draw(st.permutations(range(total)))[: data.draw(st.integers(1, total))]
    flipped = data.draw(st.sets(st.integers(0, len(tokens) - 1), min_size=1))
    left = torch.randn(len(tokens), generator=torch.Generator().manual_seed(0))
    bits = left.clone().view(torch.int32)
    bits[list(flipped)] ^= 1
    # by the definition: where each token of the records lies
    positions = [(sequence, position) for sequence, length in enumerate(lengths) for position in range(length)]
    expected = sorted((positions[tokens[row]], float(left[row])) for row in flipped)
    columns = ("left", left), ("right", bits.view(torch.float32))
    with pytest.raises(UnequalBits) as stop:
        require_same_bits(0, torch.tensor(lengths), *columns, torch.tensor(tokens))
    found = stop.value.found
    rows = zip(found.sequence.tolist(), found.position.tolist(), found.left[1].tolist(), strict=True)
    assert [((sequence, position), value) for sequence, position, value in rows] == expected


SGLANG = "rollout.engine.kind=sglang"


@pytest.mark.parametrize(
    ("overrides", "promised"),
    [
        ((), True),
        ((SGLANG,), True),
        ((SGLANG, "rollout.engine.numerics=stock"), False),
        (("rollout.mismatch_sigma=0.1",), False),
        (("mismatch.sampler.lag=1",), False),
        (("mismatch.trainer.padding_leak=9",), False),
        (("mismatch.trainer.eos_in_loss=false",), True),
        (("numerics.mode=native",), False),
    ],
)
def test_where_the_sampler_is_measured_nothing_is_promised_of_it(overrides: tuple[str, ...], promised: bool) -> None:
    assert sampler_is_exact(small_config(*overrides)) is promised
