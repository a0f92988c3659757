"""Define a task of products with a calculator: the model writes `12*34=`, and the environment answers `408`."""

import re

SIDE = 12
_ASKED = re.compile(r"(\d{1,6})\*(\d{1,6})=")


def prompts():
    """Return every product of two numbers below SIDE as a prompt, with the right conversation as its answer."""
    return [
        {"prompt": f"{a} times {b}:", "answer": f"{a}*{b}={a * b}", "key": f"{a}*{b}"}
        for a in range(SIDE)
        for b in range(SIDE)
    ]


def step(transcript):
    """Return the calculator's answer to the first turn, which has to end with a product; None ends the episode."""
    asked = _ASKED.fullmatch(transcript.last)
    if asked is None or len(transcript.turns) > 1:
        return None
    return str(int(asked[1]) * int(asked[2]))


def score(transcripts):
    """Return 1 for the right product without additions, 0.2 for any product, else 0."""
    return [1.0 if t.text == t.answer and len(t.turns) == 3 else 0.2 * (len(t.turns) == 3) for t in transcripts]
