"""Small tables of recorded runs: `python -m experiments.smollm2.curves RUN... --out DIR`.

`curves.csv` has a row for each iteration of each run, `answers.csv` the held-out responses before the first and after
the last update.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from ppo_repro.errors import UserError
from ppo_repro.records import reader
from ppo_repro.records.config_file import load_recorded_config

COLUMNS = [
    *("iteration", "tokens", "accuracy", "entropy", "ref_kl_per_sequence", "explained_variance"),
    *("unequal_old_rollout_logprobs", "max_abs_old_rollout", "unequal_first_ratios", "unequal_values", "eval_accuracy"),
]


def curve(run_dir: Path) -> pd.DataFrame:
    """A row for each iteration, with numerics, seed and fingerprint of the run; the last has the final evaluation only.

    `sampler` is what the sampler's weights are rounded to.

    Accuracy is that of the sampled responses, eval_accuracy the greedy one on held-out prompts; entropy in nats per
    token, ref_kl_per_sequence is k1 of KL(policy || reference), in nats per response. UserError for damaged records.
    """
    config, recorded = load_recorded_config(run_dir), reader.open_manifest(run_dir)
    rows = reader.read_iterations(run_dir, columns=COLUMNS)
    last = {"iteration": len(rows), "eval_accuracy": recorded.final["eval_accuracy"]}
    rows = pd.concat([rows, pd.DataFrame([last])], ignore_index=True)
    about = {
        "numerics": config.numerics.mode,
        "sampler": config.mismatch.sampler.precision.weights,
        "seed": config.seed,
        "fingerprint": recorded.fingerprint,
    }
    return rows.assign(**about)


def answers(run_dir: Path) -> pd.DataFrame:
    """The responses of the first and of the last evaluation, side by side: prompt, answer, before, after."""
    columns = ["iteration", "prompt_key", "response", "answer", "is_correct"]
    found = reader.read_evaluations(run_dir, columns=columns)
    first, last = (found[found["iteration"] == i].set_index("prompt_key") for i in (0, found["iteration"].max()))
    return pd.DataFrame(
        {
            "sum": first["answer"],
            "before": first["response"].str.strip(),
            "after": last["response"].str.strip(),
            "right_before": first["is_correct"],
            "right_after": last["is_correct"],
        }
    ).rename_axis("prompt")


def main(run_dirs: Sequence[Path], out: Path) -> int:
    try:
        curves = pd.concat([curve(run_dir) for run_dir in run_dirs], ignore_index=True)
        shown = answers(run_dirs[0])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    curves.to_csv(out / "curves.csv", index=False, float_format="%.6g")
    shown.to_csv(out / "answers.csv")
    print(curves.drop(columns="fingerprint").to_string(index=False, float_format="%.4g", na_rep=""))
    print(shown.head(12).to_string())
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, metavar="DIR")
    arguments = parser.parse_args()
    sys.exit(main(arguments.run_dirs, arguments.out))
