"""The tokenizer that a run recorded beside its trained policy, and its card. The only module that uses `tokenizers`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppo_repro.errors import UserError

# with the final policy, or before that with the reference of the checkpoints
PATHS = ("checkpoints/final/tokenizer.json", "checkpoints/reference/tokenizer.json")
PROBES = (
    "",
    " ",
    "  two  spaces ",
    "a, b. c!",
    "tabs\tand\nlines\r\n",
    "0 7 42 2024 31415926",
    "17+28=45",
    "Caf\u00e9 na\u00efve \u4e16\u754c \U0001f600",
    "e\u0301 \u202e\ufeff",
    "<eos> <pad>",
)


@dataclass(frozen=True)
class RecordedTokenizer:
    """encode (adds no special tokens) and decode (skips them), for lists of texts or of ids."""

    encode: Callable[[Sequence[str]], list[list[int]]]
    decode: Callable[[Sequence[Sequence[int]]], list[str]]
    special_ids: frozenset[int]
    tree: dict[str, Any]  # tokenizer.json


@dataclass(frozen=True)
class TokenizerCard:
    """The identity of a tokenizer, and how it cuts some texts."""

    tokenizer_id: str  # first 12 hex digits of the SHA-256 over vocabulary, merges, normaliser and pre-tokenizer
    type: str
    vocab_size: int
    merges: int
    merges_sha256: str
    pre_tokenizer: str
    digit_policy: str  # single: no token has several digits; up_to_<n>: the longest has n
    texts: int
    fertility_tok_char: float  # tokens per character, ratio of sums
    fertility_tok_word: float  # tokens per white-space separated word
    pct_words_single: float  # percent of distinct words, with the space before them, that are a single token
    round_trip_failures: tuple[str, ...]  # among PROBES and the characters of the texts


def recorded_tokenizer(run_dir: Path | str) -> RecordedTokenizer:
    """The tokenizer of a recorded run; UserError where there is none or it cannot be read."""
    folder = Path(run_dir)
    for path in PATHS:
        if (folder / path).is_file():
            return load_tokenizer(folder / path)
    raise UserError(f"{run_dir}: has no tokenizer.json, looked for {' and '.join(PATHS)}; finish the run first")


def load_tokenizer(path: Path) -> RecordedTokenizer:
    """A tokenizer.json; UserError where it cannot be read."""
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
        return list(backend.decode_batch([list(some) for some in ids], skip_special_tokens=True))

    return RecordedTokenizer(encode, decode, special, tree)


def token_bytes(tokenizer: RecordedTokenizer) -> dict[int, bytes]:
    """The bytes of every token except special ones. UserError for decoders other than byte-level and plain ones."""
    decoder = (tokenizer.tree.get("decoder") or {}).get("type")
    if decoder not in ("ByteLevel", "Fuse"):
        raise UserError(
            f"decoder = {decoder!r}: bytes of tokens are known only for ByteLevel and Fuse; use such a tokenizer"
        )
    letters = byte_letters()
    bytes_of = {}
    for token, index in _vocabulary(tokenizer.tree).items():
        if index not in tokenizer.special_ids:
            bytes_of[index] = bytes(letters[c] for c in token) if decoder == "ByteLevel" else token.encode()
    return bytes_of


def byte_letters() -> dict[str, int]:
    """The letters of byte-level vocabularies: printable bytes stand for themselves, others are U+0100 and following.

    Radford et al., 2019.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def tokenizer_card(tokenizer: RecordedTokenizer, texts: Sequence[str]) -> TokenizerCard:
    """The card of a tokenizer, its fertility measured on `texts`; UserError where they are empty."""
    characters, words = sum(len(text) for text in texts), sum(len(text.split()) for text in texts)
    if not words:
        raise UserError("texts: have no word; give texts of the run")
    tokens = sum(len(ids) for ids in tokenizer.encode(list(texts)))
    distinct = sorted({piece for text in texts for piece in _with_space(text)})
    single = sum(len(ids) == 1 for ids in tokenizer.encode(distinct))
    tree = tokenizer.tree
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in tree["model"].get("merges", [])]
    identity = [tree["model"], tree.get("normalizer"), tree.get("pre_tokenizer")]
    longest = max((_digits(token) for token in _vocabulary(tree)), default=0)
    probes = [*PROBES, *sorted({character for text in texts for character in text})]
    back = tokenizer.decode(tokenizer.encode(probes))
    return TokenizerCard(
        tokenizer_id=_sha256(json.dumps(identity, sort_keys=True))[:12],
        type=str(tree["model"].get("type", "unknown")),
        vocab_size=len(_vocabulary(tree)),
        merges=len(merges),
        merges_sha256=_sha256("\n".join(merges)),
        pre_tokenizer=_described(tree.get("pre_tokenizer")),
        digit_policy="none" if not longest else "single" if longest == 1 else f"up_to_{longest}",
        texts=len(texts),
        fertility_tok_char=tokens / characters,
        fertility_tok_word=tokens / words,
        pct_words_single=100.0 * single / len(distinct),
        round_trip_failures=tuple(probe for probe, decoded in zip(probes, back, strict=True) if probe != decoded),
    )


def _with_space(text: str) -> list[str]:
    """The words of a text, each with a space before it, except a word at the very beginning."""
    words = text.split()
    return [word if i == 0 and not text[:1].isspace() else f" {word}" for i, word in enumerate(words)]


def _digits(token: str) -> int:
    """Length of a token that is a number, without white space before it; else 0."""
    bare = token.lstrip("\u0120\u2581 ")
    return len(bare) if bare.isdigit() else 0


def _vocabulary(tree: Mapping[str, Any]) -> dict[str, int]:
    added = {entry["content"]: entry["id"] for entry in tree.get("added_tokens", [])}
    vocabulary = tree["model"]["vocab"]
    if isinstance(vocabulary, list):  # Unigram lists tokens with their scores
        vocabulary = {token: index for index, (token, _) in enumerate(vocabulary)}
    return {**vocabulary, **added}


def _described(component: Mapping[str, Any] | None) -> str:
    if component is None:
        return "none"
    inside = component.get("pretokenizers")
    if inside:
        return "+".join(_described(inner) for inner in inside)
    pattern = component.get("pattern")
    return str(component["type"]) + (f"({next(iter(pattern.values()))})" if isinstance(pattern, dict) else "")


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
