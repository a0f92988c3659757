"""What of the `mismatch` section is refused, in one line, and what its absence leaves as it was."""

from __future__ import annotations

import pytest

from ppo_repro.config.files import dump_yaml
from ppo_repro.config.mismatch import MismatchConfig
from ppo_repro.errors import UserError
from tests.support.runs import small_config

ROUNDED, STOCK = "mismatch.sampler.precision.weights=bfloat16", "mismatch.sampler.stock=bfloat16"
SGLANG = ("rollout.engine={kind: sglang}",)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ("mismatch.sampler.precision.weights=bf16",),
            r"mismatch.sampler.precision.weights = 'bf16': .*; did you mean bfloat16\?",
        ),
        (("mismatch.sampler.precision.gradients=int8",), "mismatch.sampler.precision.gradients: unknown field; .*"),
        (("mismatch.sampler.precision.rest=int8",), "mismatch.sampler.precision.rest = 'int8': .*"),
        (
            ("mismatch.sampler.precision={weights: bfloat16, rest: bfloat16}",),
            "mismatch.sampler.precision: rest is for what weights or activations of 8 bits leave alone; remove it",
        ),
        ((ROUNDED, "numerics.mode=native"), "mismatch.sampler.precision needs numerics.mode = deterministic, whose .*"),
        ((ROUNDED, *SGLANG), "mismatch.sampler.precision needs rollout.engine.kind = torch; .*"),
        ((STOCK, *SGLANG), "mismatch.sampler.stock needs rollout.engine.kind = torch; .*"),
        ((STOCK, ROUNDED), "mismatch.sampler: stock rounds as torch does, so precision has no effect; .*"),
        (("mismatch.sampler.stock=int8",), "mismatch.sampler.stock = 'int8': .*"),
        (("mismatch.trainer.stock=float16",), "mismatch.trainer.stock: unknown field; .*"),
        (("mismatch.trainer.precision={}",), "mismatch.trainer.precision: unknown field; .*"),
        (
            ("mismatch.sampler.stock=float32", "numerics.mode=native"),
            "mismatch.sampler.stock = float32 needs numerics.mode = deterministic; native numerics sample by torch.*",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_field(overrides: tuple[str, ...], line: str) -> None:
    with pytest.raises(UserError, match=f"small.yaml: {line}$") as caught:
        small_config(*overrides)
    assert "\n" not in str(caught.value)


def test_what_sglang_and_native_numerics_can_do_is_not_refused() -> None:
    small_config(STOCK, "numerics.mode=native")


def test_a_configuration_without_a_cause_is_as_if_there_were_no_section() -> None:
    plain, text = small_config(), dump_yaml(small_config())
    assert "mismatch:" not in text and plain.mismatch == MismatchConfig()
    for same in ("mismatch={}", "mismatch.sampler={}"):
        assert small_config(same).digest() == plain.digest() and dump_yaml(small_config(same)) == text
    causes = {small_config(*cause).digest() for cause in ((), (ROUNDED,), (STOCK,))}
    assert len(causes) == 3 and plain.digest() in causes
