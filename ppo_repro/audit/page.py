"""An audit in words, and as one HTML page that needs no network and no script."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ppo_repro.audit.judge import Audit, Side

WORST = 20
PROBABILITIES = (0.0, 0.01, 0.1, 0.5, 0.9, 0.99, 1.0)
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;margin:1em 0}td,th{padding:.2em .8em;text-align:right;border-bottom:1px solid #ddd}"
    "td:first-child,th:first-child{text-align:left}.right{color:#176639}.wrong{color:#a51d2d}"
    "i{display:inline-block;height:.7em;background:#3465a4;vertical-align:middle}"
)


def sentence(side: Side) -> str:
    """The verdict about one side."""
    if side.is_right:
        return f"{side.name} is right: {side.rms:.2g} nats (rms) from the exact log-probs"
    if not side.tokens:
        return f"{side.name} is wrong: {side.cause}"
    left = "" if side.cause.startswith("unknown") or not side.tried else f"; that leaves {side.left:.2g} nats"
    return f"{side.name} is wrong: {side.rms:.2g} nats (rms) from the exact log-probs; {side.cause}{left}"


def lines(found: Audit) -> list[str]:
    """The audit in words, the verdict last."""
    sides = (found.sampler, found.trainer)
    wrong = [side.name for side in sides if not side.is_right]
    verdict = {0: "both sides are right", 1: f"the {''.join(wrong)} is wrong", 2: "both sides are wrong"}[len(wrong)]
    return [
        f"{len(found.scored.exact):,} tokens of {found.responses:,} responses; stock float32 is {found.floor:.2g} nats "
        "(rms) from the exact log-probs",
        *(sentence(side) for side in sides),
        f"verdict: {verdict}",
    ]


def fields(found: Audit) -> dict[str, Any]:
    """The audit for JSON, without its tokens."""

    def side(of: Side) -> dict[str, Any]:
        tried = [{"left": t.left, **asdict(t.conditions)} for t in of.tried]
        return {**{k: v for k, v in asdict(of).items() if k != "tried"}, "tried": tried}

    return {
        "responses": found.responses,
        "tokens": len(found.scored.exact),
        "tried_tokens": found.tried_tokens,
        "float32_rms": found.floor,
        "sampler": side(found.sampler),
        "trainer": side(found.trainer),
    }


def page(found: Audit, title: str, temperature: float) -> str:
    """The page."""
    verdicts = "".join(
        f"<li class={'right' if s.is_right else 'wrong'}>{html.escape(sentence(s))}</li>"
        for s in (found.sampler, found.trainer)
    )
    words = lines(found)
    parts = [
        f"<h1>{html.escape(title)}</h1><p>{html.escape(words[0])}.</p><ul>{verdicts}</ul>"
        f"<p><b>{html.escape(words[-1])}</b></p>",
        *(_tried(side, temperature) for side in (found.sampler, found.trainer) if side.tried),
        _binned("By exact probability", found, found.scored.exact.exp(), PROBABILITIES, "{:g} to {:g}"),
        _binned("By position in the response", found, found.scored.position.double(), _powers(found), "{:g} to {:g}"),
        _worst(found),
    ]
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"
    return head + "".join(parts) + "</html>\n"


def _table(heading: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in cells) + "</tr>"

    return f"<h2>{heading}</h2><table>{row(head, 'th')}{''.join(row(cells, 'td') for cells in rows)}</table>"


def _tried(side: Side, temperature: float) -> str:
    def row(words: list[str], left: float) -> tuple[str, str, str]:
        width = 0.0 if side.rms == 0 else min(left / side.rms, 1.0)
        return (
            html.escape(" and ".join(words) or "the exact model"),
            f"{left:.2e}",
            f"<i style=width:{10 * width:.2f}em></i>",
        )

    rows = [row(t.conditions.deviations(temperature), t.left) for t in side.tried]
    return _table(f"What explains the {side.name}", ("computed", "left, nats rms", ""), rows)


def _powers(found: Audit) -> tuple[float, ...]:
    longest = int(found.scored.position.max())
    return (0.0, *(2.0**k for k in range(longest.bit_length() + 1)))


def _binned(heading: str, found: Audit, key: Tensor, edges: Sequence[float], name: str) -> str:
    rows = []
    for low, high in pairwise(edges):
        within = (key >= low) & ((key < high) | ((high == edges[-1]) & (key <= high)))
        if within.any():
            distances = (_rms_of(found.scored, side, within) for side in ("sampler", "trainer"))
            rows.append((name.format(low, high), f"{int(within.sum()):,}", *(f"{d:.2e}" for d in distances)))
    return _table(heading, ("", "tokens", "sampler, nats rms", "trainer, nats rms"), rows)


def _rms_of(scored: Any, side: str, within: Tensor) -> float:
    distance = (getattr(scored, side) - scored.exact)[within]
    finite = distance[distance.isfinite()]
    return float(finite.square().mean().sqrt()) if len(finite) else math.nan


def _worst(found: Audit) -> str:
    scored = found.scored
    distance: Callable[[Tensor], Tensor] = lambda x: (x - scored.exact).abs().nan_to_num(torch.inf, torch.inf)  # noqa: E731
    order = torch.maximum(distance(scored.sampler), distance(scored.trainer)).argsort(descending=True, stable=True)
    columns = (scored.row, scored.position, scored.token_id, scored.exact, scored.sampler, scored.trainer)
    rows = []
    for i in order[:WORST].tolist():
        values = [column[i].item() for column in columns]
        rows.append([str(v) for v in values[:3]] + [f"{v:.6g}" for v in values[3:]])
    head = ("row", "position", "token id", "exact, nats", "sampler", "trainer")
    return _table(f"The {len(rows)} tokens farthest from the exact model", head, rows)
