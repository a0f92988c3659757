"""The answers of E1 to E7: `python -m experiments.tokenization.answers FOLDER` prints the tables of their grids.

FOLDER is that of `ppo-repro grid ... --out FOLDER`. First one row per point of a study (mean and 95 % Student interval
over seeds; columns are described in `measures`), then the comparisons of its hypotheses: differences or ratios of two
points, paired by seed.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.grids.table import interval, markdown
from analysis.stats.significance import Estimate, Floats, holm, one_sample, sign_flip, t_interval, t_test, tost
from experiments.tokenization.measures import of_grid
from ppo_repro.errors import UserError

STUDIES = ("e1_units", "e2_ppo", "e3_kl_unit", "e4_credit", "e5_clip", "e6_drift", "e7_digits")
MARGIN = math.log(1.1)  # "the same" is a ratio within 10 %
Pairs = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Family:
    """Comparisons of one measure by pairs of points, corrected together."""

    says: str
    measure: str
    pairs: Pairs
    ratio: bool = False  # else differences


def by_seed(cells: pd.DataFrame, point: str, measure: str) -> pd.Series:
    """The measure of a point, by seed; UserError for an unknown point."""
    rows = cells[cells["point"] == point]
    if rows.empty:
        raise UserError(f"point {point}: has no complete cell; there are {'; '.join(cells['point'].unique())}")
    return rows.set_index("seed")[measure]


def paired(cells: pd.DataFrame, a: str, b: str, measure: str, ratio: bool) -> Floats:
    """a - b by seed, or log(a / b); UserError where seeds differ or a ratio has no logarithm."""
    first, second = by_seed(cells, a, measure), by_seed(cells, b, measure)
    if set(first.index) != set(second.index):
        raise UserError(f"{a} and {b}: have different seeds; finish the grid with `ppo-repro grid`")
    if ratio and not ((first > 0).all() and (second > 0).all()):
        raise UserError(f"{measure} of {a} and {b}: has values that are not positive; no ratio can be taken")
    values = np.log(first) - np.log(second) if ratio else first - second
    return values.sort_index().to_numpy(np.float64)


def seed_spread(cells: pd.DataFrame, measure: str) -> float:
    """How much a seed moves a measure: the standard deviation over seeds, root mean square over points."""
    return math.sqrt(float(cells.groupby("point")[measure].var(ddof=1).mean()))


def _shown(estimate: Estimate, ratio: bool) -> str:
    values = (estimate.mean, *t_interval(estimate, 0.95))
    if ratio:
        return "{:.2f} [{:.2f}, {:.2f}]".format(*(math.exp(v) for v in values))
    return "{:+.3f} [{:+.3f}, {:+.3f}]".format(*values)


def compared(cells: pd.DataFrame, family: Family) -> pd.DataFrame:
    """One row per pair: difference or ratio, 95 % Student interval, p-values of three tests.

    The tests are the paired t-test and "the same" (two one-sided tests), both after Holm's correction, and sign flips,
    uncorrected. "The same" is a ratio within 10 %, or a difference below one standard deviation over seeds.
    """
    rows, tested, same = [], [], []
    margin = MARGIN if family.ratio else seed_spread(cells, family.measure)
    for a, b in family.pairs:
        values = paired(cells, a, b, family.measure, family.ratio)
        estimate = one_sample(values)
        tested.append(t_test(estimate))
        same.append(tost(estimate, margin) if margin > 0 else math.nan)
        by = "/" if family.ratio else "minus"
        flips = sign_flip(values, np.random.default_rng(0)).p_value
        rows.append({"of": f"{a} {by} {b}", f"{family.measure}, 95 %": _shown(estimate, family.ratio), "flips": flips})
    table = pd.DataFrame(rows)
    limit = "within 10 %" if family.ratio else f"below a seed's {margin:.3f}"
    for name, p_values in (("p, Holm", holm(tested)), (f"p of {limit}, Holm", holm(same))):
        table[name] = [f"{p:.3f}" for p in p_values]
    table["p of sign flips"] = [f"{p:.3f}" for p in table.pop("flips")]
    return table


def slopes(cells: pd.DataFrame, x: str, y: str) -> Floats:
    """The least squares slopes of log y on log x over the points, one per seed."""
    return np.array(
        [np.polyfit(np.log(rows[x]), np.log(rows[y]), 1)[0] for _, rows in cells.groupby("seed", sort=True)]
    )


def overview(cells: pd.DataFrame, measures: Sequence[str]) -> pd.DataFrame:
    """One row per point: seeds, and mean and 95 % Student interval over seeds of the measures."""
    rows = []
    for point, group in cells.groupby("point", sort=False):
        rows.append({"point": point, "seeds": len(group), **{name: interval(group[name]) for name in measures}})
    return pd.DataFrame(rows)


def joined(cells: pd.DataFrame, base: pd.DataFrame, names: dict[str, str]) -> pd.DataFrame:
    """The cells of a study, and those of E2 that belong to it, renamed by `names`."""
    shared = base[base["point"].isin(names)]
    return pd.concat([cells, shared.assign(point=shared["point"].map(names))], ignore_index=True)


def all_pairs(cells: pd.DataFrame) -> Pairs:
    return list(itertools.combinations(cells["point"].unique(), 2))


UNITS = ["start", "score", "kl", "kl_token", "k1", "tokens", "tokens_per_word", "abs_ratio", "abs_ratio_words"]
SHARES = ["first_leading", "first_trailing", "entropy_leading", "entropy_trailing"]
CLIPS = ["tokens_per_word", "token_out", "token_out_words", "word_out"]
LEARNT = ["start", "score", "gain", "kl", "gain_per_nat", "gain_per_token_nat"]
CREDIT = [("characters-0.95", "characters-1.0"), ("characters-0.9849", "characters-0.95"),
          ("characters-0.9849", "characters-1.0"), ("words-0.95", "words-1.0")]  # fmt: skip


def _of_units(cells: pd.DataFrame) -> Iterator[str]:
    pairs = all_pairs(cells)
    yield markdown(overview(cells, UNITS))
    yield markdown(overview(cells, [*SHARES, *CLIPS]))
    yield families(cells, [
        Family("H1: KL per response is the same", "kl", pairs, ratio=True),
        Family("H3: the sum of |k1| depends on the tokens of a word", "abs_ratio", pairs, ratio=True),
        Family("H3, in words it does not", "abs_ratio_words", pairs, ratio=True),
        Family("H4: first tokens' share of exact KL", "first_leading", pairs),
        Family("H4, trailing", "first_trailing", pairs),
        Family("H4: first tokens' share of entropy", "entropy_leading", pairs),
        Family("H4, trailing", "entropy_trailing", pairs),
    ])  # fmt: skip
    found_slopes = one_sample(slopes(cells, "tokens", "kl_token"))
    yield f"H2: slope of log KL per token on log tokens per response, over seeds: {_shown(found_slopes, False)}"


def families(cells: pd.DataFrame, chosen_families: Sequence[Family]) -> str:
    """The tables of several families, each with its heading."""
    return "\n\n".join(f"{family.says}\n\n{markdown(compared(cells, family))}" for family in chosen_families)


def _of_ppo(cells: pd.DataFrame) -> Iterator[str]:
    pairs = all_pairs(cells)
    yield markdown(overview(cells, [*LEARNT, *CLIPS]))
    yield families(cells, [
        Family("H5: share of words outside the band", "word_out", pairs, ratio=True),
        Family("H5: share of tokens outside, times tokens per word", "token_out_words", pairs, ratio=True),
        Family("H7: gain per nat per response", "gain_per_nat", pairs),
        Family("H7: gain per nat per token", "gain_per_token_nat", pairs),
        Family("H10: gain", "gain", pairs),
    ])  # fmt: skip


def _of_charges(cells: pd.DataFrame) -> Iterator[str]:
    charges = [(f"{name}, last_mean", f"{name}, last_sum") for name in ("characters", "words")]
    names = [(f"characters, {charge}", f"words, {charge}") for charge in ("last_sum", "last_mean")]
    yield markdown(overview(cells, [*LEARNT, "tokens"]))
    yield families(cells, [Family("H9: KL per response", "kl", [*charges, *names], ratio=True)])


def _of_credit(cells: pd.DataFrame, base: pd.DataFrame) -> Iterator[str]:
    both = joined(cells, base, {name: f"{name}-1.0" for name in ("characters", "words")})
    yield markdown(overview(both, LEARNT))
    yield families(both, [Family("H6: gain", "gain", CREDIT)])


def _of_clip(cells: pd.DataFrame, base: pd.DataFrame) -> Iterator[str]:
    both = joined(cells, base, {name: f"{name}, 0.2" for name in ("characters", "words")})
    pairs = [(f"characters, {range_}", f"words, {range_}") for range_ in (0.1, 0.2)]
    yield markdown(overview(both, ["gain", "kl", *CLIPS]))
    yield families(both, [
        Family("H5: share of words outside the band", "word_out", pairs, ratio=True),
        Family("H5: share of tokens outside, times tokens per word", "token_out_words", pairs, ratio=True),
    ])  # fmt: skip


def _of_drift(cells: pd.DataFrame, base: pd.DataFrame) -> Iterator[str]:
    kinds = ("characters", "bpe-256", "words")
    both = joined(cells, base, {name: f"{name}, 1.0" for name in kinds})
    yield markdown(overview(both, ["start", "score", "drift_first", "drift_last"]))
    hotter = [(f"{name}, 1.5", f"{name}, 1.0") for name in kinds]
    trained = both.assign(trained=both["drift_last"] - both["drift_first"])
    yield families(trained, [
        Family("H8: share of responses whose ids are not those of their text, first iteration", "drift_first",
               [*hotter, ("bpe-256, 1.0", "words, 1.0"), ("bpe-256, 1.5", "words, 1.5")]),
    ])  # fmt: skip
    yield markdown(overview(trained, ["trained"]))


def _of_digits(cells: pd.DataFrame) -> Iterator[str]:
    yield markdown(overview(cells, ["accuracy", *LEARNT, "tokens"]))
    pairs = all_pairs(cells)
    yield families(cells, [Family("H10: accuracy", "accuracy", pairs), Family("H10: gain", "gain", pairs)])


def report(grids: dict[str, pd.DataFrame], studies: Sequence[str]) -> Iterator[str]:
    """The tables of the chosen studies, in their order; UserError where one needs E2 and it is missing."""
    alone = {"e1_units": _of_units, "e2_ppo": _of_ppo, "e3_kl_unit": _of_charges, "e7_digits": _of_digits}
    with_e2 = {"e4_credit": _of_credit, "e5_clip": _of_clip, "e6_drift": _of_drift}
    for name in studies:
        yield f"## {name}"
        if name in alone:
            yield from alone[name](grids[name])
        elif "e2_ppo" not in grids:
            raise UserError(f"{name}: is compared with cells of e2_ppo; run `ppo-repro grid` on that file too")
        else:
            yield from with_e2[name](grids[name], grids["e2_ppo"])


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; exit code 2 and one line on a user error."""
    parser = argparse.ArgumentParser(description="results of the tokenizer studies")
    parser.add_argument("folder", type=Path, help="folder with the grids e1_units to e7_digits")
    parser.add_argument("--only", choices=STUDIES, nargs="+", default=STUDIES, help="studies to read")
    arguments = parser.parse_args(argv)
    try:
        available = [name for name in STUDIES if (arguments.folder / name / "cells.parquet").exists()]
        studies = [name for name in available if name in arguments.only]
        if not studies:
            raise UserError(f"{arguments.folder}: has no grid of these studies; run `ppo-repro grid` with --out")
        read = [name for name in available if name in studies or name == "e2_ppo"]
        for paragraph in report({name: of_grid(arguments.folder / name) for name in read}, studies):
            print(paragraph, end="\n\n", flush=True)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
