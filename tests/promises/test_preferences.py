"""A DPO run and a reward model have one set of bits under every layout; DPO runs are resumed, rerun and shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ppo_repro.base.mode import Mode
from ppo_repro.base.watcher import Silent
from ppo_repro.config.dpo import DPOConfig
from ppo_repro.config.files import read_tree, validated
from ppo_repro.config.run import TinyModel
from ppo_repro.config.tasks import RewardModelTraining
from ppo_repro.models.reward_model import make_reward_model
from ppo_repro.models.tiny import make_model, make_tokenizer
from ppo_repro.numerics import library
from ppo_repro.preferences.pairs import pairs_by_rule
from ppo_repro.preferences.training import RewardTraining, train_reward_model
from ppo_repro.records import manifest
from ppo_repro.runs.dpo import DPOKind
from ppo_repro.runs.resume import rerun
from ppo_repro.runs.run import run
from ppo_repro.tasks.problems import arithmetic, split
from ppo_repro.tasks.templates import encoder
from tests.support.language import small_run
from tests.support.runs import DPO, small_config

LAYOUTS = (
    ("layout.threads=2", "layout.padding=left", "layout.update_micro_batch=4"),
    ("layout.padding=none", "layout.forward_micro_batch=5", "layout.rollout_slots=7", "layout.prefix_cache=false"),
    ("layout.update_micro_batch=1", "layout.gradient_checkpointing=true", "layout.prefill_chunk=2"),
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run that keeps its reference, so that no warm start has to be done again."""
    settings = "checkpoints.every=2", "ppo.iterations=2", "rollout.samples_per_prompt=4"
    return small_run(tmp_path_factory.mktemp("source"), *settings)


@pytest.fixture(scope="module")
def trained(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(source, tmp_path_factory.mktemp("dpo"))


def write_config(source: Path, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "dpo.yaml").write_text(DPO.format(run=json.dumps(str(source))))
    return folder / "dpo.yaml"


def train(source: Path, folder: Path, *overrides: str) -> Path:
    config = validated(DPOConfig, read_tree(write_config(source, folder), overrides), "dpo")
    return run(DPOKind(Silent()), config, folder)[0]


def fingerprint(run_dir: Path) -> str:
    return manifest.load(run_dir).fingerprint


def test_no_layout_changes_a_dpo_run(trained: Path) -> None:
    for overrides in LAYOUTS:
        again = rerun(DPOKind(Silent()), trained, overrides)
        assert again.difference is None
        assert again.fingerprint == fingerprint(trained)


@pytest.mark.usefixtures("row_dependent")
def test_in_native_numerics_the_layout_shows(source: Path, tmp_path: Path) -> None:
    native = train(source, tmp_path, "numerics.mode=native", "dpo.epochs=1")
    assert rerun(DPOKind(Silent()), native, ["layout.update_micro_batch=4"]).difference is not None


ROWS = (  # forward and update micro-batches in sequences, padding, threads
    (0, 0, "right", 1),
    (7, 10, "left", 2),
    (3, 2, "none", 1),
)


def train_reward(mode: Mode, row: tuple[int, int, str, int]) -> RewardTraining:
    config = small_config(
        f"numerics.mode={mode}", "task.max_operand=6", f"layout.forward_micro_batch={row[0]}",
        f"layout.update_micro_batch={row[1]}", f"layout.padding={row[2]}",
    )  # fmt: skip
    problems = split(arithmetic(6), 12, 0)
    tokenizer = make_tokenizer(problems.train, 20)
    assert isinstance(config.model, TinyModel)
    model = make_model(config.model, len(tokenizer), 24, tokenizer.eos_token_id, 1)
    encode = encoder(tokenizer, config.task)
    ids = dict(zip(problems.by_key, encode(list(problems.by_key.values())), strict=True))
    pairs = pairs_by_rule(problems.train, ids, tokenizer, 60, 0.1, 0)
    held_out = pairs_by_rule(problems.held_out, ids, tokenizer, 40, 0.0, 0)
    settings = RewardModelTraining(num_pairs=60, epochs=2, minibatch_size=16, learning_rate=3e-3)
    library.use_threads(row[3])
    made = make_reward_model(model, mode, 24, 0)
    return train_reward_model(
        made, pairs, held_out, settings, config.numerics, config.layout, 5, lambda step, total, loss: None
    )


def test_no_layout_changes_a_reward_model() -> None:
    found = [train_reward("deterministic", row) for row in ROWS]
    assert all(other == found[0] for other in found)
    assert [step.pairs for step in found[0].steps] == [16, 16, 16, 12] * 2
    assert found[0].accuracy_after > 0.5


@pytest.mark.usefixtures("row_dependent")
def test_in_native_numerics_the_layout_of_a_reward_model_shows() -> None:
    assert len({train_reward("native", row).steps[-1].digest for row in ROWS}) == len(ROWS)
