"""Each name that the audit recognises is a name of some family, and each family has the names that it had.

A part that transformers renames fails here; the audit would silently lose a cause.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from itertools import chain

import pytest
from transformers import PreTrainedModel

from ppo_repro.testing.audit.causes import names
from ppo_repro.testing.audit.causes.fields import WITHOUT, fields_read
from ppo_repro.testing.audit.causes.names import OTHER_FIELDS, OTHER_NUMBERS, Kind, KnownNames
from ppo_repro.testing.audit.ignored_options import ASKED
from tests.support.models import CONFIGS, MIXTURES, small_model
from tests.testing.audit.families import FAMILIES, built

ROTARY = {
    *("cohere", "cohere2", "deepseek_v3", "falcon", "gemma", "gemma2", "gemma3_text", "gpt_neox", "gpt_oss"),
    *("granite", "llama", "ministral", "mistral", "mixtral", "olmo2", "olmo3", "olmoe", "phi", "phi3", "qwen2"),
    *("qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm"),
}
EVERY = ROTARY | {"bloom", "gpt2", "opt", "xglm"}
EXPERTS = {"deepseek_v3", "gpt_oss", "mixtral", "olmoe", "qwen3_moe"}
GEMMAS = {"gemma2", "gemma3_text"}
# a family is a `model_type`
FAMILIES_OF = {
    "NORM": EVERY,
    "ROUTER": EXPERTS,
    "EXPERTS": EXPERTS,
    "SHARED_EXPERTS": {"deepseek_v3"},
    "BIAS": EVERY,
    "FREQUENCIES": ROTARY,
    "EMBED_SCALE": {"gemma"} | GEMMAS,
    "ROTATION": ROTARY,
    "REPETITION": ROTARY - {"falcon", "gpt_neox"},
    "EPSILON": EVERY - {"opt", "xglm"},
    "THETA": ROTARY,
    "SOFT_CAP": GEMMAS,
    "SCALE": {"cohere", "cohere2", "deepseek_v3", "gpt2", "granite", "xglm"} | GEMMAS,
    "WINDOW": {
        *("cohere2", "gpt_oss", "ministral", "mistral", "mixtral", "olmo3", "phi3", "qwen2", "qwen3_moe", "smollm3"),
        *GEMMAS,
    },
    "FACTOR": {"deepseek_v3", "gemma3_text", "gpt_neox", "gpt_oss", "llama", "phi", "phi3", "stablelm"},
    "ROPE_TYPE": ROTARY,
}
ROWS = {name: row for name, row in vars(names).items() if isinstance(row, KnownNames)}


def models() -> Iterator[PreTrainedModel]:
    """The tiny models of the project's families, and of the families that only the audit tries."""
    yield from (small_model(make(), 0) for make in (*CONFIGS.values(), *MIXTURES.values()))
    yield from map(built, FAMILIES)


def fields_of(model: PreTrainedModel) -> set[str]:
    return set(model.config.get_text_config().to_dict())


def rotary_entries(model: PreTrainedModel) -> set[str]:
    """The entries of the rotary parameters, also of those that are of one kind of layers."""
    rope = model.config.get_text_config().to_dict().get("rope_parameters") or {}
    return {*rope, *chain.from_iterable(entry for entry in rope.values() if isinstance(entry, dict))}


def names_of(model: PreTrainedModel) -> dict[Kind, set[str]]:
    modules = dict(model.named_modules())
    code = vars(sys.modules[type(model).__module__])
    return {
        # transformers keeps unknown fields: one that no code reads may have an old name
        "field": fields_read(model) & fields_of(model) | rotary_entries(model),
        "class": {type(module).__name__ for module in modules.values()},
        "module": set(modules),
        "tensor": {name for module in modules.values() for name in chain(module._parameters, module._buffers)},
        "number": {name for m in modules.values() for name, value in vars(m).items() if isinstance(value, float)},
        "function": {name for name, value in code.items() if callable(value)},
    }


@cache
def names_by_family() -> dict[str, dict[Kind, set[str]]]:
    """The names of all models of a family together."""
    found: dict[str, dict[Kind, set[str]]] = {}
    for model in models():
        family = found.setdefault(model.config.model_type, {})
        for kind, some in names_of(model).items():
            family.setdefault(kind, set()).update(some)
    return found


@pytest.mark.parametrize("row", [*ROWS.values(), *OTHER_NUMBERS], ids=lambda row: row.pattern)
def test_the_example_of_a_row_is_a_name_of_its_family(row: KnownNames) -> None:
    assert row.recognise(row.example)
    assert row.example in names_by_family()[row.family][row.kind]


def test_the_examples_of_other_fields_are_fields_of_their_families() -> None:
    by_family: dict[str, set[str]] = {}
    for model in models():
        by_family.setdefault(model.config.model_type, set()).update(fields_of(model))
    assert all(row.recognise(row.example) for row in OTHER_FIELDS)
    assert not [row.example for row in OTHER_FIELDS if row.example not in by_family[row.family]]


@pytest.mark.parametrize("name", ROWS)
def test_a_row_recognises_names_of_the_families_that_it_did(name: str) -> None:
    row, by_family = ROWS[name], names_by_family()
    found = {family for family, some in by_family.items() if any(map(row.recognise, some[row.kind]))}
    assert found == FAMILIES_OF[name]


def test_every_option_that_has_words_or_may_be_ignored_is_read_by_some_family() -> None:
    read = set().union(*(some["field"] for some in names_by_family().values()))
    assert {field.rpartition(".")[2] for field in WITHOUT} <= read
    assert set(ASKED) <= read
