"""The tables and figures of a grid: measures of a cell, comparisons by seed."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
import torch

from ppo_repro.analysis.clip_flags import Flags, token_flags
from ppo_repro.analysis.clipping import clip_tables, over_all_steps
from ppo_repro.analysis.figures import differences_figure
from ppo_repro.analysis.grid_outcomes import (
    MEASURES,
    averaged_measures,
    clip_shares_of_cell,
    measures_of,
    mismatch_of_cell,
    outcomes,
)
from ppo_repro.analysis.grid_table import comparisons
from ppo_repro.analysis.report.data.folder_runs import Final
from ppo_repro.analysis.report.data.grid_differences import Limits, axis_effects, setting_differences
from ppo_repro.analysis.report.sections.grid_answer import answer_statements, differences_card, spread
from ppo_repro.analysis.run_tables import run_tables
from ppo_repro.analysis.visits import load_iterations, policy_rows
from ppo_repro.base.errors import UserError
from ppo_repro.commands.analyses.table import answer
from ppo_repro.config.algorithm import ClipObjective
from ppo_repro.ppo.objectives import Clip, flag_names
from ppo_repro.records import manifest, reader
from ppo_repro.records.folder import load_recorded_config
from tests.support.cli import Cli
from tests.support.language import tiny_run


def grid_of(values: dict[str, list[float]], **others: dict[str, list[float]]) -> pd.DataFrame:
    """Outcomes with `values` as accuracies of seeds 1, 2, ...; every other measure is 0 unless given."""
    made = []
    for point, numbers in values.items():
        for seed, value in enumerate(numbers, start=1):
            row = {**dict.fromkeys(MEASURES, 0.0), "eval_accuracy": value}
            row |= {name: of[point][seed - 1] for name, of in others.items()}
            made.append({"point": point, "axis.a.b": point, "seed": seed, "fingerprint": f"{point}{seed}", **row})
    return pd.DataFrame(made)


def test_comparisons_are_paired_by_seed_and_corrected() -> None:
    found = grid_of({"x": [0.0, 10.0, 20.0], "y": [1.0, 12.0, 23.0], "z": [20.0, 10.0, 0.0]})
    table = comparisons(found.sample(frac=1, random_state=0), "eval_accuracy", "x").set_index("point")
    # y - x is 1, 2, 3: mean 2, standard error 1 / sqrt 3, t = 3.4641 with 2 degrees of freedom: p = 0.0742
    assert table.loc["y", "difference"] == pytest.approx(2.0)
    assert (table.loc["y", "ci_lo"], table.loc["y", "ci_hi"]) == pytest.approx((2 - 2.4841, 2 + 2.4841), abs=1e-4)
    assert table.loc["y", "p_value"] == pytest.approx(0.0742, abs=1e-4)
    # z - x is 20, 0, -20: mean 0, so p = 1; Holm doubles the smaller p
    assert table.loc["z", "p_value"] == pytest.approx(1.0)
    assert table.loc["y", "p_holm"] == pytest.approx(0.1483, abs=1e-4)
    with pytest.raises(UserError, match=r"^--against q: .* x; y; z$"):
        comparisons(found, "eval_accuracy", "q")
    with pytest.raises(UserError, match=r"^y and x have different seeds"):
        comparisons(found.drop(index=3), "eval_accuracy", "x")


def test_one_seed_has_a_difference_without_interval_and_one_setting_has_none() -> None:
    assert "| y | +0.500 |  |  |" in answer(grid_of({"x": [0.5], "y": [1.0]}), "eval_accuracy", "x")[1]
    with pytest.raises(UserError, match="one setting"):
        differences_figure(grid_of({"x": [0.5, 1.0]}), "eval_accuracy")


def test_a_measure_has_the_digits_of_its_size() -> None:
    """Measures of 1e-6 would all be 0.000."""
    small = {"x": [1e-6, 1.2e-6, 1.1e-6], "y": [3e-6, 3.3e-6, 3.6e-6]}
    _, said = answer(grid_of({"x": [0.5] * 3, "y": [0.5] * 3}, k3=small), "k3", "x")
    assert "| x | 3 | 1.1e-06 ± 2.5e-07 |" in said
    assert "| y | +2.2e-06 [+1.5e-06, +2.9e-06] |" in said


@pytest.fixture
def grid(deterministic_run: Path, native_run: Path, tmp_path: Path) -> Path:
    """A grid's folder with one complete cell in deterministic and one in native numerics, and one that failed."""
    runs = (deterministic_run, native_run)
    table = pd.DataFrame(
        {
            "cell": ["e", "n", "f"], "axis.numerics.mode": ["deterministic", "native", "none"], "seed": [7, 7, 7],
            "state": ["complete", "complete", "failed"], "fingerprint": ["1", "2", ""],
            "run_dir": [*map(str, runs), ""],
            "final.eval_accuracy": [*(manifest.load(run).final["eval_accuracy"] for run in runs), None],
        }
    )  # fmt: skip
    table.to_parquet(tmp_path / "cells.parquet")
    return tmp_path


