"""Answers of hundreds of tokens: logits in chunks, packed rows and shared prompts change no bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.config.files import load_config
from ppo_repro.config.run import RunConfig
from ppo_repro.records import manifest
from ppo_repro.stages import forward
from tests.support.language import run
from tests.support.paths import TINY


def fingerprint(config: RunConfig, out: Path, monkeypatch: pytest.MonkeyPatch, at_once: int) -> tuple[str, int]:
    """Fingerprint of a run with `at_once` rows of logits at a time, and the most rows of an update that it had."""
    rows, of_policy = [0], forward.logits

    def watched(model: PreTrainedModel, hidden: Tensor, where: Any = None) -> Tensor:
        if torch.is_grad_enabled():
            rows.append(len(hidden))
        return of_policy(model, hidden, where)

    with monkeypatch.context() as patch:
        patch.setattr(forward, "logits", watched)
        patch.setattr(forward, "LOGITS_AT_ONCE", at_once * config.model.vocab_size)  # type: ignore[union-attr]
        found = manifest.load(run(config, out)[0]).fingerprint
    return found, max(rows)


EXACT_KL = ("kl={placement: loss, estimator: exact}", "rollout.top_p=0.9")


@pytest.mark.usefixtures("row_dependent")
@pytest.mark.parametrize(
    "overrides", [EXACT_KL, ("value={kind: head}",), ("numerics.mode=native",)], ids=["kl", "head", "native"]
)
def test_logits_in_chunks_change_no_bit(
    overrides: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(TINY, ["ppo.iterations=1", "numerics.accuracy_sequences=0", *overrides])
    whole, most = fingerprint(config, tmp_path / "whole", monkeypatch, 1000)
    found, fewer = fingerprint(config, tmp_path / "chunks", monkeypatch, 3)
    # a sequence of up to 4 tokens is never cut
    assert fewer <= 4 < most
    assert (found == whole) == (config.numerics.mode == "deterministic")
