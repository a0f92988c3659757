"""What each remedy would have done: by hand, in any chunks, and as a run with that remedy recorded it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ppo_repro.analysis.remedies import PUBLISHED, Remedy, remedy_table
from ppo_repro.analysis.run_pairs import run_pairs
from ppo_repro.config.algorithm import ImportanceWeights
from ppo_repro.records import reader
from tests.support.cli import Cli
from tests.support.language import tiny_run


def pairs(*responses: list[float]) -> pd.DataFrame:
    """Ratios of the tokens of each response."""
    rows = [(s, t, w) for s, ratios in enumerate(responses) for t, w in enumerate(ratios)]
    frame = pd.DataFrame(rows, columns=["sequence", "position", "w"])
    b = np.full(len(frame), -1.0, np.float32)
    a = (b.astype(np.float64) - np.log(frame["w"])).astype(np.float32)
    return pd.DataFrame(
        {"iteration": 0, "sequence": frame["sequence"], "position": frame["position"], "token_id": 1}
    ).assign(logprobs_a=a, logprobs_b=b)


CHUNK = pairs([1.0, 4.0], [1.0, 1.0], [0.25, 0.25])


def row(name: str, table: pd.DataFrame) -> pd.Series:
    return table.set_index("remedy").loc[name]


def test_remedies_by_hand() -> None:
    table = remedy_table([CHUNK])
    assert list(table["remedy"]) == [remedy.name for remedy in PUBLISHED]
    none, tis, mis = (row(name, table) for name in ("none", "TIS", "MIS"))
    assert (none["tokens_changed"], none["weight_mean"], none["ess_frac"]) == (0.0, 1.0, 1.0)
    k3 = [0, 3 - math.log(4), 0, 0, -0.75 + math.log(4), -0.75 + math.log(4)]
    assert none["k3"] == none["k3_kept"] == pytest.approx(sum(k3) / 6, rel=1e-5)
    # weights 1, 2, 1, 1, 1/4, 1/4
    assert (tis["tokens_changed"], tis["tokens_weightless"]) == (pytest.approx(1 / 6), 0)
    assert tis["weight_mean"] == pytest.approx(5.5 / 6, rel=1e-6)
    assert tis["ess_frac"] == pytest.approx(5.5**2 / (6 * 7.125), rel=1e-6)
    # 4 and both 1/4 are outside [1/2, 2]: the last response has no weight left
    assert (mis["tokens_weightless"], mis["k3_kept"]) == (pytest.approx(0.5), 0.0)
    assert (mis["responses_changed"], mis["responses_weightless"]) == (pytest.approx(2 / 3), pytest.approx(1 / 3))
    geometric = row("Geo-RS", table)
    assert geometric["responses_weightless"] == pytest.approx(2 / 3)
    assert geometric["bounds"] == "geometric [0.999, 1.001]"
    veto = row("veto", remedy_table([pairs([1.0, 1e-5], [1.0])]))
    assert (veto["tokens_weightless"], veto["responses_weightless"]) == (pytest.approx(2 / 3), 0.5)


def test_a_run_with_the_remedy_recorded_these_shares(tmp_path: Path, cli: Cli) -> None:
    options = ("ppo.iterations=1", "model.warm_start_steps=2", "rollout.mismatch_sigma=1.0", "ppo.ratio_anchor=old")
    settings = "{kind: masked, floor: 0.5, cap: 5.0}"
    run_dir = tiny_run(tmp_path, *options, f"ppo.importance_weights={settings}")
    updates = reader.read_updates(run_dir)
    first = updates[updates["epoch"] == 0]
    expected = row("IcePop", remedy_table(run_pairs(run_dir)))
    assert 0 < expected["tokens_weightless"] < 1
    assert expected["tokens_weightless"] == pytest.approx((first["correction"] != "none").mean())
    assert expected["weight_mean"] == pytest.approx(first["importance_weights"].mean(), rel=1e-5)
    mine = Remedy("mine", ImportanceWeights(kind="masked", floor=0.5, cap=5.0))
    assert remedy_table(run_pairs(run_dir), [mine]).iloc[0, 1:].tolist() == expected.tolist()
    assert "IcePop" in cli.done("analyse", "mismatch", run_dir, "--remedies")


def test_responses_without_numbers_are_left_out() -> None:
    lost = CHUNK.assign(logprobs_b=CHUNK["logprobs_b"].where(CHUNK["position"] != 1))  # one token of each response
    pd.testing.assert_frame_equal(remedy_table([CHUNK, lost]), remedy_table([CHUNK]))
    assert remedy_table([lost])["tokens_changed"].isna().all()
