"""Say what to do about an unknown field: which field it may mean here, or why there is none."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ppo_repro.base.output import closest
from ppo_repro.config import coming_from

NEARLY = 0.8  # share of letters in common by which a field of another section may be meant


def what_to_do(path: str, known: Sequence[str]) -> str:
    """Return the advice about a dotted path that is not one of the `known` fields."""
    remarks = _same(path, known)
    reason = None if remarks else coming_from.reason(path)
    if reason is not None:
        return f"no such field: {reason}"
    similar = [f"{field} ({remark})" if remark else field for field, remark in remarks.items()] or _alike(path, known)
    advice = f"; did you mean {' or '.join(similar[:3])}?" if similar else ""
    return f"unknown field; remove it or correct its name{advice}"


def has_meaning(path: str, known: Sequence[str]) -> bool:
    """Return whether a dotted path is the name of a field here or in another framework."""
    return bool(_same(path, known)) or coming_from.reason(path) is not None


def sections_in(known: Sequence[str]) -> list[str]:
    """Return the path of every section that contains one of these fields."""
    return list(dict.fromkeys(other[: dot.start()] for other in known for dot in re.finditer(r"\.", other)))


def _same(path: str, known: Sequence[str]) -> dict[str, str]:
    """Return the fields that this path means in another framework, or that have its name in another section.

    Each field of another framework has the remark on its meaning here, or "". Of several fields, only the fields that
    share most sections with the path are returned.
    """
    plain = _plain(path)
    translated = {row.ours: row.remark for row in coming_from.meant(plain, {*known, *sections_in(known)})}
    remarks = translated | {other: "" for other in known if _last(other) == _last(plain) and other not in translated}
    most = max((_shared(plain, other) for other in remarks), default=0)
    return {other: remark for other, remark in remarks.items() if _shared(plain, other) == most}


def _alike(path: str, known: Sequence[str]) -> list[str]:
    """Return the field or section beside a path with a similar name, or fields elsewhere with very similar names."""
    section, _, name = _plain(path).rpartition(".")
    beside = {_last(other): other for other in (*known, *sections_in(known)) if other.rpartition(".")[0] == section}
    like = closest(name, list(beside))
    if like is not None:
        return [beside[like]]
    like = closest(name, [_last(other) for other in known], NEARLY)
    return [other for other in known if _last(other) == like]


def _plain(path: str) -> str:
    """Return a path without the indices of list entries."""
    return re.sub(r"\.\d+", "", path)


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _shared(path: str, other: str) -> int:
    """Return the number of leading sections that two dotted paths have in common."""
    return len({*sections_in([path])} & {*sections_in([other])})
