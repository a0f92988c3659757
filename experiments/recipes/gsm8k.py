"""Reward of GSM8K, whose answers end with `#### 72`: 1 if the response's first `#### NUMBER` has the answer's number.

The rule is that of verl's strict grader. Numbers are compared as text, without commas: `18.` is not `18`.
"""

import re

_NUMBER = re.compile(r"#### (-?[0-9.,]+)")


def score(response: str, answer: str) -> float:
    found = _NUMBER.search(response)
    return float(found is not None and _plain(found[1]) == _plain(answer.rpartition("#### ")[2]))


def _plain(number: str) -> str:
    return number.replace(",", "")
