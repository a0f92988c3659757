"""A loop whose order is free sums nothing into one number, as `c/lanes.h` demands: a search of the kernels' text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

SOURCES = ROOT / "ppo_repro" / "numerics" / "c"
LOOP = re.compile(r"\b(?:EACH|EACH_OF_MANY|SHARE|IN_LANES)(?=\((\w+),)")
TARGET = re.compile(r"(?P<lane>LANE\(\w+\))|(?P<name>[A-Za-z_][\w.]*(?:->\w+)*)")
ASSIGNMENT = re.compile(r"\s*(?P<operator>[-+*/]?=)(?!=)\s*(?P<value>[^;]*)|\s*(?P<step>\+\+|--)")


def closed(text: str, begin: int) -> int:
    """The place after the bracket that closes the one at `begin`."""
    depth = 0
    for place in range(begin, len(text)):
        depth += (text[place] in "([{") - (text[place] in ")]}")
        if depth == 0:
            return place + 1
    raise AssertionError("a bracket stays open")


def loops(text: str) -> Iterator[tuple[str, str]]:
    """Of each loop its variable and its body."""
    for found in LOOP.finditer(text):
        end = closed(text, found.end())
        if found[0] == "IN_LANES":
            yield found[1], text[found.end() : end]
            continue
        begin = end + len(text[end:]) - len(text[end:].lstrip())
        yield found[1], text[begin : closed(text, begin) if text[begin] == "{" else text.index(";", begin) + 1]


def sums(text: str) -> list[str]:
    """The statements of a C source that sum over the iterations of a loop into one number, or into x[y[i]].

    A variable that the body declares is of one iteration.
    """
    text, wrong = re.sub(r"//.*", "", text), []
    for variable, body in loops(text):
        shifted = re.findall(rf"\bint (\w+) = [\w ]+ \+ {variable};", body)
        for target in TARGET.finditer(body):
            if target["lane"]:
                continue
            end = index = target.end()
            while body[end : end + 1] == "[":
                end = closed(body, end)
            statement = ASSIGNMENT.match(body, end)
            own = body[target.start() : end]
            if statement is None or (statement["operator"] == "=" and own not in statement["value"]):
                continue
            declared = re.search(rf"\b(?:float|double|int|uint32_t) {re.escape(own)}\b", body)
            direct = re.sub(r"(?<=.)\[.*?\]", "", body[index + 1 : end - 1])
            if not declared and not {variable, *shifted} & set(re.findall(r"\w+", direct)):
                wrong.append(own + statement[0])
    return wrong


@pytest.mark.parametrize("path", sorted(SOURCES.rglob("*.c")), ids=lambda path: str(path.relative_to(SOURCES)))
def test_no_loop_of_a_kernel_sums_into_one_number(path: Path) -> None:
    assert sums(path.read_text()) == []


@pytest.mark.parametrize(
    "line",
    [
        *("total += x[i];", "total = total + x[i];", "a->total = fma32(x[i], y[i], a->total);", "total -= x[i];"),
        *("out[0] += x[i];", "out[route[i]] += x[i];", "{ float y = x[i]; if (y > 0) total = y + total; }"),
    ],
)
@pytest.mark.parametrize(
    "loop", ["EACH(i,n) {}", "EACH_OF_MANY(i, a->n) {}", "SHARE(i, (n)) {}", "IN_LANES(i, n, {});"]
)
def test_a_sum_that_is_written_into_a_loop_is_found(loop: str, line: str) -> None:
    assert len(sums(loop.replace("{}", line))) == 1
