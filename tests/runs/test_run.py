"""What a small run leaves in its folder."""

import json
from pathlib import Path

import pandas as pd
import torch

from ppo_repro.records import manifest, reader
from ppo_repro.runs.models_kept import load_final


def test_the_saved_policy_is_the_trained_one(deterministic_run: Path) -> None:
    from transformers import AutoModelForCausalLM

    from ppo_repro.numerics.optimizer import weights_digest

    model = AutoModelForCausalLM.from_pretrained(deterministic_run / "checkpoints" / "final", dtype=torch.float32)
    recorded = manifest.load(deterministic_run)
    assert weights_digest(model.named_parameters()) == recorded.final["policy_digest"]
    state = load_final(deterministic_run, recorded)
    assert state.iteration == 3
    assert set(state.policy_optimizer.steps.values()) == {len(reader.read_steps(deterministic_run))}
    of_state = ((name, state.policy[name]) for name, _ in model.named_parameters())
    assert weights_digest(of_state) == recorded.final["policy_digest"]


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
