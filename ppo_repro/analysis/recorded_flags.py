"""Read the recorded clip flags: their words, what they say about the gradient, and their colours in charts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

Effect = Literal["unchanged", "removed", "kept", "bounded", "unknown"]


@dataclass(frozen=True)
class RecordedFlag:
    """Meaning of a value of the column `clip_flag`.

    `effect` on the token's gradient: unchanged, removed by the clip, kept although the ratio is outside the band, kept
    with a bounded weight, or unknown because the objective does not say.
    """

    words: str
    effect: Effect

    @property
    def is_drawn(self) -> bool:
        """Return whether the flag has a line in the chart of flags."""
        return self.effect not in ("unchanged", "unknown")


# `ClipFlag` of ppo/objectives.py, whose module imports torch; style.css has the class f-NAME of each but `none`
RECORDED_FLAGS = {
    "none": RecordedFlag("unchanged", "unchanged"),
    "clip_high": RecordedFlag("clipped high", "removed"),
    "clip_low": RecordedFlag("clipped low", "removed"),
    "clip_dual": RecordedFlag("clipped dual", "removed"),
    "wrong_high": RecordedFlag("wrong side, high", "kept"),
    "wrong_low": RecordedFlag("wrong side, low", "kept"),
    "bound_high": RecordedFlag("weight bounded above", "bounded"),
    "bound_low": RecordedFlag("weight bounded below", "bounded"),
    "unknown": RecordedFlag("the objective does not say", "unknown"),
}
DRAWN = {name: flag.words for name, flag in RECORDED_FLAGS.items() if flag.is_drawn}


def flags_with(effect: Effect) -> list[str]:
    """Return the names of the flags with an effect."""
    return [name for name, flag in RECORDED_FLAGS.items() if flag.effect == effect]


def recorded_clipped(flags: pd.Series) -> npt.NDArray[np.bool_]:
    """Return which flags of the column `clip_flag` say that the clip removed the gradient, bool [N]; null does not."""
    return flags.isin(flags_with("removed")).to_numpy(np.bool_)


def flag_legend() -> list[dict[str, str]]:
    """Return the name, words and class of style.css of each flag, for token_view.js."""
    return [
        {"name": name, "words": flag.words, "class": "" if flag.effect == "unchanged" else f"f-{name}"}
        for name, flag in RECORDED_FLAGS.items()
    ]
