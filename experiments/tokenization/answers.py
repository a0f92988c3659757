"""The answers of E1 to E7: `python -m experiments.tokenization.answers FOLDER` prints the tables of their grids.

FOLDER is that of `ppo-repro grid ... --out FOLDER`. First one row per point of a study (mean and 95 % Student interval
over seeds; columns are described in `measures`), then the comparisons of its hypotheses: differences or ratios of two
points, paired by seed.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.grids.table import interval, markdown
from analysis.program import program
from analysis.stats.significance import Estimate, Floats, holm, one_sample, t_interval, t_test, tost
from experiments.tokenization.measures import of_grid
from ppo_repro.errors import UserError
from ppo_repro.output import Parser, tell

MARGIN = math.log(1.1)  # "the same" is a ratio within 10 %


@dataclass(frozen=True)
class Family:
    """Comparisons of one measure by pairs of points, corrected together."""

    says: str
    measure: str
    pairs: Sequence[tuple[str, str]] | None = None  # None: all
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
    """One row per pair: difference or ratio, 95 % Student interval, p-values of two tests.

    The tests are the paired t-test and "the same" (two one-sided tests), both after Holm's correction. "The same" is a
    ratio within 10 %, or a difference below one standard deviation over seeds.
    """
    rows, tested, same = [], [], []
    margin = MARGIN if family.ratio else seed_spread(cells, family.measure)
    pairs = family.pairs or list(itertools.combinations(cells["point"].unique(), 2))
    for a, b in pairs:
        values = paired(cells, a, b, family.measure, family.ratio)
        estimate = one_sample(values)
        tested.append(t_test(estimate))
        same.append(tost(estimate, margin) if margin > 0 else math.nan)
        by = "/" if family.ratio else "minus"
        rows.append({"of": f"{a} {by} {b}", f"{family.measure}, 95 %": _shown(estimate, family.ratio)})
    table = pd.DataFrame(rows)
    limit = "within 10 %" if family.ratio else f"below a seed's {margin:.3f}"
    for name, p_values in (("p, Holm", holm(tested)), (f"p of {limit}, Holm", holm(same))):
        table[name] = [f"{p:.3f}" for p in p_values]
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


UNITS = ["start", "score", "kl", "kl_token", "k1", "tokens", "tokens_per_word", "abs_ratio", "abs_ratio_words"]
SHARES = ["first_leading", "first_trailing", "entropy_leading", "entropy_trailing"]
CLIPS = ["tokens_per_word", "token_out", "token_out_words", "word_out"]
LEARNT = ["start", "score", "gain", "kl", "gain_per_nat", "gain_per_token_nat"]
CREDIT = [("characters-0.95", "characters-1.0"), ("characters-0.9849", "characters-0.95"),
          ("characters-0.9849", "characters-1.0"), ("words-0.95", "words-1.0")]  # fmt: skip
CHARGES = [(f"{name}, last_mean", f"{name}, last_sum") for name in ("characters", "words")]
CHARGES += [(f"characters, {charge}", f"words, {charge}") for charge in ("last_sum", "last_mean")]
HOTTER = [(f"{name}, 1.5", f"{name}, 1.0") for name in ("characters", "bpe-256", "words")]


@dataclass(frozen=True)
class Study:
    """What is printed for one grid."""

    overviews: tuple[list[str], ...]
    families: tuple[Family, ...]
    of_e2: dict[str, str] | None = None  # points of E2 that belong to it, and their names here


OUTSIDE = (
    ("H5: share of words outside the band", "word_out"),
    ("H5: tokens outside x tokens per word", "token_out_words"),
)
STUDIES = {
    "e1_units": Study(
        (UNITS, [*SHARES, *CLIPS]),
        (
            Family("H1: KL per response is the same", "kl", ratio=True),
            Family("H3: the sum of |k1| depends on the tokens of a word", "abs_ratio", ratio=True),
            Family("H3, in words it does not", "abs_ratio_words", ratio=True),
            *(Family(f"H4: first tokens' share, {name}", name) for name in SHARES),
        ),
    ),
    "e2_ppo": Study(
        ([*LEARNT, *CLIPS],),
        (
            *(Family(says, name, ratio=True) for says, name in OUTSIDE),
            Family("H7: gain per nat per response", "gain_per_nat"),
            Family("H7: gain per nat per token", "gain_per_token_nat"),
            Family("H10: gain", "gain"),
        ),
    ),
    "e3_kl_unit": Study(([*LEARNT, "tokens"],), (Family("H9: KL per response", "kl", CHARGES, ratio=True),)),
    "e4_credit": Study(
        (LEARNT,), (Family("H6: gain", "gain", CREDIT),), {name: f"{name}-1.0" for name in ("characters", "words")}
    ),
    "e5_clip": Study(
        (["gain", "kl", *CLIPS],),
        tuple(
            Family(says, name, [(f"characters, {width}", f"words, {width}") for width in (0.1, 0.2)], ratio=True)
            for says, name in OUTSIDE
        ),
        {name: f"{name}, 0.2" for name in ("characters", "words")},
    ),
    "e6_drift": Study(
        (["start", "score", "drift_first", "drift_last"],),
        (
            Family(
                "H8: share of responses whose ids are not those of their text, first iteration",
                "drift_first",
                [*HOTTER, ("bpe-256, 1.0", "words, 1.0"), ("bpe-256, 1.5", "words, 1.5")],
            ),
        ),
        {name: f"{name}, 1.0" for name in ("characters", "bpe-256", "words")},
    ),
    "e7_digits": Study(
        (["accuracy", *LEARNT, "tokens"],), (Family("H10: accuracy", "accuracy"), Family("H10: gain", "gain"))
    ),
}


def report(grids: dict[str, pd.DataFrame], studies: Sequence[str]) -> Iterator[str]:
    """The tables of the chosen studies, in their order; UserError where one needs E2 and it is missing."""
    for name in studies:
        study, cells = STUDIES[name], grids[name]
        yield f"## {name}"
        if study.of_e2 is not None:
            if "e2_ppo" not in grids:
                raise UserError(f"{name}: is compared with cells of e2_ppo; run `ppo-repro grid` on that file too")
            cells = joined(cells, grids["e2_ppo"], study.of_e2)
        yield from (markdown(overview(cells, measures)) for measures in study.overviews)
        yield from (f"{family.says}\n\n{markdown(compared(cells, family))}" for family in study.families)
        if name == "e1_units":
            slope = one_sample(slopes(cells, "tokens", "kl_token"))
            yield f"H2: slope of log KL per token on log tokens per response, over seeds: {_shown(slope, False)}"


@program
def main(argv: Sequence[str] | None) -> None:
    """Print the report; exit code 2 and one line on a user error."""
    parser = Parser(prog="python -m experiments.tokenization.answers", description="results of the tokenizer studies")
    parser.add_argument("folder", type=Path, help="folder with the grids e1_units to e7_digits")
    parser.add_argument("--only", choices=STUDIES, nargs="+", default=list(STUDIES), help="studies to read")
    arguments = parser.parse_args(argv)
    available = [name for name in STUDIES if (arguments.folder / name / "cells.parquet").exists()]
    studies = [name for name in available if name in arguments.only]
    if not studies:
        raise UserError(f"{arguments.folder}: has no grid of these studies; run `ppo-repro grid` with --out")
    read = [name for name in available if name in studies or name == "e2_ppo"]
    tell("\n\n".join(report({name: of_grid(arguments.folder / name) for name in read}, studies)))


if __name__ == "__main__":
    sys.exit(main())
