"""Change the embedding's factor and the output matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.testing.audit.causes.architecture.bfloat16 import in_bfloat16, rounded, with_narrow_products
from ppo_repro.testing.audit.causes.architecture.copies import copied
from ppo_repro.testing.audit.causes.architecture.option import Option

FACTOR = "multiply embeddings by the same factor on both sides"


def of_embeddings(model: PreTrainedModel) -> Iterator[Option]:
    """Yield changes of the embedding and of the output matrix."""
    tied = partial(_with_tied_output, model)
    yield Option("the embedding as output matrix", "use the output matrix of the folder on both sides", tied)
    yield Option("embeddings without their factor", FACTOR, partial(_with_factor, model, torch.ones_like))
    words = "embeddings with their factor rounded to bfloat16"
    yield Option(words, FACTOR, partial(_with_factor, model, rounded))
    heads = [name for name, module in model.named_modules() if module is model.get_output_embeddings()]
    if heads:
        yield in_bfloat16("output matrix", partial(with_narrow_products, model, heads))


def _with_tied_output(model: PreTrainedModel) -> PreTrainedModel:
    found: Any = copied(model)
    found.get_output_embeddings().weight = found.get_input_embeddings().weight
    return found


def _with_factor(model: PreTrainedModel, change: Callable[[Tensor], Tensor]) -> PreTrainedModel:
    found: Any = copied(model)
    embeddings = found.get_input_embeddings()
    embeddings.embed_scale = change(embeddings.embed_scale)
    embeddings._non_persistent_buffers_set.discard("embed_scale")  # not to be computed again
    return found
