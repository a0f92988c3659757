"""The reward: a number for every response. It must follow from prompt, response and answer alone."""


def score(prompt: str, response: str, answer: str) -> float:
    """Return 1 for the right number, 0.2 for another number, 0 for anything else."""
    text = response.strip()
    if text == answer:
        return 1.0
    return 0.2 if text.isdecimal() else 0.0
