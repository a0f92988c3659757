"""A language of four topics, whose answers are four words of the prompt's topic, and its reward.

It is generated without data and independent of any tokenizer. `python -m experiments.tokenization.topics FILE.jsonl`
writes the prompts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ppo_repro.seeding import words

CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
TOPICS, WORDS, SLOTS, PROMPTS = 4, 60, 4, 1000


def lexicon() -> list[list[str]]:
    """The words of each topic, commonest first; rarer words have more syllables, from one to four."""
    raw = iter(words(20000, "topics", "syllables").tolist())
    used: set[str] = set()
    topics: list[list[str]] = [[] for _ in range(TOPICS)]
    for rank in range(WORDS):
        for topic in topics:
            word = ""
            while not word or word in used:
                syllables = 1 + rank * 4 // WORDS
                word = "".join(
                    CONSONANTS[next(raw) % len(CONSONANTS)] + VOWELS[next(raw) % len(VOWELS)] for _ in range(syllables)
                )
            used.add(word)
            topic.append(word)
    return topics


LEXICON = lexicon()
TOPIC_OF = {word: number for number, topic in enumerate(LEXICON) for word in topic}


def zipf_rank(draw: int) -> int:
    """A rank with probability proportional to 1 / (rank + 1), from a 64-bit word."""
    weights = [840_000_000 // (rank + 1) for rank in range(WORDS)]
    rest = draw % sum(weights)
    for rank, weight in enumerate(weights):
        if rest < weight:
            return rank
        rest -= weight
    raise AssertionError("the draw is below the sum of the weights")


def entries() -> list[dict[str, str]]:
    """Prompts such as `ba miro:` with answers such as ` ka ba lune so`, all words of one topic."""
    by_prompt: dict[str, dict[str, str]] = {}
    raw = iter(words(PROMPTS * 40, "topics", "prompts").tolist())
    while len(by_prompt) < PROMPTS:
        topic = LEXICON[next(raw) % TOPICS]
        prompt = f"{topic[next(raw) % WORDS]} {topic[next(raw) % WORDS]}:"
        answer = "".join(f" {topic[zipf_rank(next(raw))]}" for _ in range(SLOTS))
        by_prompt.setdefault(prompt, {"prompt": prompt, "answer": answer, "key": prompt})
    return list(by_prompt.values())


def score(prompt: str, response: str, answer: str) -> float:
    """Share of a response's words that are of the prompt's topic and not repeated; 0 unless there are four words."""
    spoken: Sequence[str] = response.split()
    topic = TOPIC_OF[prompt.rstrip(":").split()[0]]
    if len(spoken) != SLOTS:
        return 0.0
    return sum(TOPIC_OF.get(word) == topic for word in set(spoken)) / SLOTS


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("give the file to write: python -m experiments.tokenization.topics FILE.jsonl")
    lines = [json.dumps(entry) + "\n" for entry in entries()]
    Path(sys.argv[1]).write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
