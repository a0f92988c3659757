"""Checks of the files of a model folder before transformers reads them and fills gaps with defaults."""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ppo_repro.base.errors import UserError
from ppo_repro.base.output import shown

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER, GENERATION = "adapter_config.json", "generation_config.json"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_SMALL = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
_TEXTS = (".json", ".txt", ".model", ".jinja")
_OBJECTS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
MAX_BYTES, MAX_BYTES_OF_TOKENIZERS = 1 << 24, 1 << 28  # of a file that is read whole
MAX_LEFT_OUT = 4  # times as many weights as the files have: a head and an embedding may be missing in a small model
_TEMPLATES = "additional_chat_templates"
_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
_DTYPES = {"F32", "F16", "BF16"}
# masks and frequencies, which older versions of transformers saved and newer ones compute
NOT_WEIGHTS = re.compile(r"\.(attn|attention)\.(masked_)?bias$|\.rotary_emb\.inv_freq$|(^|\.)position_ids$")


def check_folder(folder: Path, where: str) -> None:
    """Raise UserError, beginning with `where`, unless config.json may describe a model in plain floating point.

    Every number in it that is a size must be in its range, and every file of the folder must be readable.
    """
    if (folder / ADAPTER).is_file():
        raise UserError(f"{where}: has {ADAPTER}: an adapter; merge it into its base model and save that")
    if not folder.is_dir():
        raise UserError(f"{where}: there is no such folder{_how_to_get(folder)}")
    _check_files(folder, where)
    if not (folder / "config.json").is_file():
        raise UserError(f"{where}: must be a transformers model folder; there is no config.json in it")
    config = _read_object(folder / "config.json", where)
    for name in ("quantization_config", "compression_config"):
        if config.get(name) is not None:
            raise UserError(f"{where}: config.json has {name}; save the model in float32, float16 or bfloat16")
    _refuse_code(config, "config.json", where)
    from ppo_repro.numerics.ranges import check_ranges  # imports torch: mistakes before come at once

    check_ranges(config, f"{where}: config.json has")


def _check_files(folder: Path, where: str) -> None:
    """Raise UserError for texts that are too large, and for special files, which might never end."""
    try:
        paths = sorted([*folder.iterdir(), *(folder / _TEMPLATES).glob("*")])
    except OSError as error:
        raise UserError(f"{where}: the folder cannot be read ({error.strerror}); make it readable") from error
    for path in paths:
        if not path.exists():  # a link to nothing
            continue
        mode, size = path.stat().st_mode, path.stat().st_size
        if kind := _KINDS.get(stat.S_IFMT(mode)):
            raise UserError(f"{where}: {path.name} is {kind}; must be a regular file, remove it or restore it")
        most = MAX_BYTES if path.name in _SMALL or path.suffix == ".jinja" else MAX_BYTES_OF_TOKENIZERS
        if stat.S_ISREG(mode) and path.suffix in _TEXTS and size > most:
            raise UserError(f"{where}: {path.name} has {size} bytes; must be at most {most}, restore it")


def _how_to_get(folder: Path) -> str:
    """Return a hint for a folder that does not exist. A path of two names may be a model of the Hub."""
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


def check_tokenizer(folder: Path, vocab_size: int, where: str) -> None:
    """Raise UserError, beginning with `where`, if a tokenizer is missing, is not JSON or needs code from the folder.

    It is also raised for a token outside the model's vocabulary, because a tokenizer lists all ids up to the largest.
    """
    for name in _OBJECTS:
        if (folder / name).exists():
            content = _read_object(folder / name, where)
            if name == "tokenizer_config.json":
                _refuse_code(content, name, where)
            model = content.get("model")
            if name == "tokenizer.json" and isinstance(model, dict) and isinstance(model.get("vocab"), dict):
                check_tokens(model["vocab"], vocab_size, where)
    if not has_tokenizer(folder):
        raise UserError(f"{where}: has no tokenizer ({', '.join(_TOKENIZERS)}); save the model's own beside it")


def check_tokens(ids: Mapping[str, object], vocab_size: int, where: str) -> None:
    """Raise UserError, beginning with `where`, for the first token whose id is outside the model's vocabulary."""
    for token, i in ids.items():
        if type(i) is not int or not 0 <= i < vocab_size:
            raise UserError(
                f"{where}: its tokenizer has the token {shown(repr(token))} = {shown(repr(i))}, and the model a "
                f"vocabulary of {vocab_size}; save the model's own tokenizer beside it"
            )


def check_weights(folder: Path, where: str) -> int:
    """Return the number of weights in a folder.

    Raises UserError, beginning with `where`, if weights are missing, damaged or not supported.
    """
    if (folder / GENERATION).exists():
        _read_object(folder / GENERATION, where)
    if (folder / WEIGHTS).is_file():
        return _check_kinds(folder / WEIGHTS, where)
    if (folder / INDEX).is_file():
        return _check_index(folder, where)
    if any(folder.glob("*.bin")):
        raise UserError(
            f"{where}: has pickled weights only (*.bin), which could run code and are never opened; convert them: load "
            f"the model with transformers and save_pretrained it, which writes {WEIGHTS}"
        )
    raise UserError(f"{where}: has neither {WEIGHTS} nor {INDEX}; save the model again")


def check_size(expected: int, actual: int, where: str) -> None:
    """Raise UserError, beginning with `where`, if a model has many more weights than its files.

    The check comes before the memory for the weights is allocated.
    """
    if expected > MAX_LEFT_OUT * actual:
        raise UserError(f"{where}: its config.json wants {expected} weights, and its files have {actual}; restore it")


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


def _check_index(folder: Path, where: str) -> int:
    content = _read_object(folder / INDEX, where)
    places = content.get("weight_map")
    named = isinstance(places, dict) and places and all(isinstance(name, str) for name in places.values())
    if not isinstance(places, dict) or not named or not isinstance(content.get("metadata"), dict):
        raise UserError(f"{where}: {INDEX} has no metadata and weight_map from tensors to files; save the model again")
    count = 0
    for name in sorted(set(places.values())):
        if Path(name).name != name:  # a link is fine: the hub's cache is made of them
            raise UserError(
                f"{where}: {INDEX} names the file {name!r}; must be one of this folder, save the model again"
            )
        if not (folder / name).is_file():
            raise UserError(f"{where}: {INDEX} names {name}, which is not in the folder; restore it")
        count += _check_kinds(folder / name, where)
    return count


def _check_kinds(path: Path, where: str) -> int:
    """Return the number of weights in a file. Raises UserError unless each tensor's format loads exactly."""
    try:
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            kinds = {name: tensor.get_dtype() for name, tensor in slices.items()}
            count = sum(math.prod(tensor.get_shape()) for tensor in slices.values())
    except (OSError, SafetensorError) as error:
        raise UserError(f"{where}: {path.name} cannot be read ({_short(error)}); restore it") from error
    for name, kind in sorted(kinds.items()):
        if kind not in _DTYPES and not NOT_WEIGHTS.search(name):
            raise UserError(f"{where}: tensor {name} is {kind}; must be F32, F16 or BF16, save the model in float32")
    return count


def _short(value: object) -> str:
    """Return a text on one line, cut to the length of a line."""
    return " ".join(str(value).split())[:80] if isinstance(value, Exception) else repr(value)[:80]
