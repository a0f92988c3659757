"""Define a task of sums of two numbers of two digits, after one worked example."""

import re

LOW, HIGH = 10, 99
EXAMPLE = "12 + 25 = 37\n"


def prompts():
    """Return every ordered pair of operands but the example's, 8,099 in all."""
    return [
        {"prompt": f"{EXAMPLE}{a} + {b} =", "answer": str(a + b), "key": f"{a}+{b}"}
        for a in range(LOW, HIGH + 1)
        for b in range(LOW, HIGH + 1)
        if (a, b) != (12, 25)
    ]


def score(transcripts):
    """Return 1 if the line has the right sum and nothing else, else 0."""
    return [float(re.fullmatch(r" ?(\d+)\n?", t.text) is not None and t.text.strip() == t.answer) for t in transcripts]
