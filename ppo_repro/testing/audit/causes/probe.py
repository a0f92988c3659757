"""Try whether a changed model computes: not every change fits the code of every family."""

from __future__ import annotations

from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from ppo_repro.base.errors import is_out_of_memory
from ppo_repro.testing.audit.causes.cause import MakeModel
from ppo_repro.testing.audit.stack import vocabulary

# how torch, transformers and Python refuse what cannot be computed: a change may reach code that never expects it.
# A mistake in the code of a cause is caught too; the tests see it, because each cause has a fault that it must name.
REFUSED = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError),
    StrictDataclassError,
)
PROBE = 4  # tokens that show whether a model computes


@torch.no_grad()
def probed(make: MakeModel) -> Tensor | None:
    """Return logits [1, PROBE, V] of some tokens; None if the model cannot be built or its forward fails."""
    try:
        made: Any = make()
        ids = torch.arange(PROBE, device=made.device)[None] % vocabulary(made)
        logits: Tensor = made(ids, use_cache=False).logits
    except REFUSED as error:
        if is_out_of_memory(error):
            raise
        return None
    return logits


def is_finite(make: MakeModel) -> bool:
    """Return whether a model can be built and gives finite logits."""
    logits = probed(make)
    return logits is not None and bool(logits.isfinite().all())
