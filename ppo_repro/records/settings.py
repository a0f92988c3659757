"""Label each run of a list by the fields in which it differs from the other runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from ppo_repro.records.changes import Setup

WORDS = 3  # of a short label
LONGEST = 24  # characters of a value in a short label
EXPERIMENT = "experiment"


@dataclass(frozen=True)
class Setting:
    """The differences between a run and other runs: a label of at most WORDS words, and all fields that differ."""

    short: str
    whole: str


def settings_of(setups: Sequence[Setup]) -> list[Setting]:
    """Return the setting of each run among these. Both texts are empty if the runs do not differ.

    A setting leaves out the seed and all fields that change no result. Equal settings have equal labels. If the runs
    are of several experiments, a label begins with the experiment. The other words tell differences within it.
    """
    kept = [{name: value for name, value in setup.items() if _counts(name, setup)} for setup in setups]
    wholes = list(_wholes(kept))
    shorts = [""] * len(kept)
    experiments = [str(setup.get(EXPERIMENT, "")) for setup in kept]
    for experiment in dict.fromkeys(experiments):
        members = [i for i, name in enumerate(experiments) if name == experiment]
        first = [experiment] if len(set(experiments)) > 1 else []
        for i, words in zip(members, _words([kept[i] for i in members], WORDS - len(first)), strict=True):
            shorts[i] = ", ".join([*first, *words])
    return [Setting(short, whole) for short, whole in zip(_distinct(shorts, wholes), wholes, strict=True)]


def _counts(name: str, setup: Setup) -> bool:
    """Return whether a field makes another setting. The seed, `records` and layouts that change no bit do not."""
    stock = setup.get("mismatch.sampler.stock") is not None or setup.get("rollout.engine.numerics") == "stock"
    exact = setup.get("numerics.mode") == "deterministic" and not stock
    return name != "seed" and not name.startswith(("records.", "checkpoints.", *(("layout.",) if exact else ())))


def _differing(setups: Sequence[Setup]) -> list[str]:
    """Return the entries in which setups differ, first the entries that every setup has.

    The digest of an input counts only if every run has the input; otherwise the field that names the input differs.
    """
    names = dict.fromkeys(name for setup in setups for name in setup)
    found = [name for name in names if len(_values(name, setups)) > 1]
    everywhere = [name for name in found if all(name in setup for setup in setups)]
    return everywhere + [name for name in found if name not in everywhere and "/" not in name]


def _values(name: str, setups: Sequence[Setup]) -> set[str]:
    """Return the values of an entry, except for runs whose layout changes no bit."""
    is_layout = name.startswith("layout.")
    return {json.dumps(setup.get(name)) for setup in setups if name in setup or not is_layout}


def _wholes(setups: Sequence[Setup]) -> Iterator[str]:
    names = _differing(setups)
    for setup in setups:
        yield ", ".join(f"{name}={_value(setup[name])}" for name in names if name in setup)


def _words(setups: Sequence[Setup], most: int) -> list[list[str]]:
    """Return at most `most` words for each setup, from the fields that distinguish most setups first."""
    names = [name for name in _differing(setups) if name != EXPERIMENT]
    chosen: list[str] = []
    while len(chosen) < min(most, len(names)):
        left = [name for name in names if name not in chosen]
        # `max` takes the first of equally good fields
        chosen.append(max(left, key=lambda name: len({_key(setup, [*chosen, name]) for setup in setups})))
    chosen.sort(key=names.index)
    ends = {name: _leaf(name, names) for name in chosen}
    more = ["…"] if len(names) > len(chosen) else []
    found = [[f"{ends[name]}={_short(setup[name])}" for name in chosen if name in setup] for setup in setups]
    return [[*words[:-1], " ".join([*words[-1:], *more])] if words or more else [] for words in found]


def _key(setup: Setup, names: Sequence[str]) -> str:
    return json.dumps([setup.get(name) for name in names])


def _leaf(name: str, names: Sequence[str]) -> str:
    """Return the shortest end of a dotted name that no other name has; for an input, return the file's name."""
    parts = [PurePath(name).name] if "/" in name else name.split(".")
    for count in range(1, len(parts)):
        end = ".".join(parts[-count:])
        if not parts[-count].isdecimal() and sum(f".{other}".endswith(f".{end}") for other in names) == 1:
            return end
    return ".".join(parts)


def _value(value: Any) -> str:
    if isinstance(value, str):
        return f"{value[:12]}..." if len(value) == 64 else value
    return json.dumps(value)


def _short(value: Any) -> str:
    text = PurePath(value).name if isinstance(value, str) and "/" in value else _value(value)
    if isinstance(value, float):
        text = f"{value:g}"
    if len(text) <= LONGEST:
        return text
    cut = text[: LONGEST - 1]
    return f"{cut.rpartition(' ')[0] or cut}…"  # between words, so that no digest is cut


def _distinct(shorts: Sequence[str], wholes: Sequence[str]) -> list[str]:
    """Return the short labels; if two settings have the same label, number them."""
    numbers: dict[str, dict[str, int]] = {}
    found = []
    for short, whole in zip(shorts, wholes, strict=True):
        known = numbers.setdefault(short, {})
        count = known.setdefault(whole, len(known) + 1)
        found.append(short if count == 1 else f"{short} ({count})".strip())
    return found
