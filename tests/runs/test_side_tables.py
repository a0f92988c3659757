"""What a run records outside its iterations: held-out responses, the warm start, the training of a reward model."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from ppo_repro.base.errors import UserError
from ppo_repro.base.watcher import Silent
from ppo_repro.config.files import load_config
from ppo_repro.records import reader
from ppo_repro.runs.prepare import prepare
from ppo_repro.runs.warm_start import CHECK_EVERY, COOL_DOWN
from tests.support.language import rerun
from tests.support.paths import TINY
from tests.support.resume import Recorded, record
from tests.support.runs import REWARD_MODEL
from tests.support.synthetic_run import damage_cell, rewrite_cell


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    reward = REWARD_MODEL.replace("num_pairs", "epochs: 2, num_pairs")
    config = load_config(TINY, [f"reward.terms=[{reward}]", "evaluation.every=2", "ppo.iterations=3"])
    return record(config, tmp_path_factory.mktemp("side"))


@pytest.fixture
def copy(recorded: Recorded, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded.whole, tmp_path / "copy"))


def flip_last_bit(values: np.ndarray) -> np.ndarray:
    values.view(f"u{values.dtype.itemsize}")[-1] ^= 1
    return values


def test_the_responses_of_every_evaluation_are_recorded_the_last_one_included(recorded: Recorded) -> None:
    run_dir = recorded.whole
    rows, iterations = reader.read_evaluations(run_dir), reader.read_iterations(run_dir)
    final = reader.open_manifest(run_dir).final
    assert rows["iteration"].unique().tolist() == [0, 2, 3]
    for iteration, of_one in rows.groupby("iteration"):
        accuracy, score = float(of_one["is_correct"].mean()), sum(of_one["scores"]) / len(of_one)
        if iteration == 3:
            assert (accuracy, score) == (final["eval_accuracy"], final["eval_score"])
        else:
            row = iterations.iloc[iteration]
            assert (accuracy, score) == (row["eval_accuracy"], row["eval_score"])
    assert len(rows) == 3 * 7
    assert (rows["response_length"] == rows["response_ids"].map(len)).all()
    right = rows["response"].str.strip() == rows["answer"]
    assert (rows["is_correct"] == (right & (rows["finish_reason"] == "stop"))).all()


@pytest.mark.parametrize(("accuracy", "steps"), [(0.0, CHECK_EVERY + COOL_DOWN), (0.5, 40)])
def test_the_warm_start_ends_soon_after_it_reaches_its_accuracy(accuracy: float, steps: int) -> None:
    """Reaches it exactly: a model that learns nothing has the accuracy 0 from the first measurement on."""
    about = "model.warm_start_steps=40", "model.warm_start_learning_rate=1e-12", "numerics.accuracy_sequences=0"
    config = load_config(TINY, [*about, f"model.warm_start_accuracy={accuracy}"])
    taken = prepare(config, Silent()).warm_start
    assert {step.accuracy for step in taken} == {None, 0.0}
    assert len(taken) == steps


def test_a_person_sees_the_steps_of_a_reward_model_as_such() -> None:
    seen = list[tuple[str, int, int]]()

    class Seeing(Silent):
        def step(self, name: str, done: int, total: int, figures: str) -> None:
            seen.append((name, done, total))

    prepare(load_config(TINY, [f"reward.terms=[{REWARD_MODEL}]", "model.warm_start_steps=2"]), Seeing())
    assert seen == [
        *(("warm start", 1, 2), ("warm start", 2, 2)),
        *(("reward model", step, 3) for step in (1, 2, 3)),
    ]


def test_the_training_before_ppo_is_recorded(recorded: Recorded) -> None:
    steps = reader.read_table("warm_start_steps", recorded.whole)
    assert steps["step"].tolist() == list(range(40))
    assert steps["loss"].iloc[-1] < steps["loss"].iloc[0]
    assert steps["accuracy"].notna().sum() == 1
    assert (steps["learning_rate"] > 0).all()
    pairs, updates = reader.read_table("pairs", recorded.whole), reader.read_table("pair_updates", recorded.whole)
    held_out = pairs[pairs["held_out"]]
    assert (len(pairs), len(held_out)) == (280, 256)
    assert (pairs["chosen"] != pairs["rejected"]).all()
    assert held_out["margin_after"].notna().all()
    assert pairs[~pairs["held_out"]]["margin_after"].isna().all()
    assert (held_out["margin_after"] != held_out["margin_before"]).mean() > 0.9, "training moves them"
    accuracy = float((held_out["margin_after"] > 0).mean())
    assert accuracy == reader.open_manifest(recorded.whole).final["reward_model_pair_accuracy"]
    first, second = (of_epoch["pair"].tolist() for _, of_epoch in updates.groupby("epoch"))
    assert sorted(first) == sorted(second) == list(range(24)), "each pair once in every epoch"
    assert first != second, "in an order of its own"
    means = updates.groupby(["epoch", "minibatch"])[["margins", "losses"]].mean().reset_index()
    of_steps = reader.read_table("pair_steps", recorded.whole)
    # pandas adds up float32 values in its own way
    assert np.allclose(means["margins"], of_steps["margin"], rtol=1e-4, atol=1e-6)
    assert np.allclose(means["losses"], of_steps["loss"], rtol=1e-4)
    assert of_steps["reward_digest"].nunique() == len(of_steps)


def test_rerun_compares_them(recorded: Recorded, copy: Path) -> None:
    assert rerun(recorded.whole, ["layout.padding=left"]).difference is None
    rewrite_cell(copy, "evaluations", 3, "scores", flip_last_bit)
    found = rerun(copy).difference
    assert found is not None
    assert found.describe().startswith("table evaluations, iteration 3, column scores, row 6")
    rewrite_cell(copy, "evaluations", 0, "scores", flip_last_bit)
    found = rerun(copy).difference
    assert found is not None
    assert (found.table, found.iteration) == ("evaluations", 0)
    rewrite_cell(copy, "pair_updates", None, "margins", flip_last_bit)
    found = rerun(copy).difference
    assert found is not None
    assert found.describe().startswith("table pair_updates, column margins")
    damage_cell(copy, "pairs", None, "margin_after", flip_last_bit)
    with pytest.raises(UserError, match=r"pairs/preparation\.parquet: has another SHA-256"):
        rerun(copy)
