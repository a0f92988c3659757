"""A handmade run whose texts attack the page that shows them; its tables are consistent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ppo_repro.config.files import LANGUAGE, dump_yaml
from ppo_repro.records import arrow, schema
from ppo_repro.records.arrow import AllNull, WithNulls
from ppo_repro.records.writer import RunWriter
from tests.support.runs import small_config
from tests.support.synthetic_run import ENVIRONMENT, create_run

END = 1  # the token id of the end token
LONG = 10_000

# each response as the texts of its tokens; the end token follows
HOSTILE = (
    ["<script>", "window.hacked", "=1", "</script>"],
    ["</script>", "<img src=x onerror=", "window.hacked=1", ">", "<!--", "<script>"],
    ["\u202e", "abc", " \u05e9\u05dc\u05d5\u05dd", " \u0645\u0631\u062d\u0628\u0627", "\u2066", " x"],
    ["\U0001f469\u200d\U0001f469\u200d\U0001f467", " \U0001f3f3\ufe0f\u200d\U0001f308", " \U0001f600"],
    ["e", "\u0301\u0302", " Z\u0351\u036b", "\u0343"],
    ["\x01", "\x1b[31m", "\x7f", "\x85", "\u2028", "\u2029", "\ufeff"],
    ["line", "\n", "\n", "next\tline", " \\u003c/script> ${1} &lt;b&gt; \"'`"],
)  # fmt: skip
LONG_RESPONSE = [f"w{i}" if i % 3 == 0 else f".{i}" if i % 3 == 1 else " " for i in range(LONG - 1)]


def columns_of(table: schema.Table, rows: int, given: dict[str, Any]) -> dict[str, Any]:
    """`given`, and for every other column of the table zeros, empty texts or nulls."""

    def filled(column: schema.Column) -> Any:
        if column.nullable:
            return AllNull(rows)
        if column.kind == "string":
            return [""] * rows
        if column.kind.startswith("list"):
            return [np.zeros(0, column.kind[5:-1])] * rows
        return np.zeros(rows, np.dtype(column.kind))

    return {column.name: given.get(column.name, filled(column)) for column in table.columns}


def present(values: npt.NDArray[Any]) -> WithNulls:
    """A nullable column without a null."""
    return WithNulls(values, np.ones(len(values), np.bool_))


def iteration_tables(
    iteration: int, responses: list[list[str]], generator: np.random.Generator, broken: bool
) -> dict[str, Any]:
    """The five tables of one iteration, two epochs of two minibatches."""
    lengths = np.array([len(pieces) + 1 for pieces in responses])
    count, total = len(responses), int(lengths.sum())
    owner = np.repeat(np.arange(count), lengths)
    position = np.concatenate([np.arange(n) for n in lengths])
    texts = ["".join(pieces) for pieces in responses]
    ends = [np.cumsum([0, *(len(piece) for piece in pieces)]) for pieces in responses]
    spans = [(np.append(e[:-1], e[-1]), np.append(e[1:], e[-1])) for e in ends]
    special = np.concatenate([np.arange(n) == n - 1 for n in lengths])
    words = np.concatenate([_words(pieces) for pieces in responses])
    rollout = -generator.exponential(1.0, total).astype(np.float32)
    old = (rollout + 1e-5 * generator.standard_normal(total)).astype(np.float32)
    advantages = generator.standard_normal(total).astype(np.float32)
    updates = _updates(owner, position, old, advantages, generator)
    if broken:
        old[0], updates["ratios"].values[0] = np.nan, np.inf
    tokens = {
        "sequence": owner.astype(np.int32), "position": position.astype(np.int32),
        "token_id": np.where(special, END, 2 + position % 500).astype(np.int32),
        "char_start": np.concatenate([s for s, _ in spans]).astype(np.int32),
        "char_end": np.concatenate([e for _, e in spans]).astype(np.int32),
        "word_id": words.astype(np.int32), "sub_idx": _sub_idx(owner, words),
        "rollout_logprobs": rollout, "old_logprobs": old, "advantages": advantages,
        "ref_kl": generator.exponential(0.1, total).astype(np.float32),
        "entropies": generator.exponential(1.0, total).astype(np.float32),
        "values": present(generator.standard_normal(total).astype(np.float32)),
    }  # fmt: skip
    sequences = {
        "sequence": np.arange(count, dtype=np.int32), "response": texts,
        "prompt": [text[::-1] + "</title>" for text in texts],
        "answer": ["<b>\u202e</b>"] * count, "response_length": lengths.astype(np.int32),
        "finish_reason": ["stop"] * count, "scores": generator.standard_normal(count),
        "is_correct": generator.random(count) < 0.5,
    }  # fmt: skip
    parts = {
        "sequences": (schema.SEQUENCES, count, sequences),
        "tokens": (schema.TOKENS, total, tokens),
        "updates": (schema.UPDATES, 2 * total, updates),
        "steps": (schema.STEPS, 4, _steps(generator)),
        "iterations": (schema.ITERATIONS, 1, _iteration(sequences, tokens)),
    }
    tables = {}
    for name, (table, rows, given) in parts.items():
        given = {"iteration": np.full(rows, iteration, np.int32), **given}
        tables[name] = arrow.to_arrow(table, columns_of(table, rows, given))
    return tables


def make_hostile_run(run_dir: Path, *, broken: bool = False) -> Path:
    """A complete run of two iterations; the second has a response of `LONG` tokens.

    `broken`: the first token of each iteration has log-prob NaN and the ratio infinity.
    """
    config = small_config("experiment=hostile")
    environment = {**ENVIRONMENT, "numerics_mode": "native", "platform": "</code><script>window.hacked=1</script>"}
    create_run(run_dir, LANGUAGE, dump_yaml(config), config.digest(), environment)
    written, generator = RunWriter(run_dir), np.random.default_rng(7)
    for iteration, responses in enumerate((list(HOSTILE), [*HOSTILE, LONG_RESPONSE])):
        tables = iteration_tables(iteration, responses, generator, broken)
        written.append(iteration, tables)
    written.finish({"eval_accuracy": 0.5, "policy_digest": "ab"}, {})
    return run_dir


def _words(pieces: list[str]) -> npt.NDArray[np.int64]:
    begins = [index == 0 or piece[:1].isspace() for index, piece in enumerate(pieces)]
    found = np.cumsum(begins) - 1
    return np.append(found, found[-1] + 1)


def _sub_idx(owner: npt.NDArray[np.int64], words: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    begins = np.append(True, (np.diff(owner) != 0) | (np.diff(words) != 0))
    index = np.arange(len(words))
    return (index - np.maximum.accumulate(np.where(begins, index, 0))).astype(np.int32)


def _updates(
    owner: npt.NDArray[np.int64],
    position: npt.NDArray[np.int64],
    old: npt.NDArray[np.float32],
    advantages: npt.NDArray[np.float32],
    generator: np.random.Generator,
) -> dict[str, Any]:
    total = len(owner)
    moved = np.concatenate([old, old + 0.3 * generator.standard_normal(total).astype(np.float32)])
    ratios = np.exp(moved - np.tile(old, 2)).astype(np.float32)
    gain = np.tile(advantages, 2) > 0
    high, low = ratios > 1.2, ratios < 0.8
    flags = np.select(
        [high & gain, low & ~gain, high & ~gain, low & gain],
        ["clip_high", "clip_low", "wrong_high", "wrong_low"],
        "none",
    )
    return {
        "epoch": np.repeat([0, 1], total).astype(np.int32),
        "minibatch": np.tile(owner % 2, 2).astype(np.int32),
        "sequence": np.tile(owner, 2).astype(np.int32), "position": np.tile(position, 2).astype(np.int32),
        "new_logprobs": present(moved.astype(np.float32)), "ratios": present(ratios), "clip_flag": flags.tolist(),
    }  # fmt: skip


def _steps(generator: np.random.Generator) -> dict[str, Any]:
    return {
        "epoch": np.array([0, 0, 1, 1], np.int32), "minibatch": np.array([0, 1, 0, 1], np.int32),
        "clip_fraction": present(generator.random(4)), "grad_norm": present(generator.random(4)),
        "policy_digest": ["ab"] * 4,
    }  # fmt: skip


def _iteration(sequences: dict[str, Any], tokens: dict[str, Any]) -> dict[str, Any]:
    unequal = tokens["old_logprobs"].view(np.int32) != tokens["rollout_logprobs"].view(np.int32)
    return {
        "sequences": np.array([len(sequences["response"])], np.int32),
        "tokens": np.array([len(unequal)], np.int32),
        "score_mean": np.array([sequences["scores"].mean()]),
        "unequal_old_rollout_logprobs": np.array([unequal.sum()]),
        "eval_accuracy": present(np.array([0.25])),
    }
