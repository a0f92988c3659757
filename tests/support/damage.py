"""Model folders with one thing in them damaged: configuration, tokenizer, generation settings, weights."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ppo_repro.base.errors import UserError
from ppo_repro.base.output import one_line

Damage = Callable[[Path], object]
SECONDS = 2.0  # of this process, for a refusal

DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]
JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 7, 10**6, 10**12, 10**30, 0.5, -2.5, float("inf"), float("nan"), "", "x", "12"),
    *([], [1], ["x"], [[]], {}, {"a": 1}, {"": []}, DEEP, "\ud800", "\x1b[31m", "x" * 10_000),
)


def computes(what: str, damage: Damage, folder: Path, use: Callable[[Path], object]) -> bool:
    """Damage a copy of a folder and use it: whether it computes. Any error but UserError in one line is a fault."""
    with TemporaryDirectory() as temporary:
        damaged = Path(shutil.copytree(folder, Path(temporary) / "model"))
        damage(damaged)
        try:
            use(damaged)
        except UserError as error:
            assert len(one_line(error)) < 1000, what
            return False
        except BaseException as error:
            raise AssertionError(f"{folder.name}: {what}") from error
        return True


def changed(name: str, path: tuple[str | int, ...], value: Any) -> Damage:
    """A JSON file with another value at a path; `...` takes it out."""

    def damage(folder: Path) -> None:
        tree = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        node = tree
        for key in path[:-1]:
            node = node[key]
        if value is ...:
            del node[path[-1]]
        else:
            node[path[-1]] = value
        (folder / name).write_text(json.dumps(tree))

    return damage


def places(tree: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The paths to all values of a JSON tree."""
    if at:
        yield at
    if isinstance(tree, dict | list):
        for key in tree if isinstance(tree, dict) else range(len(tree)):
            yield from places(tree[key], (*at, key))


def flipped(name: str, size: int, seed: int) -> Damage:
    """A file in which some of the first `size` bytes are others."""

    def damage(folder: Path) -> None:
        draw, content = random.Random(seed), bytearray((folder / name).read_bytes())
        for _ in range(draw.choice((1, 1, 2, 8))):
            content[draw.randrange(min(size, len(content)))] = draw.randrange(256)
        (folder / name).write_bytes(content)

    return damage


def cut(name: str, seed: int) -> Damage:
    return lambda folder: os.truncate(folder / name, random.Random(seed).randrange((folder / name).stat().st_size))


def device(name: str, make: Callable[[Path], object]) -> Damage:
    """What is no file, in the place of one."""

    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return damage


MORE = {  # fields that a folder may have and these have not
    "config.json": (
        *("sliding_window", "layer_types", "num_labels", "id2label", "auto_map", "quantization_config", "rope_scaling"),
        *("rope_theta", "clip_qkv", "pretraining_tp", "is_causal", "attn_implementation", "_attn_implementation"),
        *("torch_dtype", "dtype", "use_sliding_window", "max_window_layers", "mlp_only_layers", "decoder_sparse_step"),
        *("n_inner", "is_decoder", "tie_word_embeddings", "_experts_implementation", "num_experts_per_tok"),
    ),
    "generation_config.json": (
        "eos_token_id",
        "temperature",
        "do_sample",
        "max_length",
        "bad_words_ids",
        "cache_implementation",
    ),
    "tokenizer_config.json": (
        *("chat_template", "added_tokens_decoder", "tokenizer_class", "model_max_length", "additional_special_tokens"),
        *("eos_token", "pad_token", "unk_token", "bos_token", "extra_special_tokens", "padding_side", "auto_map"),
        *("clean_up_tokenization_spaces", "add_bos_token", "legacy", "model_input_names", "processor_class"),
    ),
    "special_tokens_map.json": ("eos_token", "unk_token", "additional_special_tokens"),
    "added_tokens.json": ("<more>", "<eos>"),
}
JSON_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", *list(MORE)[3:])


def drawn(folder: Path, seed: int) -> tuple[str, Damage]:
    """What one damage is, and the damage, drawn by seed for a whole folder."""
    draw = random.Random(seed)
    kind = draw.random()
    if kind < 0.1:
        name = draw.choice([path.name for path in sorted(folder.iterdir())])
        how = draw.choice((flipped(name, 2000, seed), cut(name, seed), device(name, os.mkfifo), device(name, os.mkdir)))
        return f"{name}: bytes {seed}", how
    name = draw.choice((*JSON_FILES, "config.json", "config.json", "config.json", "tokenizer.json"))
    tree = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    known = list(places(tree))
    more = [(field,) for field in MORE.get(name, ())]
    path = draw.choice(more if more and (not known or draw.random() < 0.4) else known)
    value = draw.choice((*JUNK, ...)) if path in known else draw.choice(JUNK)
    return f"{name} {'.'.join(map(str, path))} = {value!r:.60}", changed(name, path, value)
