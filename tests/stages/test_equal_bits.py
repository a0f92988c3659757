"""Where the log-probs of the sampler are promised to be those of the trainer."""

from __future__ import annotations

import pytest

from ppo_repro.stages.equal_bits import sampler_is_exact
from tests.support.runs import small_config

SGLANG = "rollout.engine.kind=sglang"


@pytest.mark.parametrize(
    ("overrides", "promised"),
    [
        ((), True),
        ((SGLANG,), True),
        ((SGLANG, "rollout.engine.numerics=stock"), False),
        (("rollout.mismatch_sigma=0.1",), False),
        (("mismatch.sampler.lag=1",), False),
        (("mismatch.sampler.token_bias=0.1",), False),
        (("mismatch.sampler.precision.weights=bfloat16",), False),
        (("mismatch.sampler.stock=float32",), False),
        (("mismatch.flip=token",), False),
        (("mismatch.flip=bit",), True),
        (("mismatch.trainer.padding_leak=9",), False),
        (("mismatch.trainer.eos_in_loss=false",), True),
        (("numerics.mode=native",), False),
    ],
)
def test_where_the_sampler_is_measured_nothing_is_promised_of_it(overrides: tuple[str, ...], promised: bool) -> None:
    assert sampler_is_exact(small_config(*overrides)) is promised