def test_the_measures_are_those_of_the_records(grid: Path, deterministic_run: Path, native_run: Path) -> None:
    found = outcomes(grid).set_index("point")
    assert list(found.index) == ["deterministic", "native"]
    assert set(MEASURES) <= set(found.columns)
    assert found.loc["deterministic", "k3"] == 0.0 < found.loc["native", "k3"] < 1e-10
    for run_dir in (deterministic_run, native_run):
        steps, iterations = reader.read_steps(run_dir), reader.read_iterations(run_dir)
        made = measures_of(run_dir)
        # training counts clipped tokens of each step in float32
        by_training = (steps["clip_fraction"] * steps["tokens"]).sum() / steps["tokens"].sum()
        assert made["clip_fraction"] == pytest.approx(by_training, rel=1e-5, abs=1e-9)
        assert made["clip_fraction"] > 0
        assert made["clip_floor"] == 0.0, "mismatch below 1e-4 nats puts no ratio beyond 0.2 before a step"
        assert made["score_mean"] == pytest.approx(iterations["score_mean"].tail(5).mean())


GROUPS = (
    *("value={kind: none}", "advantages={kind: group}", "kl={placement: none}", "rollout.samples_per_prompt=2"),
    *("ppo.minibatch_size=5", "ppo.epochs=3", "ppo.learning_rate=1e-2"),
)


def test_a_ratio_is_outside_the_band_whatever_the_advantage(tmp_path: Path) -> None:
    """In a group of equal scores every advantage is 0, and no gradient is there to be removed."""
    run_dir = tiny_run(tmp_path, *GROUPS)
    of_iterations = [token_flags(policy_rows(item), item.rule) for item in load_iterations(run_dir)]
    flags = Flags(*map(np.concatenate, zip(*of_iterations, strict=True)))
    assert flags.outside_without_advantage.any()
    assert clip_shares_of_cell(run_tables(run_dir)) == (flags.removed.mean(), flags.outside.mean())


@pytest.mark.parametrize("kind", ["cispo, cap: 1.1, floor: 0.9", "unclipped"])
def test_an_objective_that_clips_nothing_has_no_band(kind: str, tmp_path: Path) -> None:
    run_dir = tiny_run(tmp_path, *GROUPS, f"ppo.objective={{kind: {kind}}}")
    assert reader.read_updates(run_dir)["clip_flag"].isin(["bound_high", "bound_low"]).any() == ("cispo" in kind)
    assert clip_shares_of_cell(run_tables(run_dir)) == (0.0, 0.0)


def test_the_band_of_an_objective_of_your_own_is_unknown(tmp_path: Path) -> None:
    code = "def loss(batch):\n    return -batch.ratios * batch.advantages, batch.ratios > 1.01\n"
    (tmp_path / "own.py").write_text(code)
    run_dir = tiny_run(tmp_path, *GROUPS, f"ppo.objective={{kind: function, path: '{tmp_path}/own.py:loss'}}")
    removed, outside = clip_shares_of_cell(run_tables(run_dir))
    assert removed > 0
    assert math.isnan(outside)


def test_a_sequence_clip_has_a_band_of_the_response(tmp_path: Path) -> None:
    run_dir = tiny_run(tmp_path, *GROUPS, "ppo.objective={kind: sequence_clip, clip_range: 0.1, clip_range_high: 0.2}")
    ratios = reader.read_updates(run_dir)["ratios"].to_numpy(np.float64)
    assert clip_shares_of_cell(run_tables(run_dir))[1] == ((ratios < 0.9) | (ratios > 1.2)).mean() > 0


