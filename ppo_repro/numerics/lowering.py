"""Check a transformers model, and mark it for deterministic numerics with its settings.

The model stays as transformers made it. Its trunk gets an attribute `_lowered`, which a copied or saved model keeps.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel

from ppo_repro.base.errors import UserError
from ppo_repro.base.mode import Precision
from ppo_repro.base.output import type_and_message
from ppo_repro.numerics.description import check_config
from ppo_repro.numerics.families import NAMES, TRUNKS, trunk_of
from ppo_repro.numerics.rounding import EXACT, NumberFormats

# attributes that may differ from the config: switches of training, and copies that transformers never reads again
_SWITCHES = ("training", "gradient_checkpointing", "max_seq_len_cached", "vocab_size")


@dataclass(frozen=True)
class Lowered:
    """Settings of a trunk in deterministic numerics."""

    max_context: int  # positions of a sequence
    rounding: NumberFormats = EXACT
    precision: Precision = "highest"
    recompute: bool = False  # keep only inputs of layers; the backward pass computes the rest again
    moves_weights: bool = True  # put the weights of one matrix together in memory; False: copy weights that lie apart


def lower(model: PreTrainedModel, lowered: Lowered) -> PreTrainedModel:
    """Let a float32 model compute in deterministic numerics, in place, and return it.

    Raises UserError for the first module, setting or type that is not supported.
    """
    trunk = trunk_of(model)
    if type(trunk) not in TRUNKS:
        raise UserError(f"model {type(model).__name__}: deterministic numerics do not know it; choose a {NAMES} model")
    check_config(model.config, lowered.max_context)
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            raise UserError(f"model parameter '{name}' is {parameter.dtype}; deterministic numerics need float32")
    check_parts(model)
    trunk._lowered = lowered  # type: ignore[assignment]
    return model


def lowered_of(model: nn.Module) -> Lowered | None:
    """Return the settings of a model in deterministic numerics; None for a model in native numerics."""
    lowered = getattr(trunk_of(model) if isinstance(model, PreTrainedModel) else model, "_lowered", None)
    return lowered if isinstance(lowered, Lowered) else None


def set_recompute(model: PreTrainedModel, recompute: bool) -> None:
    """Change `Lowered.recompute` of a deterministic model."""
    lowered = replace(cast(Lowered, lowered_of(model)), recompute=recompute)
    trunk_of(model)._lowered = lowered  # type: ignore[assignment]


def is_deterministic(model: nn.Module) -> bool:
    """Return whether a model computes in deterministic numerics."""
    return lowered_of(model) is not None


def check_parts(model: PreTrainedModel) -> None:
    """Raise UserError for the first module or parameter that differs from the model's config in class or shape."""
    config = copy.deepcopy(model.config)
    # many loops set the config's padding token to the tokenizer's after loading; the embedding keeps its own
    config.pad_token_id = getattr(model.get_input_embeddings(), "padding_idx", None)
    try:
        with torch.device("meta"):
            stock = type(model)(config)
    except Exception as error:  # a wrong value of the config can raise any exception
        reason = type_and_message(error)
        raise UserError(f"model config: transformers makes no model of it ({reason}); mend it") from error
    modules = dict(stock.named_modules())
    for name, module in model.named_modules():
        if type(module) is not type(modules.get(name)):
            raise UserError(
                f"model module '{name}' of class {type(module).__name__}: deterministic numerics do not know it"
            )
    actual, expected = (
        {name: list(p.shape) for name, p in m.named_parameters(remove_duplicate=False)} for m in (model, stock)
    )
    for name in sorted(actual.keys() | expected.keys()):
        shape, wanted = actual.get(name, "no such parameter"), expected.get(name, "no such parameter")
        if shape != wanted:
            raise UserError(
                f"model parameter '{name}' is {shape}, and its config wants {wanted}; make it again from its config"
            )
    require_numbers(model, numbers_of(stock))


Numbers = dict[str, dict[str, int | float]]  # by module and attribute


def numbers_of(model: nn.Module) -> Numbers:
    """Return the plain numbers that the modules in a model have as attributes, such as `eps`."""
    return {name: _plain(module) for name, module in model.named_modules() if module is not model}


def _plain(module: nn.Module) -> dict[str, int | float]:
    numbers = {n: x for n, x in vars(module).items() if isinstance(x, int | float) and not n.startswith("_")}
    return {name: value for name, value in numbers.items() if name not in _SWITCHES}


def require_numbers(model: nn.Module, expected: Numbers) -> None:
    """Raise UserError for the first number of a module that differs: the kernels compute with the model's config."""
    for module, numbers in numbers_of(model).items():
        for name in sorted(numbers.keys() | expected[module].keys()):
            if numbers.get(name) != expected[module].get(name):
                raise UserError(
                    f"model module '{module}' has {name} = {numbers.get(name)}; deterministic numerics compute with "
                    f"{expected[module].get(name)}, as its config says; set it back"
                )


def shapes_of(model: nn.Module) -> dict[str, torch.Size]:
    """Return the shape of each parameter by name."""
    return {name: p.shape for name, p in model.named_parameters()}
