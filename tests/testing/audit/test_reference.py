"""Stock float32 computes whole responses: length may choose the rotary positions, and later tokens round more."""

from __future__ import annotations

import pytest
import torch

from ppo_repro.testing.audit import limits, reference
from ppo_repro.testing.audit.distributions import TEMPERED
from ppo_repro.testing.audit.reference import references_of
from ppo_repro.testing.audit.stack import StackSampling
from tests.support.models import qwen3_config, small_model
from tests.testing.audit.material import TEMPERATURE, first, material


@torch.no_grad()
@pytest.mark.parametrize(("tokens", "computed"), [(4, [9]), (25, [9]), (26, [9, 17]), (99, [9, 17, 12])])
def test_stock_float32_computes_the_first_responses_whole(
    monkeypatch: pytest.MonkeyPatch, tokens: int, computed: list[int]
) -> None:
    made = first(3, material(small_model(qwen3_config(), 4)))
    dump = made.dump(made.logprobs(), made.logprobs())
    monkeypatch.setattr(limits, "FLOOR_TOKENS", tokens)
    lengths, logprobs_by = list[int](), reference.logprobs_by

    def counted(model, responses, *args, **options):  # type: ignore[no-untyped-def]
        if not options.get("is_wide"):
            lengths.extend(len(r.response_ids) for r in responses)
        return logprobs_by(model, responses, *args, **options)

    monkeypatch.setattr(reference, "logprobs_by", counted)
    found = references_of(made.model, dump, StackSampling(TEMPERATURE), {})[TEMPERED]
    assert (lengths, found.measured) == (computed, len(computed))
    assert [len(values) for values in found.logprobs] == [9, 17, 12]
    assert 0 < found.floor < 1e-5
