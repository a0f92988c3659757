"""Read a transformers model folder, without code from the folder and without the network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.activations import ACT2FN

from ppo_repro.base.errors import UserError
from ppo_repro.base.files import check_sums
from ppo_repro.base.output import shown
from ppo_repro.models.folder_files import (
    GENERATION,
    check_folder,
    check_size,
    check_tokenizer,
    check_tokens,
    check_weights,
)
from ppo_repro.models.reading import reading
from ppo_repro.numerics.description import activation_of, plain
from ppo_repro.numerics.families import CAUSAL_MODELS, trunk_of
from ppo_repro.numerics.lowering import Lowered
from ppo_repro.numerics.packed_model import PackedModel
from ppo_repro.numerics.ranges import check_ranges
from ppo_repro.tasks.tokenizer import special_tokens

_EXACT_IN_FLOAT32 = (torch.float32, torch.float16, torch.bfloat16)
_EVERY_KIND = "a 7\n\u00e9\u4e2d\U0001f600"  # one character of each kind that a tokenizer may treat in its own way
AutoClass = type[AutoModelForCausalLM] | type[AutoModelForSequenceClassification]


def load_folder(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the causal model in float32 and the tokenizer of a folder. Raises UserError if one of them is unusable."""
    return load_as(path, AutoModelForCausalLM, CAUSAL_MODELS, f"model.path = {path}")


def load_as(
    folder: Path, auto_class: AutoClass, classes: Sequence[type[PreTrainedModel]], where: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the float32 model and the tokenizer of a folder.

    Weights saved in bfloat16 or float16 are float32 numbers too, so they load without rounding.

    Args:
        classes: the allowed classes of the model.
        where: begins every error.

    Raises:
        UserError: the folder is damaged or inconsistent, or has another model.
    """
    config, expected = _read_config(folder, classes, where)
    check_sums(folder)
    count = check_weights(folder, where)
    check_size(expected, count, where)
    tokenizer = _load_tokenizer(folder, config.vocab_size, where)
    with reading(where):  # transformers stays silent, because its warnings are errors here, see `_check_tensors`
        loaded: Any = auto_class.from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # the report names them
        )
    model, report = loaded
    if type(model) not in classes:  # model_type and architectures of the folder disagree
        raise UserError(f"{where}: loads as {type(model).__name__}; must be one of {_names(classes)}")
    _check_tensors(model, report, where)
    generation = getattr(model, "generation_config", None)
    try:
        if generation is not None:
            generation.validate(strict=True)
    except ValueError as error:
        raise UserError(
            f"{where}: {GENERATION} could not be saved with the trained weights ({shown(str(error))}); correct it: set "
            "do_sample = true, or remove temperature, top_p and top_k"
        ) from error
    return model.eval(), tokenizer


def _check_tensors(model: PreTrainedModel, report: dict[str, Any], where: str) -> None:
    """Raise UserError unless every weight came from the folder, complete and finite, and no tensor is left over."""
    for name in sorted(report["missing_keys"]):  # transformers fills them with random numbers
        raise UserError(f"{where}: has no tensor {name}; save the model again")
    for name, saved, expected in sorted(report["mismatched_keys"]):
        raise UserError(
            f"{where}: tensor {name} has the shape {list(saved)}; its config.json wants {list(expected)}, restore it"
        )
    for name in sorted(report["unexpected_keys"]):
        raise UserError(f"{where}: has a tensor {name}, which a model of its config.json does not have; restore it")
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    # if the files have a head that differs from the embedding, transformers unties the two
    if head is not None and model.config.tie_word_embeddings and head.weight is not embedding.weight:
        raise UserError(f"{where}: has a head of its own, and tie_word_embeddings in its config.json; set it to false")
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise UserError(f"{where}: tensor {name} has numbers that are not finite; restore it")


def _load_tokenizer(folder: Path, vocab_size: int, where: str) -> PreTrainedTokenizerBase:
    check_tokenizer(folder, vocab_size, where)
    with reading(f"{where}: its tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        tokenizer.decode(tokenizer(_EVERY_KIND)["input_ids"])  # a part that is missing shows when it is needed
        special_tokens(tokenizer)
        # some tokenizers add tokens that their models lack; a prompt with such a token is refused when it is read
        added = tokenizer.get_added_vocab()
        ids = {token: i for token, i in tokenizer.get_vocab().items() if token not in added}
    if not ids:
        raise UserError(f"{where}: its tokenizer has no token; save the model's own beside it")
    check_tokens(ids, vocab_size, where)
    for name in ("is_local", "local_files_only"):  # otherwise saved with the tokenizer
        tokenizer.init_kwargs.pop(name, None)
    return tokenizer


def read_model_config(folder: Path, classes: Sequence[type[PreTrainedModel]], where: str) -> PretrainedConfig:
    """Return the configuration of a model folder. Only config.json is needed. Raises the UserErrors of `load_as`."""
    return _read_config(folder, classes, where)[0]


def _read_config(folder: Path, classes: Sequence[type[PreTrainedModel]], where: str) -> tuple[PretrainedConfig, int]:
    """Return the configuration of a model folder, and the number of its model's weights."""
    check_folder(folder, where)
    with reading(where):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    architectures = config.architectures or ["unknown"]
    architecture = str(architectures[0] if isinstance(architectures, list) else architectures)
    kind = next((c for c in classes if c.__name__ == architecture), None)
    if kind is None:
        raise UserError(f"{where}: architecture {shown(architecture)}; must be one of {_names(classes)}")
    if kind.config_class is not type(config):
        raise UserError(
            f"{where}: model_type = {shown(str(config.model_type))} and architecture {architecture} in its config.json "
            "are two families; restore it"
        )
    if config.dtype == torch.float64:
        raise UserError(f"{where}: dtype = float64 in its config.json would be rounded; save the model in float32")
    if config.dtype not in (None, *_EXACT_IN_FLOAT32):
        raise UserError(f"{where}: dtype = {config.dtype} in its config.json; must be float32, float16 or bfloat16")
    field, activation = activation_of(config)
    if not isinstance(activation, str) or activation not in ACT2FN:
        raise UserError(f"{where}: {field} = {shown(repr(activation))} is not known to transformers")
    return config, _count(config, kind, where)


def _count(config: PretrainedConfig, kind: type[PreTrainedModel], where: str) -> int:
    """Return the number of a model's weights without allocating them.

    Raises UserError if no model can be made, or its sizes are beyond our kernels and stock torch.
    """
    try:
        check_ranges(vars(config), "model config")
        with reading("model config"), torch.device("meta"):
            model = kind(plain(config))
        with reading("model config"):
            PackedModel(trunk_of(model), Lowered(1))
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    return sum(p.numel() for p in model.parameters())


def _names(classes: Sequence[type[PreTrainedModel]]) -> str:
    return ", ".join(c.__name__ for c in classes)


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens that end a response: the end tokens of the tokenizer and of the generation config.

    Raises UserError if there are none.
    """
    declared = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = [*(declared if isinstance(declared, list) else [declared]), tokenizer.eos_token_id]
    for i in ids:
        if i is not None and not (type(i) is int and 0 <= i < model.config.vocab_size):
            raise UserError(f"the model's eos_token_id = {i!r}: must be from 0 to {model.config.vocab_size - 1}")
    end_tokens = frozenset(i for i in ids if i is not None)
    if not end_tokens:
        raise UserError("the model has no end token: set eos_token_id in its tokenizer or generation config")
    return end_tokens
