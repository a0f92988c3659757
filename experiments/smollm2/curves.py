"""Tables of recorded runs: `python -m experiments.smollm2.curves RUN... --out DIR`.

`curves.csv` has a row for each iteration of each run. The program prints a row for each run, from that file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis.grids.table import markdown
from ppo_repro.errors import UserError
from ppo_repro.records import reader
from ppo_repro.records.config_file import load_recorded_config

COLUMNS = [
    *("iteration", "tokens", "accuracy", "entropy", "ref_kl_per_sequence"),
    *("unequal_old_rollout_logprobs", "unequal_first_ratios", "unequal_values", "eval_accuracy"),
]


def curve(run_dir: Path) -> pd.DataFrame:
    """A row for each iteration, with experiment, seed and fingerprint; the last has the final evaluation only.

    accuracy is that of the sampled responses, eval_accuracy the greedy one on held-out prompts; entropy in nats per
    token, ref_kl_per_sequence is k1 of KL(policy || reference), in nats per response. UserError for damaged records.
    """
    config, recorded = load_recorded_config(run_dir), reader.open_manifest(run_dir)
    rows = reader.read_iterations(run_dir, columns=COLUMNS)
    last = {"iteration": len(rows), "eval_accuracy": recorded.final["eval_accuracy"]}
    rows = pd.concat([rows, pd.DataFrame([last])], ignore_index=True)
    about = {"experiment": config.experiment, "seed": config.seed, "fingerprint": recorded.fingerprint}
    return rows.assign(**about)


def summary(curves: pd.DataFrame) -> pd.DataFrame:
    """A row for each run: held-out accuracy before and after; entropy and KL of its last five iterations."""
    rows = []
    for (experiment, seed), run in curves.groupby(["experiment", "seed"], sort=False):
        held_out, end = run["eval_accuracy"].dropna(), run.dropna(subset="tokens").tail(5)
        unequal = run[["unequal_old_rollout_logprobs", "unequal_first_ratios", "unequal_values"]].sum().sum()
        row = {"run": f"{experiment}, seed {seed}", "before": f"{held_out.iloc[0]:.1%}"}
        row |= {"after": f"{held_out.iloc[-1]:.1%}", "entropy": f"{end['entropy'].mean():.2f}"}
        row |= {"KL": f"{end['ref_kl_per_sequence'].mean():.2f}"}
        row |= {"unequal of tokens": f"{unequal:.0f} of {run['tokens'].sum():,.0f}"}
        rows.append(row | {"fingerprint": run["fingerprint"].iloc[0][:12]})
    return pd.DataFrame(rows)


def main(run_dirs: Sequence[Path], out: Path) -> int:
    try:
        curves = pd.concat([curve(run_dir) for run_dir in run_dirs], ignore_index=True)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    curves.to_csv(out / "curves.csv", index=False, float_format="%.6g")
    print(markdown(summary(curves)))
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, metavar="DIR")
    arguments = parser.parse_args()
    sys.exit(main(arguments.run_dirs, arguments.out))
