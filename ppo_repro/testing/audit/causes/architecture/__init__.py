"""Change one option of a model's architecture, because another stack may leave it out or compute it otherwise.

Nothing here knows a family: options are found in a model's configuration, its tensors and its code.
"""

from __future__ import annotations

from itertools import chain

from transformers import PreTrainedModel

from ppo_repro.testing.audit.causes.architecture.attention import of_attention
from ppo_repro.testing.audit.causes.architecture.constants import of_constants
from ppo_repro.testing.audit.causes.architecture.embeddings import of_embeddings
from ppo_repro.testing.audit.causes.architecture.experts import of_experts
from ppo_repro.testing.audit.causes.architecture.fields import of_fields
from ppo_repro.testing.audit.causes.architecture.norms import of_norms
from ppo_repro.testing.audit.causes.architecture.option import Option
from ppo_repro.testing.audit.causes.architecture.vectors import of_vectors

SOURCES = (of_fields, of_norms, of_vectors, of_constants, of_experts, of_embeddings, of_attention)


def all_options(model: PreTrainedModel) -> dict[str, Option]:
    """Return each change of the model that can be built and gives finite logits, by its description."""
    found: dict[str, Option] = {}
    for option in chain.from_iterable(source(model) for source in SOURCES):
        if option.words not in found and option.is_computed:
            found[option.words] = option
    return found
