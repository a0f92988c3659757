"""A reward of whole responses: how many letters to say, and so when to stop, is what has to be looked ahead for."""


def score(prompt: str, response: str, answer: str) -> float:
    """1 for every `a` after a prompt that ends in x, or `b` after y; less 1 for every other letter."""
    wanted = response.count("a" if prompt.endswith("x") else "b")
    return float(wanted - (len(response) - wanted))