def test_a_recorded_ratio_at_a_bound_is_inside_as_in_training(
    deterministic_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1.2 in float32 is above 1.2 in float64."""
    objective = load_recorded_config(deterministic_run).ppo.objective
    assert isinstance(objective, ClipObjective)
    low, high = np.float32(1.0 - objective.clip_range), np.float32(1.0 + objective.high)
    ratios = np.array([low, high, np.nextafter(low, np.float32(0)), np.nextafter(high, np.float32(2))])
    flags = Clip(objective.clip_range, objective.high).flags(torch.from_numpy(ratios), torch.ones(4))
    visits = pd.DataFrame({"clip_flag": flag_names(flags), "ratios": ratios})
    read = reader.read_table
    monkeypatch.setattr(
        reader, "read_table", lambda name, *a, **b: visits if name == "updates" else read(name, *a, **b)
    )
    assert visits["clip_flag"].tolist() == ["none", "none", "wrong_low", "clip_high"]
    assert clip_shares_of_cell(run_tables(deterministic_run)).outside_fraction == 0.5


def test_the_clip_floor_of_an_adaptive_clip_is_by_the_range_of_each_iteration(tmp_path: Path) -> None:
    options = ("ppo.iterations=3", "ppo.epochs=1", "rollout.mismatch_sigma=0.3")  # an epoch visits each token once
    run_dir = tiny_run(tmp_path, *options, "ppo.objective={kind: adaptive_clip, target_kl: 1e-6}")
    assert reader.read_iterations(run_dir)["clip_range"].nunique() > 1
    floor = over_all_steps(clip_tables(run_dir).by_step).clip_floor
    assert floor > 0
    assert mismatch_of_cell(run_tables(run_dir)).clip_floor == pytest.approx(floor)


def test_the_commands(grid: Path, tmp_path: Path, cli: Cli) -> None:
    code, out, err = cli("analyse", "table", grid)
    assert (code, err) == (0, f"warning: {grid}: without f (failed)\n")
    assert out.startswith("| mode | seeds | eval_accuracy, mean ± half")
    table = cli.json("analyse", "table", grid)
    assert [cell["seed"] for cell in table["cells"]] == [7, 7]
    (difference,) = table["differences"]
    assert difference["difference"] == table["cells"][1]["eval_accuracy"] - table["cells"][0]["eval_accuracy"]
    for kind in ("settings", "differences"):
        for _ in range(2):  # over nothing, and over an earlier figure
            cli.done("analyse", "figure", kind, tmp_path / "f.svg", grid)
        said = " ".join(ElementTree.fromstring((tmp_path / "f.svg").read_text()).itertext())
        assert "deterministic" in said
        assert "native" in said
    pd.read_parquet(grid / "cells.parquet").query("state == 'failed'").to_parquet(grid / "cells.parquet")
    assert "has no complete cell" in cli.refusal("analyse", "table", grid)


def test_a_measure_that_a_setting_lacks_is_not_finite(deterministic_run: Path, tmp_path: Path, cli: Cli) -> None:
    """A run without a value model has no explained variance, and one that clips sequences no clip floor of tokens."""
    lacks = tiny_run(
        tmp_path, "value={kind: none}", "advantages={kind: group}", "kl={placement: none}", "ppo.minibatch_size=5",
        "rollout.samples_per_prompt=2", "ppo.objective={kind: sequence_clip, clip_range: 0.01}",
    )  # fmt: skip
    rows = [("has", deterministic_run), ("lacks", lacks), ("lacks too", lacks)]
    table = pd.DataFrame(
        {
            "axis.value": [label for label, _ in rows], "seed": 7, "state": "complete", "fingerprint": "1",
            "run_dir": [str(run) for _, run in rows], "final.eval_accuracy": 0.5,
        }
    )  # fmt: skip
    for cells in (table, table[1:]):  # one setting has the measure, and none
        cells.to_parquet(tmp_path / "cells.parquet")
        for measure in ("explained_variance", "clip_floor"):
            said = cli.done("analyse", "table", tmp_path, "--measure", measure)
            assert "\n| lacks | 1 | not finite |" in said
            assert "\n| lacks too | not finite |  |  |" in said
            for kind in ("settings", "differences"):
                cli.done("analyse", "figure", kind, tmp_path / "f.svg", tmp_path, "--measure", measure)
                drawn = " ".join(ElementTree.fromstring((tmp_path / "f.svg").read_text()).itertext())
                assert "lacks too (" in drawn


def test_seeds_that_are_not_finite_are_counted_and_no_difference_is_made_up() -> None:
    found = grid_of({"x": [0.0, 1.0, 2.0], "y": [1.0, math.nan, 3.0], "z": [1.0, 3.0, 3.0]})
    _, said = answer(found, "eval_accuracy", "x")
    assert "| y | 3 | 2.000 ± 12.706 (1 not finite) |" in said
    assert "| y | not finite |  |  |" in said
    assert "| z | +1.333 [" in said
    _, said = answer(found.assign(eval_accuracy=0.5, entropy=found["eval_accuracy"]), "eval_accuracy", "x")
    assert "| 2.00 (1 not finite) |" in said, "a measure beside the one that is compared"
    _, said = answer(found.assign(clip_fraction=[0.0] * 3 + [math.nan] * 3 + [0.5] * 3), "k3", "x")
    assert "| none |" in said, "runs may lack a clipped share"
    _, said = answer(found.assign(entropy=math.nan), "k3", "x")
    assert "| not finite |" in said, "no run lacks an entropy"


def test_a_page_counts_seeds_that_are_not_finite() -> None:
    assert spread([0.5, math.nan, 0.75]) == "0.625 (0.500 to 0.750) (1 not finite)"
    assert spread([0.5, math.inf]) == "0.500 (1 not finite)"
    assert spread([math.nan]) == "not finite"
    assert spread([0.5] * 5 + [math.nan]) == "0.500 (1 not finite)"


def test_the_answer_of_a_grid_says_which_settings_it_cannot_compare() -> None:
    values = {"x": [0.25, 0.5, 0.75], "y": [0.5, math.nan, 0.75], "z": [0.5, 0.25, 0.75]}
    finals = [Final(point, seed, value) for point, of in values.items() for seed, value in enumerate(of)]
    found = setting_differences(finals, Limits(1.0, math.inf))
    assert found is not None
    (answer,) = answer_statements(finals, found, "accuracy")
    assert "0 of 2 settings differ" in answer.text
    assert "1 of 2 cannot be compared, because a result is not finite." in answer.text
    assert "not finite" in differences_card(found).blocks[0]
    assert setting_differences(finals[:-1], Limits(1.0, math.inf)) is None, "other seeds"
    assert setting_differences(finals[::3], Limits(1.0, math.inf)) is None, "one seed"
    assert setting_differences(finals[:3], Limits(1.0, math.inf)) is None, "one setting"


def test_a_run_without_a_result_leaves_the_effect_of_an_axis_unknown(tmp_path: Path) -> None:
    rows = [{"axis.a": a, "axis.b": b, "seed": seed} for a in "xy" for b in "pq" for seed in (1, 2)]
    pd.DataFrame(rows).to_parquet(tmp_path / "cells.parquet")

    def differences(values: list[float]) -> list[float]:
        points = [f"{row['axis.a']}, {row['axis.b']}" for row in rows]
        finals = [Final(point, int(row["seed"]), v) for point, row, v in zip(points, rows, values, strict=True)]
        return [effect.comparison.difference for effect in axis_effects(tmp_path, finals)]

    assert np.isnan(differences([0.5, 0.25, 0.5, 0.75, math.nan, 0.5, 0.75, 1.0])).tolist() == [True, True]
    # of seed 1 the means of y and x are 0.75 and 0.5, of seed 2 0.75 and 0.5
    assert differences([0.5, 0.25, 0.5, 0.75, 0.75, 0.5, 0.75, 1.0]) == [0.25, 0.25]


def test_an_iteration_without_a_number_leaves_a_run_without_the_mean() -> None:
    names = ("score_mean", "ref_kl_per_sequence", "entropy", "explained_variance")
    rows = pd.DataFrame({name: [float(i) for i in range(7)] for name in names})
    whole = dict(zip(names, (4.0, 4.0, 4.0, 2.0), strict=True))
    assert averaged_measures(rows) == whole, "the last five iterations, of the explained variance the first five"
    rows.loc[0] = math.nan  # returns that do not vary have no explained variance
    assert averaged_measures(rows) == whole | {"explained_variance": 2.5}
    rows.loc[5] = math.nan
    lost = dict.fromkeys(names, math.nan)
    assert averaged_measures(rows) == pytest.approx(lost | {"explained_variance": 2.5}, nan_ok=True)
