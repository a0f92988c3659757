"""Exchange the tokens that top-k and top-p kept: a deterministic SGLang server writes them, the run reads them."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ppo_repro.sampling.draw import DrawnTokens

KEPT = "ppo_repro_kept"  # name in the answer
Entry = list[Any]  # base64 of the bits of the kept tokens, log-prob among these tokens, log of their mass


def shortest(number: float) -> float:
    """Return the shortest decimal number with the same float32, because SGLang stores `top_p` as a float32."""
    return float(str(np.float32(number)))


def written(sample: DrawnTokens) -> list[Entry]:
    """Return one JSON entry for each row of a sample from a cut distribution; JSON preserves its float32 numbers."""
    sets = [base64.b64encode(row.tobytes()).decode("ascii") for row in sample.kept_tokens.numpy()]
    numbers = zip(sample.logprobs.tolist(), sample.log_kept_mass.tolist(), strict=True)
    return [[kept, *pair] for kept, pair in zip(sets, numbers, strict=True)]


def read(entries: Any, tokens: Sequence[int], vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return logprobs [T], log_kept_mass [T] (nats) and kept_tokens [T, ceil(V/8)] of T sampled tokens.

    Raises ValueError unless `written` made `entries` for these tokens.
    """
    if not isinstance(entries, list) or len(entries) != len(tokens):
        raise ValueError("returned no kept tokens beside those of a cut distribution; is its numerics deterministic?")
    sets = np.zeros((len(tokens), (vocab_size + 7) // 8), np.uint8)
    numbers = np.zeros((len(tokens), 2), np.float32)
    for row, (entry, token) in enumerate(zip(entries, tokens, strict=True)):
        sets[row], numbers[row] = _parsed(entry, sets.shape[1])
        bits = np.unpackbits(sets[row])
        if not bits[token] or bits[vocab_size:].any():
            raise ValueError(f"returned kept tokens without token {token}, which it sampled, or with unknown ones")
    return torch.from_numpy(numbers[:, 0].copy()), torch.from_numpy(numbers[:, 1].copy()), torch.from_numpy(sets)


def _parsed(entry: Any, size: int) -> tuple[np.ndarray, list[float]]:
    if not isinstance(entry, list) or len(entry) != 3 or not isinstance(entry[0], str):
        raise ValueError("returned kept tokens in another form; is its ppo_repro this one?")
    try:
        bits = np.frombuffer(base64.b64decode(entry[0], validate=True), np.uint8)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"returned kept tokens that are no base64 ({error})") from error
    sound = all(isinstance(x, float) and abs(x) < np.inf and float(np.float32(x)) == x for x in entry[1:])
    if len(bits) != size or not sound:
        raise ValueError(f"returned {len(bits)} bytes of kept tokens for {size}, or log-probs that are not float32")
    return bits, entry[1:]
