"""What an episode says: the turns of the model and of its environment, as a task's Python file sees them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Turn:
    """One turn, without special tokens."""

    role: Literal["model", "environment"]
    text: str


@dataclass(frozen=True)
class Transcript:
    """A prompt and all that followed; turns alternate, and the first is the model's."""

    key: str  # of the prompt
    prompt: str
    answer: str  # what is expected; empty where the prompt has none
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


def make_transcript(key: str, prompt: str, answer: str, fields: str, turns: Sequence[str]) -> Transcript:
    """A transcript of `turns` that begin with the model's; `fields` is a JSON object."""
    of = tuple(Turn("environment" if index % 2 else "model", text) for index, text in enumerate(turns))
    return Transcript(key, prompt, answer, json.loads(fields), of)
