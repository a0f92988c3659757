"""One iteration's `tokens` and `sequences` made from cut texts, and strategies for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from hypothesis import strategies as st

Cuts = list[list[str]]  # the pieces of every response


def frames(cuts: Sequence[Sequence[str]], ended: bool = True, seed: int = 0) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Tokens and sequences of one iteration; each response gets an end token if `ended`; random numbers."""
    generator = np.random.default_rng(seed)
    rows = []
    for sequence, pieces in enumerate(cuts):
        chars = octets = 0
        for position, piece in enumerate([*pieces, *[""] * ended]):
            size = len(piece.encode())
            # the recorded word: a token without text is one of its own; how others are counted does not matter here
            rows.append((0, sequence, position, len(piece), chars, chars + len(piece), octets, octets + size, 0))
            chars, octets = chars + len(piece), octets + size
    names = [
        "iteration",
        "sequence",
        "position",
        "token_id",
        "char_start",
        "char_end",
        "byte_start",
        "byte_end",
        "sub_idx",
    ]
    tokens = pd.DataFrame(rows, columns=names).astype("int32")
    count = len(tokens)
    for name in ("old_logprobs", "ref_logprobs"):
        tokens[name] = -generator.exponential(1.0, count).astype(np.float32)
    tokens["rollout_logprobs"] = tokens["old_logprobs"]
    for name in ("entropies", "ref_kl"):
        tokens[name] = generator.exponential(1.0, count).astype(np.float32)
    for name in ("kl_penalties", "rewards", "advantages"):
        tokens[name] = generator.standard_normal(count).astype(np.float32)
    sequences = pd.DataFrame(
        {
            "iteration": np.int32(0),
            "sequence": np.arange(len(cuts), dtype=np.int32),
            "prompt_key": [f"p{i // 2}" for i in range(len(cuts))],
            "response": ["".join(pieces) for pieces in cuts],
            "scores": generator.standard_normal(len(cuts)),
        }
    )
    return tokens, sequences


def cuts(max_responses: int = 5) -> st.SearchStrategy[Cuts]:
    """Responses of letters, digits, signs, white space and characters of several bytes, cut anywhere."""
    pieces = st.text(st.sampled_from("ab 1 2\n,é世"), min_size=1, max_size=4)
    return st.lists(st.lists(pieces, max_size=8), min_size=1, max_size=max_responses)
