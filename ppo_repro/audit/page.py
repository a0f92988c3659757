"""An audit as one HTML page that needs no network and no script."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from ppo_repro.audit.judge import Audit, Side
from ppo_repro.audit.words import lines, sentence, verdict
from ppo_repro.output import printable

WORST = 20  # rows of the tables that begin with the farthest
PROBABILITIES = (0.0, 0.01, 0.1, 0.5, 0.9, 0.99, 1.0)
SIDES = ["sampler", "trainer"]
Decode = Callable[[int], str]


def page(found: Audit, title: str, decode: Decode, skipped: int = 0) -> str:
    """The page. decode: the text of a token id."""
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    sides = (found.sampler, found.trainer)
    tokens = found.tokens.assign(token=[f"{i} {_quoted(decode(i))}" for i in found.tokens["token_id"]])
    powers = [2**k - 1 for k in range(int(tokens["position"].max()).bit_length() + 1)]
    tables = {
        "By probability in float64": pd.cut(np.exp(tokens["reference"]), PROBABILITIES, include_lowest=True),
        "By position in the response": pd.cut(tokens["position"], [-1, *powers]),
        "By turn": tokens["turn"],
        "By token": tokens["token"],
        "By response (row of the file)": tokens["row"],
    }
    parts = [
        f"<h1>{_text(title)}</h1><p>{_text(lines(found, skipped)[0])}.</p>",
        f'<p class="verdict">{_text(verdict(found).capitalize())}.</p>',
        f'<ul class="sides">{"".join(_verdict_of(side, found.responses) for side in sides)}</ul>',
        *(_explanations(side) for side in sides if len(side.tried) > 1),
        '<h2>Where</h2><p>Distances from the model in float64 in nats, rms.</p><div class="tables">',
        *(_distances(caption, tokens, key) for caption, key in tables.items() if key.nunique() > 1),
        "</div>",
        _worst(tokens),
    ]
    head = (
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'sha256-{digest}'; "
        f'img-src data:"/><link rel="icon" href="data:,"/><title>{_text(title)}</title><style>{style}</style>'
    )
    body = f'<main id="audit">{"".join(parts)}</main>'
    return f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>{head}</head><body>{body}</body></html>\n'


def _text(words: str) -> str:
    return html.escape(printable(words))


def _quoted(words: str) -> str:
    return f"“{''.join(c if c.isprintable() else c.encode('unicode_escape').decode() for c in words)}”"


def _verdict_of(side: Side, responses: int) -> str:
    kind, mark = ("right", "✓") if side.is_right else ("wrong", "✗")
    advice = f'<p class="advice">To do: {_text(side.advice)}.</p>' if side.advice else ""
    words = _text(sentence(side, responses))
    return f'<li class="{kind}"><span class="mark" aria-hidden="true">{mark}</span>{words}{advice}</li>'


def _table(caption: str, frame: pd.DataFrame) -> str:
    """A frame of numbers and words; the first column heads its rows."""
    columns = "".join(f'<th scope="col">{_text(name)}</th>' for name in frame.columns)
    rows = "".join(
        f'<tr><th scope="row">{_text(str(first))}</th>{"".join(f"<td>{_number(x)}</td>" for x in others)}</tr>'
        for first, *others in frame.itertuples(index=False)
    )
    head = f"<caption>{_text(caption)}</caption><thead><tr>{columns}</tr></thead>"
    return f'<div class="scroll" tabindex="0"><table>{head}<tbody>{rows}</tbody></table></div>'


def _number(x: float) -> str:
    return ("none" if np.isnan(x) else f"{x:.4g}") if isinstance(x, float) else f"{x:,}"


def _explanations(side: Side) -> str:
    tried = [(t.words, t.left, t.left / max(side.rms, 1e-300)) for t in side.tried]
    title = f"What explains the {side.name}" if side.tried[0].explains else f"Nothing explains the {side.name}"
    caption = f"The rms distance of {side.tried_tokens:,} tokens from each explanation, the best first"
    table = _table(caption, pd.DataFrame(tried, columns=["the model, but", "left, nats rms", "of the distance"]))
    return f"<h2>{title}</h2>{table}"


def _distances(caption: str, tokens: pd.DataFrame, key: pd.Series) -> str:
    """A row for each value of `key`: all of them in order, or those with the most of the squared distance first."""
    squares = tokens[SIDES].sub(tokens["reference"], axis=0).replace([np.inf, -np.inf], np.nan) ** 2
    groups = squares.groupby(key, observed=True)
    found = groups.mean() ** 0.5
    found.insert(0, "tokens", groups.size())
    if len(found) > WORST:
        caption = f"{caption}: the {WORST} of {len(found):,} with most of the distance"
        found = found.loc[groups.sum().sum(axis=1).sort_values(ascending=False, kind="stable").index[:WORST]]
    return _table(caption, found.rename_axis("").reset_index())


def _worst(tokens: pd.DataFrame) -> str:
    far = tokens[SIDES].sub(tokens["reference"], axis=0).abs().fillna(np.inf).max(axis=1)
    columns = ["token", "row", "position", "reference", *SIDES]
    frame = tokens.loc[far.sort_values(ascending=False, kind="stable").index[:WORST], columns]
    table = _table("Log-probs in nats", frame.rename(columns={"reference": "float64"}))
    return f"<h2>The {len(frame)} tokens farthest from the model in float64</h2>{table}"
