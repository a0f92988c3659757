"""The files of a model folder, checked before transformers reads them, which fills gaps with defaults."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ppo_repro.base.errors import UserError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER, GENERATION = "adapter_config.json", "generation_config.json"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_OBJECTS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_DTYPES = {"F32", "F16", "BF16"}
# masks and frequencies that older versions saved; they are computed today
_NOT_WEIGHTS = re.compile(r"\.(attn|attention)\.(masked_)?bias$|\.rotary_emb\.inv_freq$|(^|\.)position_ids$")


def check_config(folder: Path, where: str) -> None:
    """Raise UserError, beginning with `where`, unless config.json may describe a model in plain floating point."""
    if (folder / ADAPTER).is_file():
        raise UserError(f"{where}: has {ADAPTER}: an adapter; merge it into its base model and save that")
    if not folder.is_dir():
        raise UserError(f"{where}: there is no such folder{_how_to_get(folder)}")
    if not (folder / "config.json").is_file():
        raise UserError(f"{where}: must be a transformers model folder; there is no config.json in it")
    config = _read_object(folder / "config.json", where)
    for name in ("quantization_config", "compression_config"):
        if config.get(name) is not None:
            raise UserError(f"{where}: config.json has {name}; save the model in float32, float16 or bfloat16")
    _refuse_code(config, "config.json", where)


def _how_to_get(folder: Path) -> str:
    """What to do about a folder that is not there: a path of two names is what the Hub calls a model."""
    named = folder.relative_to(Path.cwd()).parts if folder.is_relative_to(Path.cwd()) else folder.parts
    if len(named) != 2 or folder.parent.is_dir():
        return "; give the folder of a model on this machine"
    owner, name = named
    return (
        f"; where {owner}/{name} is a model of the Hub, download it first: "
        f"`hf download {owner}/{name} --local-dir models/{name}`, then give models/{name}"
    )


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _TOKENIZERS)


def check_tokenizer(folder: Path, where: str) -> None:
    """Raise UserError, beginning with `where`, for a tokenizer that is missing, is no JSON or wants code."""
    for name in _OBJECTS:
        if (folder / name).exists():
            content = _read_object(folder / name, where)
            if name == "tokenizer_config.json":
                _refuse_code(content, name, where)
    if not has_tokenizer(folder):
        raise UserError(f"{where}: has no tokenizer ({', '.join(_TOKENIZERS)}); save the model's own beside it")


def check_weights(folder: Path, where: str) -> None:
    """Raise UserError, beginning with `where`, for weights that are missing, damaged or not supported."""
    if (folder / GENERATION).exists():
        _read_object(folder / GENERATION, where)
    if (folder / WEIGHTS).is_file():
        _check_kinds(folder / WEIGHTS, where)
    elif (folder / INDEX).is_file():
        _check_index(folder, where)
    elif any(folder.glob("*.bin")):
        raise UserError(
            f"{where}: has pickled weights only (*.bin), which could run code and are never opened; convert them: load "
            f"the model with transformers and save_pretrained it, which writes {WEIGHTS}"
        )
    else:
        raise UserError(f"{where}: has neither {WEIGHTS} nor {INDEX}; save the model again")


def _read_object(path: Path, where: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{where}: {path.name} cannot be read as JSON ({_short(error)}); restore it") from error
    if not isinstance(content, dict):
        raise UserError(f"{where}: {path.name} holds {_short(content)}; must be a JSON object, restore it")
    return content


def _refuse_code(content: dict[str, Any], name: str, where: str) -> None:
    if content.get("auto_map"):
        raise UserError(f"{where}: {name} has auto_map; code of a model folder is never run, take a model without")


def _check_index(folder: Path, where: str) -> None:
    content = _read_object(folder / INDEX, where)
    places = content.get("weight_map")
    named = isinstance(places, dict) and places and all(isinstance(name, str) for name in places.values())
    if not isinstance(places, dict) or not named or not isinstance(content.get("metadata"), dict):
        raise UserError(f"{where}: {INDEX} has no metadata and weight_map from tensors to files; save the model again")
    for name in sorted(set(places.values())):
        if Path(name).name != name:  # a link is fine: the hub's cache is made of them
            raise UserError(
                f"{where}: {INDEX} names the file {name!r}; must be one of this folder, save the model again"
            )
        if not (folder / name).is_file():
            raise UserError(f"{where}: {INDEX} names {name}, which is not in the folder; restore it")
        _check_kinds(folder / name, where)


def _check_kinds(path: Path, where: str) -> None:
    """Raise UserError unless each tensor of a file is in a format that loads exactly, as its header says."""
    try:
        with safe_open(path, framework="numpy") as file:
            kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"{where}: {path.name} cannot be read ({_short(error)}); restore it") from error
    for name, kind in sorted(kinds.items()):
        if kind not in _DTYPES and not _NOT_WEIGHTS.search(name):
            raise UserError(f"{where}: tensor {name} is {kind}; must be F32, F16 or BF16, save the model in float32")


def _short(value: object) -> str:
    """On one line, and not longer than a line."""
    return " ".join(str(value).split())[:80] if isinstance(value, Exception) else repr(value)[:80]
