"""Answers of hundreds of tokens: logits in pieces, packed rows and shared prompts change no bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from experiments.benchmarks import peak
from ppo_repro.config.files import load_config
from ppo_repro.config.run import RunConfig
from ppo_repro.plan import plan_run
from ppo_repro.records import manifest, reader
from ppo_repro.stages import objective, pieces
from ppo_repro.watcher import Silent
from tests.support.language import rerun, run
from tests.support.paths import TINY

AT_ONCE = 3
KL_OF_ALL_TOKENS = ("kl={placement: loss, estimator: exact}", "rollout.top_p=0.9")


def tiny(*overrides: str) -> RunConfig:
    return load_config(TINY, ["ppo.iterations=1", "numerics.accuracy_sequences=0", *overrides])


def in_chunks(config: RunConfig, out: Path, monkeypatch: pytest.MonkeyPatch, at_once: int = AT_ONCE) -> tuple[str, int]:
    """Fingerprint of a run with `at_once` rows of logits at a time, and the most rows of an update that it had."""
    rows, of_policy = [0], objective.logits

    def watched(model: PreTrainedModel, hidden: Tensor, where: Any = None) -> Tensor:
        if torch.is_grad_enabled():
            rows.append(len(hidden))
        return of_policy(model, hidden, where)

    with monkeypatch.context() as patch:
        patch.setattr(objective, "logits", watched)
        patch.setattr(pieces, "LOGITS_AT_ONCE", at_once * config.model.vocab_size)  # type: ignore[union-attr]
        found = manifest.load(run(config, out, Silent())[0]).fingerprint
    return found, max(rows)


@pytest.mark.parametrize("overrides", [(), KL_OF_ALL_TOKENS, ("value={kind: head}",)], ids=["usual", "kl", "head"])
def test_logits_in_pieces_change_no_bit(
    overrides: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(*overrides)
    whole, most = in_chunks(config, tmp_path / "whole", monkeypatch, 1000)
    found, fewer = in_chunks(config, tmp_path / "pieces", monkeypatch)
    # a sequence of up to 4 tokens is never cut
    assert found == whole and fewer <= 4 < most


@pytest.mark.usefixtures("row_dependent")
def test_in_native_numerics_pieces_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny("numerics.mode=native")
    assert (
        in_chunks(config, tmp_path / "whole", monkeypatch, 1000)[0] != in_pieces(config, tmp_path / "p", monkeypatch)[0]
    )


LONG = (
    "rollout.max_response_tokens=256",
    "numerics.max_context=264",
    "numerics.accuracy_sequences=0",
    "ppo.iterations=1",
    "task.num_eval_prompts=1",
    "layout.update_micro_batch=0",
    "layout.forward_micro_batch=0",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that seldom ends a response: its end token is one of 2,048."""
    path = tmp_path_factory.mktemp("long") / "model"
    peak.make_folder(path, layers=2, vocab_size=2048, hidden=128)
    return path


@pytest.mark.slow
def test_long_answers_are_the_same_in_every_layout(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, packed in one row, and in pieces of 100 logits without a shared prompt; prompts have two samples each."""
    run_dir = run(load_config(peak.CONFIG, [*LONG, f"model.path={folder}"]), tmp_path, Silent())[0]
    tokens = reader.read_tokens(run_dir, columns=["sequence"])
    assert (tokens.groupby("sequence").size() > 200).any()
    assert rerun(run_dir, Silent(), ["layout.padding=none", "layout.threads=2"]).difference is None
    monkeypatch.setattr(pieces, "LOGITS_AT_ONCE", 100 * 2048)
    apart = [
        "layout.prefix_cache=false",
        "layout.rollout_slots=3",
        "layout.padding=left",
        "layout.update_micro_batch=1",
    ]
    assert rerun(run_dir, Silent(), apart).difference is None


def test_the_memory_of_logits_does_not_grow_with_the_answers(folder: Path) -> None:
    def logits(tokens: int) -> list[int]:
        config = load_config(
            peak.CONFIG,
            [*LONG, f"model.path={folder}", f"rollout.max_response_tokens={tokens}", "numerics.max_context=32768"],
        )
        row = plan_run(config).rows["logits"]
        return [row[name] for name in ("scoring", "update")]

    assert logits(24)[1] < logits(8192)[1] and logits(8192) == logits(16384)
