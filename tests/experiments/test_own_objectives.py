"""The published objectives among the experiments compute their definitions, and pass the trial of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ppo_repro.config.files import load_config
from ppo_repro.ppo.objectives import ClipFlag, probability_ratios
from ppo_repro.ppo.own_batches import ObjectiveBatch
from ppo_repro.user.functions import OwnObjective, load_functions
from ppo_repro.user.trial import try_functions
from tests.support.paths import ROOT
from tests.support.runs import small_config

LENGTHS = (3, 1, 5)


def objective(name: str) -> OwnObjective:
    config = load_config(ROOT / "experiments" / "own_objectives" / f"{name}.yaml")
    functions = load_functions(config.functions)
    try_functions(config, functions)
    assert functions.objective is not None
    return functions.objective


@pytest.fixture
def batch() -> ObjectiveBatch:
    generator = torch.Generator().manual_seed(0)
    responses = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))
    new, anchor = (-1.0 - 2.0 * torch.rand(2, 9, generator=generator)).unbind()
    zeros = torch.zeros(9)
    return ObjectiveBatch(
        responses=responses,
        groups=responses,
        positions=torch.cat([torch.arange(n) for n in LENGTHS]),
        lengths=torch.tensor(LENGTHS)[responses],
        new_logprobs=new,
        entropies=zeros,
        ratios=probability_ratios(new, anchor),
        anchor_logprobs=anchor,
        old_logprobs=anchor,
        rollout_logprobs=anchor,
        ref_logprobs=anchor,
        advantages=torch.tensor([1.5, -0.5, 2.0])[responses],
        corrections=zeros + 1.0,
    )


def test_cut_tokens_are_high_above_a_ratio_of_1_and_low_from_it_down(batch: ObjectiveBatch, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def loss(b): return -b.ratios, b.positions >= 0")
    own = load_functions(
        small_config(f"ppo.objective={{kind: function, path: {tmp_path}/own.py:loss}}").functions
    ).objective
    assert own is not None
    flags = own.losses(replace(batch, ratios=torch.tensor([0.9, 1.0, 1.1] * 3))).flags
    assert flags.tolist() == [ClipFlag.CLIP_LOW, ClipFlag.CLIP_LOW, ClipFlag.CLIP_HIGH] * 3


def test_sapo(batch: ObjectiveBatch) -> None:
    losses, _, flags = objective("sapo").losses(batch)
    ratios, advantages = batch.ratios.double().numpy(), batch.advantages.double().numpy()
    tau = np.where(advantages > 0, 1.0, 1.05)
    expected = -4.0 / tau / (1.0 + np.exp(-tau * (ratios - 1.0))) * advantages
    np.testing.assert_allclose(losses.numpy(), expected, rtol=1e-6)
    assert (flags == ClipFlag.UNKNOWN).all()


def test_gmpo(batch: ObjectiveBatch) -> None:
    losses, _, flags = objective("gmpo").losses(batch)
    logs, advantages = (batch.new_logprobs - batch.anchor_logprobs).double().numpy(), batch.advantages.numpy()
    start, expected, cut = 0, [], []
    for length in LENGTHS:
        x, sign = logs[start : start + length], np.sign(advantages[start])
        bounded = sign * np.minimum(sign * x, np.clip(sign * x, -0.4, 0.4))
        expected += [-advantages[start] * np.exp(bounded.mean())] * length
        cut += list(sign * x > 0.4)
        start += length
    np.testing.assert_allclose(losses.numpy(), expected, rtol=1e-6)
    assert (flags != ClipFlag.NONE).tolist() == cut
    assert any(cut)
