"""What a mixture of experts needs while it computes, by arithmetic alone: no torch.

A token takes k experts. Which ones they are decides where its rows lie, not how many bytes they are.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mixture:
    """The mixtures of a model, one in each of `layers`, all alike."""

    layers: int
    experts: int
    per_token: int
    intermediate: int  # width of one expert
    normalised: bool  # whether the routing weights are those of the chosen experts alone


def saved_bytes(m: Mixture, hidden: int, tokens: int, number: int) -> int:
    """What one mixture keeps of `tokens` for its backward pass, beside its input.

    Of each of a token's experts: input, gate and up, activation, product and result. `number`: see `models.Saved`.
    """
    k = m.per_token
    floats = k * (2 * hidden + 4 * m.intermediate)
    if number == 0:
        # routing weights in float32 and, of the softmax, float64; int64: experts, and the order of the rows both ways
        return tokens * (4 * (floats + k) + 8 * (k if m.normalised else m.experts) + 3 * 8 * k)
    # torch, expert by expert: probabilities, routing weights by row and, before they are divided, by token with their
    # sum, and the weighted results; int64: experts, and of each row its token and its rank there
    small = m.experts + k + (k + 1 if m.normalised else 0)
    return tokens * (number * (floats + k * hidden) + 4 * small + 3 * 8 * k)


def workspace_bytes(m: Mixture, hidden: int, tokens: int, operand: int) -> int:
    """What one mixture needs while it computes; `operand` are the bytes of an input's number in exact products.

    Gradients of its widest activations, and a rounded operand of one expert, which may have all tokens.
    """
    rows = 4 * m.per_token * (3 * m.intermediate + 2 * hidden)
    return tokens * (rows + 4 * 2 * hidden + operand * (m.intermediate + hidden))
