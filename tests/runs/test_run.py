"""Whole runs: parity of sampler and trainer, reruns, layouts that must not show, and what must show."""

import json
import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest
import torch

from analysis.mismatch.parity import parity
from ppo_repro.errors import UserError
from ppo_repro.records import manifest, reader, schema
from ppo_repro.runs.diff import first_difference
from ppo_repro.runs.summary import summarise
from ppo_repro.watcher import Silent
from tests.support.language import rerun, run
from tests.support.runs import small_config
from tests.support.synthetic_run import accept, damage_cell


def fingerprint(tmp_path: Path, *overrides: str) -> str:
    return summarise(run(small_config(*overrides), tmp_path, Silent())[0]).fingerprint


def test_a_rerun_is_identical(deterministic_run: Path) -> None:
    report = rerun(deterministic_run, Silent())
    assert report.difference is None
    assert report.fingerprint == manifest.load(deterministic_run).fingerprint
    assert report.iterations == 3


def test_another_seed_is_another_run(deterministic_run: Path, tmp_path: Path) -> None:
    assert fingerprint(tmp_path, "seed=8") != manifest.load(deterministic_run).fingerprint


def test_a_rerun_under_another_layout_is_identical(deterministic_run: Path) -> None:
    overrides = ["layout.padding=left", "layout.rollout_slots=5", "layout.update_micro_batch=7"]
    assert rerun(deterministic_run, Silent(), overrides).difference is None


@pytest.mark.usefixtures("row_noise")
def test_a_native_rerun_under_another_layout_is_not(native_run: Path) -> None:
    overrides = ["layout.padding=none", "layout.rollout_slots=5", "layout.update_micro_batch=7"]
    assert rerun(native_run, Silent(), overrides).difference is not None
    assert rerun(native_run, Silent()).difference is None, "the same layout repeats itself also in native"


def test_a_rerun_refuses_to_change_anything_but_the_layout(deterministic_run: Path) -> None:
    with pytest.raises(UserError, match=r"may change fields of layout, rollout\.engine and records only"):
        rerun(deterministic_run, Silent(), ["ppo.objective.clip_range=0.1"])


LAYOUTS = [
    ("layout.rollout_slots=1", "layout.padding=left"),
    ("layout.rollout_slots=3", "layout.prefill_chunk=2", "layout.forward_micro_batch=1"),
    ("layout.rollout_slots=16", "layout.padding=none", "layout.update_micro_batch=5"),
    ("layout.forward_micro_batch=3", "layout.update_micro_batch=1"),
    ("layout.threads=2",),
]
MARKED = [
    pytest.param(o, id=" ".join(o), marks=[] if i in (1, 2, 4) else pytest.mark.slow) for i, o in enumerate(LAYOUTS)
]


@pytest.mark.parametrize("overrides", MARKED)
def test_no_layout_changes_the_fingerprint(deterministic_run: Path, tmp_path: Path, overrides: tuple[str, ...]) -> None:
    assert fingerprint(tmp_path, *overrides) == manifest.load(deterministic_run).fingerprint


@pytest.mark.slow
def test_gradient_checkpointing_does_not_change_the_fingerprint(deterministic_run: Path, tmp_path: Path) -> None:
    found = fingerprint(tmp_path, "layout.gradient_checkpointing=true")
    assert found == manifest.load(deterministic_run).fingerprint


@pytest.mark.usefixtures("row_noise")
def test_native_layouts_change_the_fingerprint(native_run: Path, tmp_path: Path) -> None:
    found = {fingerprint(tmp_path, *o, "numerics.mode=native") for o in LAYOUTS[2:3]}
    assert len(found | {manifest.load(native_run).fingerprint}) == 2


def test_top_k_and_top_p_score_the_distribution_sampled_from(tmp_path: Path) -> None:
    config = small_config("rollout.top_k=4", "rollout.top_p=0.9", "rollout.temperature=0.8", "ppo.iterations=2")
    run_dir = run(config, tmp_path, Silent())[0]
    found = parity(run_dir)
    assert (found.unequal_old_rollout_logprobs, found.unequal_first_ratios) == (0, 0)
    tokens = reader.read_tokens(run_dir, columns=["log_kept_mass", "entropies"])
    assert tokens["log_kept_mass"].max() <= 0 and tokens["log_kept_mass"].min() < -0.01
    assert tokens["entropies"].max() <= np.log(4) + 1e-6  # at most 4 tokens are eligible; one float32 rounding


def test_the_old_anchor_gives_ratio_one(tmp_path: Path) -> None:
    config = small_config("ppo.ratio_anchor=old", "ppo.iterations=1")
    assert parity(run(config, tmp_path, Silent())[0]).unequal_first_ratios == 0


