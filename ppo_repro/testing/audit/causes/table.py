"""The table of all causes that one audit tries: a row for each, of models, of inputs, and of the stages after them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import Parameter
from transformers import PreTrainedModel

from ppo_repro.testing.audit.causes.after_logits import VARIANTS
from ppo_repro.testing.audit.causes.architecture.option import computed
from ppo_repro.testing.audit.causes.inputs import other_inputs
from ppo_repro.testing.audit.causes.variant import Variant
from ppo_repro.testing.audit.distributions import Processing
from ppo_repro.testing.audit.rounding import FORMATS
from ppo_repro.testing.audit.subject import StackSampling, Subject
from ppo_repro.testing.dumps import DumpedResponse


def table(
    subject: Subject, responses: Sequence[DumpedResponse], sampling: StackSampling, definition: Processing
) -> tuple[Variant, ...]:
    """Return the rows whose presumptions hold; `definition` maps logits to the distribution that is right."""
    makes = {name: partial(_in_half, subject.model, dtype, dtype) for name, dtype in FORMATS.items()}
    rounded = {name: partial(_in_half, subject.model, dtype, torch.float32) for name, dtype in FORMATS.items()}
    return (
        *(
            Variant(f"computed in {name}", "weights", "reduced_precision", make=make, rounding="computed", format=name)
            for name, make in makes.items()
            if computed(make) is not None
        ),
        *(
            Variant(
                f"weights rounded to {name}", "weights", "coarse_weights", make=make, rounding="weights", format=name
            )
            for name, make in rounded.items()
        ),
        *(
            Variant(words, "weights", "stale_weights", make=lambda model=model: model)  # type: ignore[misc]
            for words, model in subject.others.items()
        ),
        *(
            Variant(
                option.words,
                "weights",
                "other_architecture",
                make=option.make,
                rounding="part" if option.format else "",
                format=option.format,
                count=option.count,
                option_advice=option.advice,
            )
            for option in subject.options.values()
        ),
        *(
            Variant(words, "input", "other_prompt", passes=passes)
            for words, passes in other_inputs(responses, subject).items()
        ),
        *(row for row in VARIANTS if row.presumes(sampling) and row.change is not definition),
    )


def _in_half(model: PreTrainedModel, narrow: torch.dtype, last: torch.dtype) -> PreTrainedModel:
    """Return a copy with the parameters rounded to a format of 16 bits, in the dtype `last`."""
    # parameters only: from_pretrained leaves rotary frequencies in float32
    memo: dict[int, Any] = {id(p): Parameter(p.detach().to(narrow).to(last), False) for p in model.parameters()}
    return copy.deepcopy(model, memo)
