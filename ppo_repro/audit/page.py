"""An audit as one HTML page that needs no network and no script."""

from __future__ import annotations

import base64
import hashlib
import html
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from ppo_repro.audit.judge import Audit, Scored, Side
from ppo_repro.audit.words import lines, sentence, verdict
from ppo_repro.output import printable

BEGINNING = (
    '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/><meta name="generator" content="ppo-repro audit"/>'
)
WORST = 20  # rows of the tables that begin with the farthest
PROBABILITIES = (0.0, 0.01, 0.1, 0.5, 0.9, 0.99, 1.0)
BAR = 120  # pixels
DISTANCES = ("tokens", "sampler", "trainer")
Decode = Callable[[int], str]


def page(found: Audit, title: str, decode: Decode, skipped: int = 0) -> str:
    """The page. decode: the text of a token id."""
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    sides = (found.sampler, found.trainer)
    said = "".join(
        f'<li class="{"right" if s.is_right else "wrong"}">{_mark(s)}{_text(sentence(s, found.responses))}'
        f"{_advice(s)}</li>"
        for s in sides
    )
    scored = found.scored
    parts = [
        f"<h1>{_text(title)}</h1><p>{_text(lines(found, skipped)[0])}.</p>",
        f'<p class="verdict">{_text(verdict(found).capitalize())}.</p><ul class="sides">{said}</ul>',
        *(_tried(side) for side in sides if len(side.tried) > 1),
        '<h2>Where</h2><p>Distances from the model in float64 in nats, rms.</p><div class="tables">',
        _binned("By probability in float64", scored, scored.reference.exp(), PROBABILITIES),
        _binned("By position in the response", scored, scored.position.double(), _powers(scored)),
        _by("By turn", scored, scored.turn, str) if scored.turn.unique().numel() > 1 else "",
        _by("By token", scored, scored.token_id, lambda i: f"{i} {_quoted(decode(i))}"),
        _by("By response (row of the file)", scored, scored.row, str) if found.responses > 1 else "",
        "</div>",
        _worst(scored, decode),
    ]
    head = (
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'sha256-{digest}'; "
        f'img-src data:"/><link rel="icon" href="data:,"/><title>{_text(title)}</title><style>{style}</style>'
    )
    body = f'<main id="audit">{"".join(parts)}</main>'
    return f"{BEGINNING}{head}</head><body>{body}</body></html>\n"


def _text(words: str) -> str:
    return html.escape(printable(words))


def _quoted(words: str) -> str:
    spelled = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in words)
    return f"“{spelled}”"


def _mark(side: Side) -> str:
    return f'<span class="mark" aria-hidden="true">{"✓" if side.is_right else "✗"}</span>'


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML; the first column is words."""

    def row(cells: Sequence[str]) -> str:
        return f'<tr><th scope="row">{cells[0]}</th>{"".join(f"<td>{cell}</td>" for cell in cells[1:])}</tr>'

    columns = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(map(row, rows))
    table = f"<table><caption>{_text(caption)}</caption><thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll" tabindex="0">{table}</div>'


def _advice(side: Side) -> str:
    return f'<p class="advice">To do: {_text(side.advice)}.</p>' if side.advice else ""


def _tried(side: Side) -> str:
    whole = max(t.left for t in side.tried) or 1.0
    rows = [
        (
            f"<b>{_text(t.words)}</b>" if t.explains else _text(t.words),
            f"{t.left:.3g}",
            _bar(t.left / whole, f"{t.left / whole:.0%} of the longest bar"),
        )
        for t in side.tried
    ]
    about = (
        f"<p>The rms distance of {side.tried_tokens:,} tokens from each explanation, the best first. In bold: it "
        "leaves rounding.</p>"
    )
    table = _table("", ("the model, but", "left, nats rms", ""), rows)
    title = f"What explains the {side.name}" if side.tried[0].explains else f"Nothing explains the {side.name}"
    return f"<h2>{title}</h2>{about}{table}"


def _bar(share: float, label: str) -> str:
    inside = f'<rect width="{max(1.0, BAR * share):.1f}" height="10"/>'
    return f'<svg class="bar" width="{BAR}" height="10" role="img" aria-label="{label}">{inside}</svg>'


def _powers(scored: Scored) -> tuple[float, ...]:
    return (0.0, *(2.0**k for k in range(int(scored.position.max()).bit_length() + 1)))


def _binned(caption: str, scored: Scored, key: Tensor, edges: Sequence[float]) -> str:
    rows = []
    for low, high in pairwise(edges):
        within = (key >= low) & ((key < high) | ((high == edges[-1]) & (key <= high)))
        if within.any():
            last = high - 1 if edges[-1] > 1.0 else high  # positions are whole numbers
            rows.append([f"{low:g}" if last == low else f"{low:g} to {last:g}", *_distances(scored, within)])
    return _table(caption, ("", *DISTANCES), rows)


def _by(caption: str, scored: Scored, key: Tensor, name: Callable[[int], str]) -> str:
    """A row for each value of `key`: all of them in order, or those with the most of the squared distance first."""
    values, of = key.unique(return_inverse=True)
    order = torch.arange(len(values))
    if len(values) > WORST:
        caption = f"{caption}: the {WORST} of {len(values):,} with most of the distance"
        summed = torch.zeros(len(values), dtype=torch.float64)
        for side in DISTANCES[1:]:
            summed.index_add_(0, of, _distance(scored, side).nan_to_num(0.0, 0.0, 0.0).square())
        order = summed.argsort(descending=True, stable=True)[:WORST]
    rows = [[_text(name(int(values[i]))), *_distances(scored, of == i)] for i in order.tolist()]
    return _table(caption, ("", *DISTANCES), rows)


def _distance(scored: Scored, side: str) -> Tensor:
    values: Tensor = getattr(scored, side)
    return values - scored.reference


def _distances(scored: Scored, within: Tensor) -> list[str]:
    found = [f"{int(within.sum()):,}"]
    for side in DISTANCES[1:]:
        distance = _distance(scored, side)[within]
        finite = distance[distance.isfinite()]
        found.append(f"{float(finite.square().mean().sqrt()):.2e}" if len(finite) else "none")
    return found


def _worst(scored: Scored, decode: Decode) -> str:
    far = torch.maximum(*(_distance(scored, side).abs().nan_to_num(math.inf, math.inf) for side in DISTANCES[1:]))
    order = far.argsort(descending=True, stable=True)[:WORST].tolist()
    columns = (scored.row, scored.position, scored.token_id, scored.reference, scored.sampler, scored.trainer)
    rows = []
    for i in order:
        row, position, token, *logps = (column[i].item() for column in columns)
        text = _text(f"{token} {_quoted(decode(int(token)))}")
        rows.append([text, str(row), str(position), *(f"{v:.6g}" if math.isfinite(v) else "none" for v in logps)])
    head = ("token", "row", "position", "float64", "sampler", "trainer")
    return (
        f"<h2>The {len(rows)} tokens farthest from the model in float64</h2>{_table('Log-probs in nats', head, rows)}"
    )
