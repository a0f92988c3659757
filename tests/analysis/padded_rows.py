"""Recorded tokens as the padded matrices that frameworks work on, and random ones to compare formulas on."""

import numpy as np
import pandas as pd

from ppo_repro.analysis.clipping.update_rows import ClipRule, IterationRows
from tests.analysis.clipping.rows import RULE, make_item

PAD = np.nan  # a formula that forgets its mask gives NaN


class Padded:
    """One step, or the whole rollout, as matrices [responses, width], right-padded, with a mask."""

    def __init__(self, frame: pd.DataFrame, width: int) -> None:
        groups = [part for _, part in frame.groupby("sequence", sort=True)]
        self.mask = np.array([[t < len(part) for t in range(width)] for part in groups])
        names = {"g": "rollout_logprobs", "p": "old_logprobs", "n": "new_logprobs", "A": "advantages"}
        names |= {"ref": "ref_logprobs", "H": "new_entropies", "v": "new_values", "v_old": "values", "R": "returns"}
        for short, name in names.items():
            if name in frame:
                rows = [[*part[name], *[PAD] * (width - len(part))] for part in groups]
                setattr(self, short, np.array(rows, dtype=np.float64))

    def tokens(self, values: np.ndarray) -> np.ndarray:
        return values[self.mask]

    def mean(self, values: np.ndarray) -> float:
        """masked_mean over all tokens."""
        return float(self.tokens(values.astype(float)).sum() / self.mask.sum())

    def rows(self, values: np.ndarray) -> np.ndarray:
        """masked_mean of each response."""
        return np.array([row[m].astype(float).mean() for row, m in zip(values, self.mask, strict=True)])


def padded_steps(item: IterationRows) -> list[Padded]:
    width = int(item.tokens.groupby("sequence").size().max())
    return [Padded(part, width) for _, part in item.rows.groupby(["epoch", "minibatch"], sort=True)]


def padded_rollout(item: IterationRows) -> Padded:
    return Padded(item.tokens, int(item.tokens.groupby("sequence").size().max()))


def random_item(seed: int, rule: ClipRule = RULE, scale: float = 0.4) -> IterationRows:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 6, 5)
    count = int(lengths.sum())
    log_ratios = generator.normal(0, scale, (2, count))
    old = -generator.exponential(1.0, count)
    values = generator.normal(size=count), generator.normal(size=(2, count)), generator.normal(size=count)
    advantages = generator.normal(size=count) * (generator.random(count) < 0.8)
    return make_item(list(lengths), log_ratios, advantages, rule, 2, old, generator.normal(0, 0.2, count), values)
