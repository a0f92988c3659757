"""An episode as a task's Python file sees it: the turns of the model and of its environment."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Turn:
    """One turn."""

    role: Literal["model", "environment"]
    text: str


@dataclass(frozen=True)
class Transcript:
    """A prompt and all turns that followed; they alternate, and the model's is the first."""

    key: str  # of the prompt
    prompt: str
    answer: str  # the expected one; empty if the prompt has none
    fields: dict[str, Any]  # the prompt's other fields, a copy
    turns: tuple[Turn, ...]

    @property
    def last(self) -> str:
        """The text of the last turn."""
        return self.turns[-1].text

    @property
    def text(self) -> str:
        """The text of all turns, one after the other."""
        return "".join(turn.text for turn in self.turns)

    @property
    def own(self) -> str:
        """The model's own words: the text of its turns, one after the other."""
        return "".join(turn.text for turn in self.turns if turn.role == "model")


def make_transcript(key: str, prompt: str, answer: str, fields: str, turns: Sequence[str]) -> Transcript:
    """A transcript of `turns` that begin with the model's; `fields` is a JSON object."""
    of = tuple(Turn("environment" if i % 2 else "model", text) for i, text in enumerate(turns))
    return Transcript(key, prompt, answer, json.loads(fields), of)
