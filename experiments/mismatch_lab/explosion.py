"""Why does mismatch KL rise during a run? `python -m experiments.mismatch_lab.explosion GRID [--csv FILE]`.

GRID holds deterministic runs with a checkpoint of every iteration. Each policy is rounded to bfloat16 as by
`mismatch.sampler.precision`, and KL(policy || rounded policy) is summed over the vocabulary at every token: of the
responses that the policy gave itself, and of those of the first iteration, which stay the same while the weights move.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from safetensors.torch import load_file
from scipy.stats import spearmanr
from torch import Tensor

from analysis.grids.outcomes import complete_cells
from analysis.grids.table import markdown
from analysis.stats.significance import one_sample, t_interval
from ppo_repro.accuracy import Text, policy_scores
from ppo_repro.config.mismatch import SamplerPrecision
from ppo_repro.disk.earlier import write_csv_over_earlier
from ppo_repro.errors import UserError
from ppo_repro.models.load import load_folder
from ppo_repro.models.networks import make_policy
from ppo_repro.models.precision import precision_of, rounded_view
from ppo_repro.numerics import library
from ppo_repro.numerics.network import Lowered
from ppo_repro.records import reader
from ppo_repro.records.config_file import load_recorded_config

ROUNDING = SamplerPrecision(weights="bfloat16", activations="bfloat16", logits="bfloat16")
AGAINST = ("entropy", "length", "weight_norm")


@dataclass(frozen=True)
class Tokens:
    """A policy's tokens, each float64 [n], nats."""

    kl: Tensor  # KL(policy || rounded policy) over the vocabulary
    entropy: Tensor
    logprobs: Tensor  # float32, as the policy computes them


def kl_of_logits(own: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p || q) = sum_v p (log p - log q) and the entropy of p, float64 [n]; logits [n, V] of p and q."""
    p, q = (x.double().log_softmax(-1) for x in (own, other))
    return (p.exp() * (p - q)).sum(-1), -(p.exp() * p).sum(-1)


def texts_of(run_dir: Path) -> list[Text]:
    """The prompts and responses of each iteration."""
    rows = reader.read_sequences(run_dir, columns=["iteration", "prompt_ids", "response_ids"])
    return [
        Text([list(p) for p in group["prompt_ids"]], [list(r) for r in group["response_ids"]])
        for _, group in rows.groupby("iteration", sort=True)
    ]


def policies(run_dir: Path) -> list[Path]:
    """The weights that sampled each iteration but the first: the checkpoint of the one before; UserError if missing."""
    count = len(reader.read_iterations(run_dir))
    files = [run_dir / "checkpoints" / f"iteration-{i:06d}" / "policy.safetensors" for i in range(1, count)]
    missing = next((path for path in files if not path.is_file()), None)
    if missing is not None:
        raise UserError(f"{missing}: is missing; run with checkpoints.every = 1 and checkpoints.keep = ppo.iterations")
    return files


def of_run(run_dir: Path) -> pd.DataFrame:
    """One row per iteration: kl, kl_same (nats, token means), entropy, length, weight_norm; then of_entropy, of_place.

    kl: of the responses of this iteration, entropy too. kl_same: of those of the first iteration. of_entropy: share of
    the iteration's KL on the half of its tokens with the higher entropy; of_place: on the second half of each response.
    AssertionError where the policy's log-probs are not the recorded ones, bit for bit.
    """
    model, _ = load_folder(run_dir / "checkpoints" / "final")
    config, texts = load_recorded_config(run_dir), texts_of(run_dir)
    recorded = reader.read_tokens(run_dir, columns=["iteration", "sequence", "position", "rollout_logprobs"])
    rows = []
    for iteration, path in enumerate(policies(run_dir), start=1):
        model.load_state_dict(load_file(path), strict=False)  # a tied head has no tensor of its own
        policy = make_policy(model, "deterministic", config.numerics.max_context)
        rounded = rounded_view(policy, Lowered(config.numerics.max_context), precision_of(ROUNDING))
        own, same = (_tokens(policy, rounded, text) for text in (texts[iteration], texts[0]))
        sampled = recorded[recorded["iteration"] == iteration].sort_values(["sequence", "position"])
        assert np.array_equal(own.logprobs.numpy(), sampled["rollout_logprobs"].to_numpy()), "not the recorded policy"
        lengths = [len(response) for response in texts[iteration].responses]
        rows.append(
            {
                "iteration": iteration,
                "kl": float(own.kl.mean()),
                "kl_same": float(same.kl.mean()),
                "entropy": float(own.entropy.mean()),
                "length": float(np.mean(lengths)),
                "weight_norm": math.sqrt(sum(float((p.detach().double() ** 2).sum()) for p in policy.parameters())),
                **shares(own.kl.numpy(), own.entropy.numpy(), lengths),
            }
        )
    return pd.DataFrame(rows)


def _tokens(policy: torch.nn.Module, rounded: torch.nn.Module, text: Text) -> Tokens:
    own, other = (policy_scores(m, text) for m in (policy, rounded))  # type: ignore[arg-type]
    return Tokens(*kl_of_logits(own.logits, other.logits), own.logprobs)


def shares(kl: np.ndarray, entropy: np.ndarray, lengths: Sequence[int]) -> dict[str, float]:
    """Share of the sum of `kl` on tokens above the median entropy, and on those after the middle of their response."""
    place = np.concatenate([np.arange(n) + 0.5 > n / 2 for n in lengths])
    total = float(kl.sum())
    high = entropy > np.median(entropy)
    return {"of_entropy": float(kl[high].sum()) / total, "of_place": float(kl[place].sum()) / total}


def correlations(table: pd.DataFrame, measure: str) -> pd.DataFrame:
    """Spearman's correlation over iterations of `measure` with AGAINST, one row per seed."""
    return pd.DataFrame(
        [
            {name: float(spearmanr(rows[measure], rows[name]).statistic) for name in AGAINST}
            for _, rows in table.groupby("seed", sort=True)
        ]
    )


