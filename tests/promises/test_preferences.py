"""The layout and the number of processes never change a DPO run or a reward model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ppo_repro.base.watcher import Silent
from ppo_repro.config.dpo import DPOConfig
from ppo_repro.config.files import read_tree, validated
from ppo_repro.records import manifest, reader
from ppo_repro.runs.dpo import DPOKind
from ppo_repro.runs.rerun import rerun
from ppo_repro.runs.run import run
from tests.support import language
from tests.support.ranks import torchrun
from tests.support.runs import DPO

LAYOUTS = (
    ("layout.threads=2", "layout.padding=left", "layout.update_micro_batch=4"),
    ("layout.padding=none", "layout.forward_micro_batch=5", "layout.rollout_slots=7", "layout.prefix_cache=false"),
    ("layout.update_micro_batch=1", "layout.gradient_checkpointing=true", "layout.prefill_chunk=2"),
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run that keeps its reference, so that no warm start has to be done again."""
    settings = "checkpoints.every=2", "ppo.iterations=2", "rollout.samples_per_prompt=4"
    return language.small_run(tmp_path_factory.mktemp("source"), *settings)


@pytest.fixture(scope="module")
def trained(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(source, tmp_path_factory.mktemp("dpo"))


def dpo_config(source: Path, folder: Path, *overrides: str) -> DPOConfig:
    (folder / "dpo.yaml").write_text(DPO.format(run=json.dumps(str(source))))
    return validated(DPOConfig, read_tree(folder / "dpo.yaml", overrides), "dpo")


def train(source: Path, folder: Path, *overrides: str) -> Path:
    return run(DPOKind(Silent()), dpo_config(source, folder, *overrides), folder)[0]


def fingerprint(run_dir: Path) -> str:
    return manifest.load(run_dir).fingerprint


def test_the_divergence_is_sampled_without_the_noise_of_the_recorded_sampler(tmp_path: Path) -> None:
    noisy = language.small_run(
        tmp_path, "rollout.mismatch_sigma=1", "ppo.iterations=1", "checkpoints.every=1", "rollout.samples_per_prompt=4"
    )
    with DPOKind(Silent()).open(dpo_config(noisy, tmp_path), None) as execution:
        assert execution.run is not None
        logits, ids = torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64)
        assert execution.run.prepared.sampler.disturb(logits, ids, ids, 1.0) is logits


def test_dpo_trains_all_weights_of_a_run_that_trained_adapters(tmp_path: Path) -> None:
    settings = "lora={rank: 2, alpha: 2}", "ppo.iterations=1", "checkpoints.every=1", "rollout.samples_per_prompt=4"
    adapted = language.small_run(tmp_path, *settings)
    with DPOKind(Silent()).open(dpo_config(adapted, tmp_path), None) as execution:
        assert execution.run is not None
        assert all(parameter.requires_grad for parameter in execution.run.prepared.state.policy.parameters())


def test_dpo_in_native_numerics_takes_a_run_that_replayed_routes(tmp_path: Path) -> None:
    experts = "model.experts={family: qwen3_moe, count: 5, per_token: 2}", "model.intermediate_size=12"
    short = "ppo.iterations=1", "checkpoints.every=1", "rollout.samples_per_prompt=4", "ppo.replay_routes=true"
    replayed = language.small_run(tmp_path, *experts, *short)
    with DPOKind(Silent()).open(dpo_config(replayed, tmp_path, "numerics.mode=native"), None) as execution:
        assert execution.run is not None


def test_no_layout_changes_a_dpo_run(trained: Path) -> None:
    for overrides in LAYOUTS:
        again = rerun(DPOKind(Silent()), trained, overrides)
        assert again.difference is None
        assert again.fingerprint == fingerprint(trained)


def test_no_layout_changes_a_dpo_run_in_high(source: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    highest, high = (
        train(source, tmp_path_factory.mktemp(precision), f"numerics.precision={precision}", "dpo.epochs=1")
        for precision in ("highest", "high")
    )
    again = rerun(DPOKind(Silent()), high, LAYOUTS[0])
    assert again.difference is None
    assert again.fingerprint == fingerprint(high) != fingerprint(highest)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 8])
def test_no_number_of_processes_changes_a_dpo_run(trained: Path, processes: int) -> None:
    assert torchrun(processes, "rerun", trained).returncode == 0


@pytest.mark.slow
def test_no_number_of_processes_changes_a_reward_model(tmp_path: Path) -> None:
    made = language.tiny_run(tmp_path, *MADE)
    for processes in (2, 4):
        assert torchrun(processes, "rerun", made).returncode == 0


@pytest.mark.usefixtures("row_dependent")
def test_in_native_numerics_the_layout_shows(source: Path, tmp_path: Path) -> None:
    native = train(source, tmp_path, "numerics.mode=native", "dpo.epochs=1")
    assert rerun(DPOKind(Silent()), native, ["layout.update_micro_batch=4"]).difference is not None


MADE = (
    "reward.terms=[{kind: trained_model, num_pairs: 28, epochs: 2, minibatch_size: 8, learning_rate: 1e-3}]",
    *("ppo.iterations=1", "model.warm_start_steps=5", "numerics.accuracy_sequences=0"),
)


def test_no_layout_changes_a_reward_model(tmp_path: Path) -> None:
    made = language.tiny_run(tmp_path, *MADE)
    assert reader.read_table("pair_steps", made)["pairs"].tolist() == [8, 8, 8, 4] * 2
    for overrides in LAYOUTS:
        assert language.rerun(made, overrides).difference is None


@pytest.mark.usefixtures("row_dependent")
def test_in_native_numerics_the_layout_of_a_reward_model_shows(tmp_path: Path) -> None:
    native = language.tiny_run(tmp_path, *MADE, "numerics.mode=native")
    found = language.rerun(native, ["layout.update_micro_batch=4"]).difference
    assert found is not None
    assert found.table in ("pairs", "pair_updates", "pair_steps")