def test_diff_and_rerun_name_the_flipped_cell(deterministic_run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(deterministic_run, copy)
    assert first_difference(deterministic_run, copy) is None
    pairs = []

    def flip(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        flipped = values.copy()
        flipped.view(np.int32)[11] ^= 1
        pairs.append((float(values[11]), float(flipped[11])))
        return flipped

    damage_cell(copy, "tokens", 1, "advantages", flip)
    for compare in (lambda: first_difference(deterministic_run, copy), lambda: rerun(copy, Silent())):
        with pytest.raises(UserError, match=r"tokens/iteration=000001\.parquet: has another SHA-256"):
            compare()
    accept(copy, "tokens", 1)
    ((before, after),) = pairs
    difference = first_difference(deterministic_run, copy)
    assert difference is not None
    assert (difference.table, difference.iteration, difference.column) == ("tokens", 1, "advantages")
    assert (difference.row, difference.unequal_in_column) == (11, 1)
    assert (difference.left, difference.right) == (before, after)
    report = rerun(copy, Silent())
    assert report.difference is not None
    assert (report.difference.table, report.difference.row) == ("tokens", 11)
    assert (report.difference.left, report.difference.right) == (after, before)


def test_the_saved_policy_is_the_trained_one(deterministic_run: Path) -> None:
    from transformers import AutoModelForCausalLM

    from ppo_repro.numerics.optimizer import weights_digest

    model = AutoModelForCausalLM.from_pretrained(deterministic_run / "checkpoints" / "final", dtype=torch.float32)
    assert weights_digest(model.named_parameters()) == manifest.load(deterministic_run).final["policy_digest"]


def test_stage_arithmetic_holds_in_the_records(deterministic_run: Path) -> None:
    tokens, sequences = reader.read_tokens(deterministic_run), reader.read_sequences(deterministic_run)
    steps = reader.read_steps(deterministic_run)
    key = ["iteration", "sequence"]
    ends = tokens.groupby(key)["position"].transform("max") == tokens["position"]
    scores = tokens.merge(sequences[[*key, "scores"]], on=key)["scores"].to_numpy(np.float32)
    expected = -tokens["kl_penalties"].to_numpy() + np.where(ends, scores, np.float32(0))
    np.testing.assert_array_equal(tokens["rewards"].to_numpy(), expected)
    np.testing.assert_array_equal(tokens["returns"], tokens["raw_advantages"] + tokens["values"])
    log_ratio = tokens["old_logprobs"] - tokens["ref_logprobs"]
    np.testing.assert_array_equal(tokens["kl_penalties"], (log_ratio * np.float32(0.05)).astype(np.float32))
    assert (steps.groupby("iteration")["tokens"].sum() == 2 * tokens.groupby("iteration").size()).all()
    assert abs(tokens["advantages"].mean()) < 1e-3  # whitened per iteration, stored as float32
    assert [parts.tolist() for parts in sequences["score_parts"]] == [[score] for score in sequences["scores"]]


def test_null_is_recorded_where_the_configuration_has_no_such_thing(deterministic_run: Path) -> None:
    tables = {
        table.name: pd.concat(
            [reader.read_arrow(deterministic_run, table.name, i).to_pandas().isna().any() for i in range(3)], axis=1
        )
        for table in schema.TABLES
    }
    nulls = {f"{name}.{column}" for name, found in tables.items() for column in found.index[found.any(axis=1)]}
    coefficients = {f"iterations.{name}" for name in ("clip_range", "penalty_coef", "return_mean", "return_scale")}
    unprofiled = {f"iterations.peak_fraction_{phase}" for phase in ("rollout", "forward", "update")}
    deep = {
        f"{table.name}.{column.name}" for table in schema.TABLES for column in table.columns if column.level == "deep"
    }
    served = {"sequences.server", "sequences.latency"}
    turns = {"sequences.episode_ids", "sequences.is_forced"}
    sampling = {"tokens.kept_tokens"}
    kl_elsewhere = {"tokens.reverse_ref_kl", "updates.kl_terms", "steps.kl_loss"}
    other_objectives = {"updates.importance_weights", "updates.penalty_terms", "steps.penalty_loss"}
    remedies = {"updates.correction"}
    faults = {f"sequences.{name}" for name in ("rollout_policy_versions", "sampled_ids", "is_as_sampled")}
    not_recorded = unprofiled | deep | {"iterations.eval_accuracy", "iterations.eval_score"}
    elsewhere = kl_elsewhere | other_objectives | remedies | faults
    assert nulls == coefficients | served | turns | sampling | elsewhere | not_recorded
    iterations, steps = reader.read_iterations(deterministic_run), reader.read_steps(deterministic_run)
    assert (iterations["policy_steps"] == steps.groupby("iteration").size()).all()
    assert (iterations["kl_coef"] == 0.05).all()


def test_text_spans_cut_the_response_into_its_tokens(deterministic_run: Path) -> None:
    sequences = reader.read_sequences(deterministic_run).set_index(["iteration", "sequence"])["response"]
    for key, rows in reader.read_tokens(deterministic_run).groupby(["iteration", "sequence"]):
        text = sequences.loc[key]
        pieces = [text[a:b] for a, b in zip(rows["char_start"], rows["char_end"], strict=True)]
        assert "".join(pieces) == text


def test_learning_happens(deterministic_run: Path) -> None:
    steps = reader.read_steps(deterministic_run)
    assert steps["policy_digest"].nunique() == len(steps)
    assert (steps["grad_norm"] > 0).all() and (steps["value_grad_norm"] > 0).all()


def test_environment_and_config_are_recorded(deterministic_run: Path) -> None:
    environment = json.loads((deterministic_run / "environment.json").read_text())
    assert environment["packages"]["torch"].startswith("2.")
    assert environment["numerics_mode"] == "deterministic"
    iterations = reader.read_iterations(deterministic_run)
    assert pd.isna(iterations["eval_accuracy"]).tolist() == [False, True, False]
