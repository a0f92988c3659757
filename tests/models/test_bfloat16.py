"""A folder in bfloat16 is its float32 copy: every bfloat16 number is a float32 number, so nothing is rounded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from experiments.benchmarks.workload import Size, make_tokenizer, write_folder
from ppo_repro.config.files import load_config
from ppo_repro.models.load import load_folder
from ppo_repro.numerics.optimizer import weights_digest
from ppo_repro.records import manifest
from ppo_repro.watcher import Silent
from tests.support.language import run

SIZE = Size("", 2, 64, 128, 1, 64)
CONFIG = Path("experiments/benchmarks/ppo_step.yaml")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model in bfloat16, and the float32 copy of that."""
    base = tmp_path_factory.mktemp("models")
    (base / "source").mkdir()
    write_folder(SIZE, base / "source", 5)
    found = {"bfloat16": base / "bfloat16", "float32": base / "float32"}
    for name, folder in found.items():
        model = AutoModelForCausalLM.from_pretrained(base / "source", dtype=torch.bfloat16)
        model.to(getattr(torch, name)).save_pretrained(folder)
        make_tokenizer(SIZE).save_pretrained(folder)
        (folder / "prompts.jsonl").write_bytes((base / "source" / "prompts.jsonl").read_bytes())
    sizes = [(folder / "model.safetensors").stat().st_size for folder in found.values()]
    assert sizes[0] < 0.6 * sizes[1]
    return found


def test_both_folders_load_as_the_same_float32_weights(folders: dict[str, Path]) -> None:
    models = [load_folder(folder)[0] for folder in folders.values()]
    assert {p.dtype for model in models for p in model.parameters()} == {torch.float32}
    assert len({weights_digest(model.named_parameters()) for model in models}) == 1
    assert {model.config.dtype for model in models} == {torch.float32}


def test_runs_from_both_have_one_fingerprint(folders: dict[str, Path], tmp_path: Path) -> None:
    fingerprints = set()
    for name, folder in folders.items():
        fields = {
            "model.path": folder, "task.path": folder / "prompts.jsonl", "rollout.prompts_per_iteration": 4,
            "rollout.max_response_tokens": 4, "ppo.minibatch_size": 2, "ppo.iterations": 1, "numerics.max_context": 24,
            "ppo.learning_rate": 1e-3,
        }  # fmt: skip
        config = load_config(CONFIG, [f"{field}={value}" for field, value in fields.items()])
        run_dir, _ = run(config, tmp_path / name, Silent())
        recorded = manifest.load(run_dir)
        assert recorded.final["policy_digest"] != recorded.final["initial_policy_digest"]
        fingerprints.add(recorded.fingerprint)
    assert len(fingerprints) == 1
