"""Every cause that changes the model: numbers of 16 bits, other weights, options of the architecture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from transformers import PreTrainedModel

from ppo_repro.testing.audit.causes.cause import OtherModel, Rounded
from ppo_repro.testing.audit.causes.fields import of_fields
from ppo_repro.testing.audit.causes.modules import of_modules
from ppo_repro.testing.audit.causes.probe import is_finite, probed
from ppo_repro.testing.audit.measure import FORMATS
from ppo_repro.testing.audit.patches import with_parameters_in


def of_models(model: PreTrainedModel, others: Mapping[str, PreTrainedModel]) -> Iterator[OtherModel]:
    """Yield the causes that change the model; `others` are other weights, by description."""
    for name, dtype in FORMATS.items():
        make = partial(with_parameters_in, model, dtype, dtype)
        if probed(make) is not None:
            words = f"computed in {name}"
            yield OtherModel(words, "reduced_precision", make, rounded=Rounded("computed", name))
    for name, dtype in FORMATS.items():
        make = partial(with_parameters_in, model, dtype, torch.float32)
        words = f"weights rounded to {name}"
        yield OtherModel(words, "coarse_weights", make, rounded=Rounded("weights", name))
    for words, other in others.items():
        yield OtherModel(words, "stale_weights", partial(_itself, other))
    yield from of_fields(model)
    yield from (cause for cause in of_modules(model) if is_finite(cause.make))


def _itself(model: PreTrainedModel) -> PreTrainedModel:
    return model
