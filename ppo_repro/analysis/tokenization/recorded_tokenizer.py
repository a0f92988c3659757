"""Load the tokenizer that a run recorded beside its trained policy."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ppo_repro.base.errors import UserError

# beside the final policy; until that is written, beside the reference model of the checkpoints
PATHS = ("checkpoints/final/tokenizer.json", "checkpoints/reference/tokenizer.json")


@dataclass(frozen=True)
class RecordedTokenizer:
    """Functions for lists: `encode` adds no special tokens, `decode` skips them, `decode_all` keeps them."""

    encode: Callable[[Sequence[str]], list[list[int]]]
    decode: Callable[[Sequence[Sequence[int]]], list[str]]
    decode_all: Callable[[Sequence[int]], str]
    special_ids: frozenset[int]


def tokenizer_path(run_dir: Path) -> Path | None:
    """Return the file of a run's tokenizer; None if the run has none yet."""
    return next((run_dir / name for name in PATHS if (run_dir / name).is_file()), None)


def recorded_tokenizer(run_dir: Path | str) -> RecordedTokenizer:
    """Return the tokenizer of a recorded run. Raises UserError if the run has none, or it cannot be read."""
    path = tokenizer_path(Path(run_dir))
    if path is None:
        raise UserError(f"{run_dir}: has no tokenizer.json, looked for {' and '.join(PATHS)}; finish the run first")
    return load_tokenizer(path)


def load_tokenizer(path: Path) -> RecordedTokenizer:
    """Load a tokenizer.json. Raises UserError if it cannot be read."""
    from tokenizers import Tokenizer

    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        backend = Tokenizer.from_str(json.dumps(tree))
    except Exception as error:  # `tokenizers` raises bare Exceptions
        raise UserError(f"{path}: cannot be read ({' '.join(str(error).split())[:200]}); restore the run's") from error
    backend.no_padding()
    backend.no_truncation()
    special = frozenset(entry["id"] for entry in tree.get("added_tokens", []) if entry["special"])

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in backend.encode_batch(list(texts), add_special_tokens=False)]

    def decode(ids: Sequence[Sequence[int]]) -> list[str]:
        return list(backend.decode_batch([list(row) for row in ids], skip_special_tokens=True))

    def decode_all(ids: Sequence[int]) -> str:
        return str(backend.decode(list(ids), skip_special_tokens=False))

    return RecordedTokenizer(encode, decode, decode_all, special)
