"""A reward that requires looking ahead: ending early costs the reward of further letters."""


def score(prompt: str, response: str, answer: str) -> float:
    """1 for every `a` after a prompt that begins with x, or `b` after one that begins with y."""
    return float(response.count("a" if prompt.startswith("x") else "b"))
