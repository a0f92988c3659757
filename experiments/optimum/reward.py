"""Define a reward that requires looking ahead: an early end loses the reward of further letters."""


def score(prompt: str, response: str, answer: str) -> float:
    """Return the number of letters `a` after a prompt that begins with x, or of `b` after one that begins with y."""
    return float(response.count("a" if prompt.startswith("x") else "b"))
