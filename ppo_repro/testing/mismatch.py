"""The mismatch of sampler and trainer, from a recorded run or from a dump of another training stack.

Tokens are the rows of a frame with the columns iteration, sequence, position, sampler and trainer: float32 log-probs in
nats. Never imports torch.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from ppo_repro.testing.dumps import Names, impossible, read_dump

ZEROS = 0.5  # of the tokens may have a log-prob of exactly 0 on both sides
COLUMNS = ["iteration", "sequence", "position", "sampler", "trainer"]


def bits(value: float | np.float32) -> str:
    """The float32 bit pattern, hexadecimal."""
    return f"{int(np.float32(value).view(np.uint32)):08x}"


def unequal_bits(a: npt.ArrayLike, b: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Where two float32 arrays differ in any bit."""
    left, right = (np.ascontiguousarray(x, np.float32).view(np.uint32) for x in (a, b))
    return np.asarray(left != right)


def token(pairs: pd.DataFrame, index: int) -> str:
    """Which token a row is, both values and their float32 bits."""
    iteration, sequence, position, *values = pairs.iloc[index][COLUMNS].tolist()
    sides = zip(("sampler", "trainer"), values, strict=True)
    both = ", ".join(f"{name} {float(value)!r} (bits {bits(value)})" for name, value in sides)
    return f"iteration {iteration:.0f}, sequence {sequence:.0f}, position {position:.0f}: {both}"


def measures(pairs: pd.DataFrame) -> dict[str, tuple[float, int]]:
    """Each measure of the tokens with two finite log-probs, and the row of a token to show; NaN for means of none.

    With delta = trainer - sampler in float64: `mean_abs` and `max_abs` of |delta|, `k3` the mean of expm1(delta) -
    delta (Schulman, 2020), `frac_unequal` the share of tokens that differ in any bit. `nonfinite` counts the tokens
    without two finite log-probs.
    """
    finite = np.isfinite(pairs["sampler"]) & np.isfinite(pairs["trainer"])
    delta = (pairs["trainer"].astype(np.float64) - pairs["sampler"])[finite]
    unequal = unequal_bits(pairs["sampler"], pairs["trainer"]) & finite
    worst = int(delta.abs().idxmax()) if len(delta) else -1
    return {
        "mean_abs": (float(delta.abs().mean()), worst),
        "max_abs": (float(delta.abs().max()), worst),
        "k3": (float((np.expm1(delta) - delta).mean()), worst),
        "frac_unequal": (float(unequal[finite].mean()), int(np.argmax(unequal)) if len(pairs) else -1),
        "nonfinite": (float((~finite).sum()), int(np.argmin(finite)) if len(pairs) else -1),
    }


def suspicious(pairs: pd.DataFrame) -> str:
    """Why these cannot be the log-probs of two sides, in words; "" if they can."""
    for name in ("sampler", "trainer"):
        if why := impossible(pairs[name].to_numpy()):
            return f"{name}: {why}"
    both = (pairs["sampler"] == 0) & (pairs["trainer"] == 0)
    if both.mean() > ZEROS:
        return f"both log-probs of {both.sum()} of {len(both)} tokens are exactly 0: is padding in it? name the mask"
    return ""


def run_pairs(run_dir: Path | str) -> pd.DataFrame:
    """`rollout_logprobs` and `old_logprobs` of a recorded run; UserError if it is damaged."""
    from ppo_repro.records import reader

    columns = ["iteration", "sequence", "position", "rollout_logprobs", "old_logprobs"]
    return reader.read_tokens(run_dir, columns=columns)[columns].set_axis(COLUMNS, axis=1).reset_index(drop=True)


def dump_pairs(source: Path | str | pd.DataFrame, names: Names | str | None = None) -> pd.DataFrame:
    """The tokens of a dump that count; the sequence is the row of the response, from 0. UserError names the row."""
    frames = [pd.DataFrame(columns=COLUMNS, dtype=np.float32)]
    for r in read_dump(source, names):
        positions = np.flatnonzero(r.counts)
        sides = {"sampler": r.sampler[positions], "trainer": r.trainer[positions]}
        numbers = {"iteration": r.iteration, "sequence": r.row - 1, "position": positions}
        frames.append(pd.DataFrame(numbers | sides))
    return pd.concat(frames[1:] or frames, ignore_index=True)
