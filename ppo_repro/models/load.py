"""Reading a transformers model folder, without code from the folder and without the network."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ppo_repro.disk.folder import check_sums
from ppo_repro.errors import UserError
from ppo_repro.numerics.layers.families import CAUSAL_MODELS


def load_folder(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model in float32 and tokenizer of a folder; UserError says what is missing or not supported."""
    if not (path / "config.json").is_file():
        raise UserError(f"model.path = {path}: must be a transformers model folder; there is no config.json in it")
    check_sums(path)
    known = ", ".join(c.__name__ for c in CAUSAL_MODELS)
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        architectures = config.architectures or ["unknown"]
        if architectures[0] not in {c.__name__ for c in CAUSAL_MODELS}:
            raise UserError(f"model.path = {path}: architecture {architectures[0]}; must be one of {known}")
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
        if type(model) not in CAUSAL_MODELS:  # model_type and architectures of the folder disagree
            raise UserError(f"model.path = {path}: loads as {type(model).__name__}; must be one of {known}")
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UserError(f"model.path = {path}: cannot be loaded ({' '.join(str(error).split())[:200]})") from error
    for name in ("is_local", "local_files_only"):  # how it was read would be saved with it
        tokenizer.init_kwargs.pop(name, None)
    return model.eval(), tokenizer


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that end a response: those of the tokenizer and of the generation config."""
    declared = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = set(declared if isinstance(declared, list) else [declared]) | {tokenizer.eos_token_id}
    found = frozenset(int(i) for i in ids if i is not None)
    if not found:
        raise UserError("the model has no end token: set eos_token_id in its tokenizer or generation config")
    return found


def input_files(path: Path) -> list[Path]:
    """The files of a model folder that decide what is loaded; none of no folder, which loading then refuses."""
    if not path.is_dir():
        return []
    return sorted(p for p in path.iterdir() if p.suffix in {".json", ".safetensors", ".jinja", ".model", ".txt"})
