"""Change constants that the code of a model contains or computes from sizes, for example the scale of attention."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from functools import partial

from transformers import PreTrainedModel

from ppo_repro.testing.audit.causes.architecture.copies import by_kind, copied
from ppo_repro.testing.audit.causes.architecture.option import Option, short

_NO_CONSTANT = re.compile("eps|dropout|^p$|norm_type|embed_scale|aux_loss|attention_scaling|jitter")


def of_constants(model: PreTrainedModel) -> Iterator[Option]:
    """Yield changes of each number of a module that is no field of the configuration."""
    fields = set(model.config.get_text_config().to_dict())
    numbers = [
        f"{name}.{key}"
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, float) and key not in fields and not _NO_CONSTANT.search(key)
    ]
    for kind, names in by_kind(numbers).items():
        first, _, key = names[0].rpartition(".")
        old = short(getattr(model.get_submodule(first), key))
        for value in (1.0, math.inf):
            yield Option(
                f"{kind} {value} instead of {old}",
                f"compute with {kind} {old} on both sides",
                partial(_with_number, model, names, value),
            )


def _with_number(model: PreTrainedModel, names: Sequence[str], value: float) -> PreTrainedModel:
    found = copied(model)
    for name in names:
        module, _, key = name.rpartition(".")
        setattr(found.get_submodule(module), key, value)
    return found
