"""Stock float32 computes the first response tokens alone, however they are spread over responses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ppo_repro.testing.audit import limits, reference
from ppo_repro.testing.audit.distributions import TEMPERED
from ppo_repro.testing.audit.reference import references_of
from ppo_repro.testing.audit.stack import StackSampling
from tests.support.models import qwen3_config, small_model
from tests.testing.audit.material import TEMPERATURE, first, material


@torch.no_grad()
@pytest.mark.parametrize(
    ("tokens", "is_in_turns", "computed", "whole"),
    [(4, False, [4], 0), (9, False, [9], 1), (20, False, [9, 11], 1), (99, False, [9, 17, 12], 3), (4, True, [6], 0)],
)
def test_stock_float32_computes_the_first_tokens_only(
    monkeypatch: pytest.MonkeyPatch, tokens: int, is_in_turns: bool, computed: list[int], whole: int
) -> None:
    made = first(3, material(small_model(qwen3_config(), 4)))
    dump = made.dump(made.logprobs(), made.logprobs())
    if is_in_turns:  # the second and third token do not count
        dump = [replace(r, counts=np.delete(np.insert(r.counts, 1, [False] * 2), slice(-2, None))) for r in dump]
    monkeypatch.setattr(limits, "FLOOR_TOKENS", tokens)
    lengths, logprobs_by = list[int](), reference.logprobs_by

    def counted(model, responses, *args, **options):  # type: ignore[no-untyped-def]
        if not options.get("is_wide"):
            lengths.extend(len(r.response_ids) for r in responses)
        return logprobs_by(model, responses, *args, **options)

    monkeypatch.setattr(reference, "logprobs_by", counted)
    found = references_of(made.model, dump, StackSampling(TEMPERATURE), {})[TEMPERED]
    assert (lengths, found.measured) == (computed, whole)
    assert [len(values) for values in found.logprobs] == [9, 17, 12]
    assert 0 < found.floor < 1e-5
