"""What of a response is its answer, and whether that is the expected one."""

from __future__ import annotations

import re
from fractions import Fraction

from ppo_repro.config.tasks import AnswerExtraction

# a minus sign belongs to a number unless it stands behind a letter, a digit or a bracket: 3-2 ends with 2
_NUMBER = re.compile(r"(?:(?<![\w)\]])-)?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?")
_TAGS = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.S)


def extracted(response: str, extraction: AnswerExtraction) -> str | None:
    """The answer in a response: all of it, its last number without commas, or the text in its last answer tags.

    None where there is no such thing.
    """
    if extraction == "exact":
        return response
    found = (_NUMBER if extraction == "last_number" else _TAGS).findall(response)
    if not found:
        return None
    return str(found[-1]).replace(",", "") if extraction == "last_number" else str(found[-1])


def matches(response: str, answer: str) -> bool:
    """Whether the response equals the answer; surrounding white space does not count."""
    return response.strip() == answer.strip()


def is_answer(response: str, answer: str, extraction: AnswerExtraction) -> bool:
    """Whether the answer in a response is the expected one; of numbers their value counts, so that 85.0 is 85."""
    found = extracted(response, extraction)
    if found is None:
        return False
    if extraction != "last_number":
        return matches(found, answer)
    expected = _NUMBER.fullmatch(answer.strip())
    return expected is not None and Fraction(found) == Fraction(expected.group().replace(",", ""))
