r"""Read numbers as people and models write them, for answers that are compared by value.

| written | value |
|---|---|
| `1,234.50` `1{,}234.5` `1\,234.5` `1'234.5` `1_234.5`, or with narrow or unbreakable spaces | 1234.5 |
| `12,34,567` `1.234.567`: groups in India, and dots in two places or more | 1234567, 1234567 |
| `-5` `−5` (Unicode minus) `–5` (en dash) `‑5` (other hyphens) `-$5` `$-5` `-₹5` | -5 |
| `.5` `1/2` `½` `\frac{1}{2}` `\frac12` `\frac{-1}{-2}` `5e-1` `5 × 10^-1` `5 \times 10^{-1}` `5 · 10⁻¹` | 1/2 |
| `2½` `2\frac{1}{2}`: a whole number and a fraction without a space | 5/2 |
| `3-2` `10–12` `(4)-2` `5%-6%` `5€–7€`: behind a digit, letter, bracket or unit a sign subtracts | 2, 12, 2, 6, 7 |
| `50%` `$9` `9 km` `9in` `9 m/s2` `9 \text{ m}^2`: units, squares and cubes of units do not count | 50, 9, 9, 9, 9, 9 |
| `3,5` `1 000` `12/05/2020` `1 1/2` `2^10`: two numbers or more, of which the last one counts | 5, 0, 2020, 1/2, 10 |
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from fractions import Fraction

_SIGN = "[-−–‐‑﹣－+]"
_MONEY = "[$€£¥₹₩₽]"
_BETWEEN_GROUPS = r"(?:,|\{,\}|\\[,;:! ]|[\u00a0\u2009\u202f'’_])"
# exponents behind a letter or a brace, and squares and cubes of units
_EXPONENTS = re.compile(
    rf"(?<=[A-Za-z}}])\^(?:{_SIGN}?[0-9]|\{{{_SIGN}?[0-9]\}})(?![0-9])"
    r"|(?<=[0-9])( ?(?:[A-Za-zµ]+[/·])*(?:[cdkmnµ]?m|ft|in|yd|mi|s|h))[23](?![\w./]|\s?[=^*])"
)
_NUMBER = re.compile(
    rf"""
    (?:(?<![\w)\]}}%$€£¥₹₩₽])(?P<sign>{_SIGN})\\?{_MONEY}?|(?<![\w)\]}}%])\\?{_MONEY}(?P<behind>{_SIGN}))?
    (?:
        (?P<mixed>[0-9]{{1,9}})?\\[cdt]?frac\s?(?:\{{\s?(?P<top>{_SIGN}?[0-9]{{1,999}})\s?\}}|(?P<top_digit>[0-9]))
         \s?(?:\{{\s?(?P<bottom>{_SIGN}?0{{,99}}[1-9][0-9]{{,999}})\s?\}}|(?P<bottom_digit>[1-9]))
        |(?<![\w/⁄.,])(?P<over>[0-9]+)\s?[/⁄]\s?(?P<under>0*[1-9][0-9]*)(?![0-9_/⁄]|[.,][0-9])
        |(?P<before>[0-9]{{1,9}})?(?P<vulgar>[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞])
        |(?:(?P<whole>[0-9]{{1,3}}(?:{_BETWEEN_GROUPS}[0-9]{{3}})+(?![0-9])|[0-9]{{1,2}}(?:,[0-9]{{2}})+,[0-9]{{3}}(?![0-9])
              |[0-9]{{1,3}}(?:\.[0-9]{{3}}){{2,}}(?![0-9.])|[0-9]+)(?P<part>\.[0-9]+)?
           |(?<![\w.])(?P<alone>\.[0-9]+))
         (?:[eE](?P<power>[-−+]?[0-9]{{1,3}})(?!\w|\.[0-9])
            |\s?(?:×|·|x|\*|\\times|\\cdot)\s?10\s?(?:
                (?:\^|\*\*)\s?(?:\{{(?P<braced>[-−+]?[0-9]{{1,3}})\}}|(?P<raised>[-−+]?[0-9]{{1,3}})(?![0-9]))
                |(?P<small>[⁻⁺]?[⁰¹²³⁴⁵⁶⁷⁸⁹]{{1,3}})))?
    )
    """,
    re.VERBOSE,
)
_PLAIN = str.maketrans("−–‐‑﹣－⁻⁺⁰¹²³⁴⁵⁶⁷⁸⁹", "-------+0123456789")
LONGEST = 4000  # digits of a number that is compared by value; Python reads 4,300 at most


def _text(match: re.Match[str]) -> str:
    """Return a number in the form that `Fraction` reads."""
    parts = {name: value.translate(_PLAIN) for name, value in match.groupdict().items() if value is not None}
    sign = (parts.get("sign") or parts.get("behind") or "").replace("+", "")
    if "over" in parts:
        return f"{sign}{parts['over']}/{parts['under']}"
    if "vulgar" in parts:
        return _fraction(sign, parts.get("before"), *unicodedata.normalize("NFKC", parts["vulgar"]).split("⁄"))
    for top, bottom in itertools.product(("top", "top_digit"), ("bottom", "bottom_digit")):
        if top in parts and bottom in parts:
            return _fraction(sign, parts.get("mixed"), parts[top], parts[bottom])
    whole = re.sub(r"[^0-9]", "", parts.get("whole", "")) or "0"
    powers = [parts[name] for name in ("power", "braced", "raised", "small") if name in parts]
    return sign + whole + parts.get("part", parts.get("alone", "")) + "".join(f"e{power}" for power in powers)


def _fraction(sign: str, whole: str | None, top: str, bottom: str) -> str:
    minus = "-" if (sign + top + bottom).count("-") % 2 else ""
    top, bottom = top.lstrip("-+"), bottom.lstrip("-+")
    return f"{minus}{int(whole) * int(bottom) + int(top) if whole else top}/{bottom}"


def last_number(text: str) -> str | None:
    """Return the last number in a text, written with digits, `-`, `.`, `/` and `e` alone; None if there is none."""
    matches = list(_NUMBER.finditer(_EXPONENTS.sub(r"\1", text)))
    return _text(matches[-1]) if matches else None


def is_number(number: str, answer: str) -> bool:
    """Return whether a result of `last_number` has the value of an answer, which must be one number, maybe with `$`."""
    match = _NUMBER.fullmatch(answer.strip().removeprefix("$"))
    if match is None:
        return False
    expected = _text(match)
    if max(len(number), len(expected)) > LONGEST:
        return number == expected
    return Fraction(number) == Fraction(expected)
