"""A recorded run whose texts are replaced by ones that attack the page that shows them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from ppo_repro.records import manifest, reader
from tests.support.synthetic_run import rewrite_cell

# each response as the texts of its tokens
HOSTILE = (
    ["<script>", "window.hacked", "=1", "</script>"],
    ["</script>", "<img src=x onerror=", "window.hacked=1", ">", "<!--", "<script>"],
    ["\u202e", "abc", " \u05e9\u05dc\u05d5\u05dd", " \u0645\u0631\u062d\u0628\u0627", "\u2066", " x"],
    ["\U0001f469\u200d\U0001f469\u200d\U0001f467", " \U0001f3f3\ufe0f\u200d\U0001f308", " \U0001f600"],
    ["e", "\u0301\u0302", " Z\u0351\u036b", "\u0343"],
    ["\x01", "\x1b[31m", "\x7f", "\x85", "\u2028", "\ufeff"],
    ["line", "\n", "\n", "next\tline", " \\u003c/script> ${1} &lt;b&gt; \"'`"],
)


def pieces_of(sequence: int, length: int, ended: bool) -> list[str]:
    """The texts of the tokens of a response, of which an end token has none."""
    pieces = HOSTILE[sequence % len(HOSTILE)][: length - ended]
    return [*pieces, *["."] * (length - ended - len(pieces)), *[""] * ended]


def make_hostile_run(source: Path, run_dir: Path, *, broken: bool = False) -> Path:
    """A copy of a run with hostile texts; `broken`: the first token of each iteration has NaN and infinity."""
    shutil.copytree(source, run_dir)
    for iteration in range(manifest.load(run_dir).num_iterations):
        sequences = reader.read_sequences(run_dir, iterations=[iteration])
        rows = sequences[["sequence", "response_length", "finish_reason"]].itertuples(index=False)
        cuts = [pieces_of(sequence, length, reason == "stop") for sequence, length, reason in rows]
        texts = ["".join(pieces) for pieces in cuts]
        ends = [np.cumsum([len(piece) for piece in pieces]) for pieces in cuts]
        starts = [np.concatenate([[0], end[:-1]]) for end in ends]

        def changed(column: str, values: Any, iteration: int = iteration) -> None:
            table = "sequences" if isinstance(values, list) else "tokens"
            rewrite_cell(run_dir, table, iteration, column, lambda _: values)

        changed("response", texts)
        changed("prompt", [text[::-1] + "</title>" for text in texts])
        changed("answer", ["<b>\u202e</b>"] * len(texts))
        changed("char_start", np.concatenate(starts).astype(np.int32))
        changed("char_end", np.concatenate(ends).astype(np.int32))
        if broken:
            rewrite_cell(run_dir, "tokens", iteration, "old_logprobs", lambda v: with_first(v, np.nan))
            rewrite_cell(run_dir, "updates", iteration, "ratios", lambda v: with_first(v, np.inf))
    return run_dir


def with_first(values: np.ndarray, first: float) -> np.ndarray:
    values[0] = first
    return values
