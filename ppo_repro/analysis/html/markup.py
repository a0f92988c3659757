"""Make HTML from text: escaping, elements, readable numbers, tables."""

from __future__ import annotations

import difflib
import html
import math
import re
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

MAX_ROWS = 120

# characters that HTML does not allow, and characters that reorder or hide the text around them
_HIDDEN = {*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200B, 0x200E, 0x200F}
_HIDDEN |= {0x2028, 0x2029, 0x2060, 0xFEFF, 0xFFFE, 0xFFFF}
_VISIBLE_NAMES = {code: f"⟨U+{code:04X}⟩" for code in sorted(_HIDDEN)} | {0x0A: "↵\n", 0x09: "⇥"}


def escape(text: object) -> str:
    """Return text that is safe in elements and quoted attributes; names replace invisible characters, as ⟨U+202E⟩."""
    return html.escape(str(text).translate(_VISIBLE_NAMES), quote=True)


def prose(text: str) -> str:
    """Return a sentence as HTML; text in `backticks` becomes code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def sentence(text: str) -> str:
    """Return text with a capital first letter, except of a field such as `rollout.engine`, and a full stop."""
    first = text[0] if "." in text.split()[0] else text[0].upper()
    return f"{first}{text[1:]}{'' if text.endswith('?') else '.'}"


def element(tag: str, content: str = "", **attributes: str | float | bool) -> str:
    """Return `<tag name="value">content</tag>`. Values are escaped, content is not. `class_` is written as class."""
    words = [tag]
    for name, value in attributes.items():
        if value is not False:
            words.append(f'{name.rstrip("_").replace("_", "-")}="{escape("" if value is True else value)}"')
    return f"<{' '.join(words)}>{content}</{tag}>"


def number(value: object, digits: int = 4) -> str:
    """Format a number for readers: grouped thousands, `digits` significant digits, a dash for NaN."""
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, int | np.integer):
        return f"{int(value):,}"
    if not isinstance(value, float | np.floating):
        return str(value)
    plain = float(value)
    if math.isnan(plain):
        return "–"
    if not 1 <= abs(plain) < 1e15:
        return f"{plain:.{digits}g}"
    fixed = f"{plain:,.{max(0, digits - 1 - math.floor(math.log10(abs(plain))))}f}"
    return fixed.rstrip("0").rstrip(".") if "." in fixed else fixed


def percentage(count: int, whole: int) -> str:
    """Format a share, for example `33 %`; a small share has more digits, and no share is rounded to 0 or 100."""
    if whole == 0 or count in (0, whole):
        return "100 %" if count and count == whole else "0 %"
    percent = 100 * count / whole
    if percent < 10:
        return f"{percent:.2g} %"
    return f"{percent:.0f} %" if percent < 99 else f"{min(percent, 99.99):.2f} %"


def differences(a: str, b: str) -> list[tuple[Literal["=", "-", "+"], str]]:
    """Return the parts of two texts, cut at words: in both (=), in `a` alone (-), in `b` alone (+)."""
    before, after = (re.findall(r"\s*(?:\w+|[^\w\s])|\s+", text) for text in (a, b))
    parts: list[tuple[Literal["=", "-", "+"], str]] = []
    for kind, a0, a1, b0, b1 in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        removed, added = "".join(before[a0:a1]), "".join(after[b0:b1])
        parts += [("=", removed)] if kind == "equal" else [("-", removed), ("+", added)]
    return [part for part in parts if part[1]]


def evenly_spread(count: int, limit: int) -> npt.NDArray[np.int64]:
    """Return up to `limit` of the indices 0 to count - 1, evenly spread, with the first and the last."""
    if count <= limit:
        return np.arange(count, dtype=np.int64)
    return np.unique(np.linspace(0, count - 1, limit).round().astype(np.int64))


class Html(str):
    """HTML that `table` does not escape in a cell.

    The column needs dtype object, or pandas converts the cell to str.
    """


def table(frame: pd.DataFrame, caption: str, limit: int = MAX_ROWS) -> str:
    """Return a frame as an HTML table of at most `limit` evenly spread rows; the caption counts the rows left out."""
    rows = evenly_spread(len(frame), limit)
    if len(rows) < len(frame):
        caption = f"{caption} ({len(rows)} of {len(frame):,} rows, evenly spread)"
    words = [name for name in frame.columns if any(isinstance(value, str) for value in frame[name])]
    head = "".join(
        element("th", escape(name), scope="col", class_="" if name in words else "number") for name in frame.columns
    )
    body = [element("tr", "".join(_cell(frame.iat[int(i), column]) for column in range(frame.shape[1]))) for i in rows]
    return element(
        "table",
        element("caption", escape(caption)) + element("thead", element("tr", head)) + element("tbody", "".join(body)),
    )


def _cell(value: object) -> str:
    if isinstance(value, str):
        return element("td", element("bdi", value if isinstance(value, Html) else escape(value), dir="auto"))
    return element("td", escape(number(value)), class_="number")
