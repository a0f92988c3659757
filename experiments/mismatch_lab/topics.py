"""A task with long answers: 24 letters of the prompt's topic, no letter twice in a row; and its reward.

Twelve letters are four topics of three. The prompt `ca:` has two letters of the first topic, so `abcab...` is a perfect
response. The answers that a policy starts from are mostly letters of other topics, and 20 to 27 long. It is generated
without data. `python -m experiments.mismatch_lab.topics FILE.jsonl` writes the prompts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from ppo_repro.seeding import words

TOPICS = ("abc", "def", "ghi", "jkl")
LETTERS = "".join(TOPICS)
LENGTH, SHORTEST, LONGEST = 24, 20, 27

MARKS = ":;"  # prompts with the same letters are told apart by one
ON_TOPIC = 5  # of ten letters of an answer; the others are any


def topic_of(prompt: str) -> str:
    """The letters of the prompt's topic."""
    return next(topic for topic in TOPICS if prompt[0] in topic)


def _letters(topic: str, draws: Iterator[int]) -> Iterator[str]:
    for draw in draws:
        of = topic if draw % 10 < ON_TOPIC else LETTERS
        yield of[draw // 10 % len(of)]


def entries() -> list[dict[str, str]]:
    """Every prompt with an answer."""
    draws = iter(words(100_000, "mismatch lab", "answers").tolist())
    prompts = [f"{a}{b}{mark}" for topic in TOPICS for a in topic for b in topic for mark in MARKS]
    made = []
    for prompt in prompts:
        length = SHORTEST + next(draws) % (LONGEST - SHORTEST + 1)
        text = "".join(islice(_letters(topic_of(prompt), draws), length))
        made.append({"prompt": prompt, "answer": text, "key": prompt})
    return made


def score(prompt: str, response: str, answer: str) -> float:
    """Of the first 24 letters those of the topic that differ from the one before, less those beyond, over 24; >= 0."""
    first = response[:LENGTH]
    right = sum(
        letter in topic_of(prompt) and letter != before for before, letter in zip(" " + first, first, strict=False)
    )
    return max(right - (len(response) - len(first)), 0) / LENGTH


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("give the file to write: python -m experiments.mismatch_lab.topics FILE.jsonl")
    lines = [json.dumps(entry) + "\n" for entry in entries()]
    Path(sys.argv[1]).write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