def shown(values: pd.Series) -> str:
    """Mean and 95 % Student interval over seeds."""
    estimate = one_sample(values.to_numpy(np.float64))
    low, high = t_interval(estimate, 0.95)
    return f"{estimate.mean:.3g} [{low:.3g}, {high:.3g}]"


def report(table: pd.DataFrame) -> str:
    """The run at its beginning, middle and end; correlations over iterations; shares of the KL."""
    last = int(table["iteration"].max())
    names = ("kl", "kl_same", *AGAINST)
    at = [
        {"iteration": i, **{name: shown(table.loc[table["iteration"] == i, name]) for name in names}}
        for i in (1, (1 + last) // 2, last)
    ]
    by = [
        {"rank correlation over iterations of": m, **{n: shown(c) for n, c in correlations(table, m).items()}}
        for m in ("kl", "kl_same")
    ]
    means = table.groupby("seed")[["of_entropy", "of_place"]].mean()
    said = [
        f"share of an iteration's KL on the half of its tokens with the higher entropy: {shown(means['of_entropy'])}",
        f"on the second half of each response: {shown(means['of_place'])}",
    ]
    return "\n\n".join([markdown(pd.DataFrame(at)), markdown(pd.DataFrame(by)), *said])


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; exit code 2 and one line on a user error."""
    parser = argparse.ArgumentParser(description="KL of one fixed rounding over the iterations of deterministic runs")
    parser.add_argument("grid", type=Path, help="folder of a grid")
    parser.add_argument("--csv", type=Path, help="also write one row per run and iteration to this file")
    arguments = parser.parse_args(argv)
    try:
        cells = complete_cells(arguments.grid)
        library.use_threads(1)
        runs = zip(cells["run_dir"].tolist(), cells["seed"].tolist(), strict=True)
        parts = [of_run(arguments.grid / run_dir).assign(seed=seed) for run_dir, seed in runs]
        table = pd.concat(parts, ignore_index=True)
        print(report(table))
        if arguments.csv is not None:
            write_csv_over_earlier(arguments.csv, table.to_csv(index=False, float_format="%.6g"), "--csv")
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
