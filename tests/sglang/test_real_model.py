"""A real model in the real SGLang: SmolLM2-135M by the plugin samples the bits of the built-in engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from ppo_repro.config.files import load_config
from ppo_repro.models.load import load_folder, stop_ids
from ppo_repro.models.networks import make_policy
from ppo_repro.rollout.engine import Completion, Request, Sampling
from ppo_repro.rollout.sglang.engine import sglang_engine
from ppo_repro.rollout.torch_engine import TorchEngine
from tests.support.models import unequal
from tests.support.paths import ROOT
from tests.support.row_dependent import NOISE, row_dependent_linear
from tests.support.sglang import PYTHON, settings_of

MODEL = ROOT / "models" / "smollm2"
CONTEXT = 96
SAMPLINGS = (Sampling(1.0, 0, 1.0, 24), Sampling(0.7, 0, 1.0, 24))
QUESTIONS = ("12 + 25 = 37\n47 + 38 =", "The capital of France is", "def add(a, b):\n", "Once upon a time, in a town")

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not (MODEL / "config.json").is_file(), reason="models/smollm2 is not there; ppo-repro fetch smollm2"
    ),
]


def same(a: Sequence[Completion], b: Sequence[Completion]) -> bool:
    return [c.response_ids for c in a] == [c.response_ids for c in b] and not differing(a, b)


def differing(a: Sequence[Completion], b: Sequence[Completion]) -> int:
    return unequal(torch.cat([c.logprobs for c in a]), torch.cat([c.logprobs for c in b]))


def built_in(policy: PreTrainedModel, ends: frozenset[int], mode: str = "deterministic") -> TorchEngine:
    return TorchEngine(policy, ends, mode, CONTEXT, 16, 0)


def test_smollm2_in_sglang_samples_the_bits_of_the_built_in_engine(tmp_path: Path) -> None:
    sets = [
        f"model.path={MODEL}",
        f"rollout.engine={{kind: sglang, python: {PYTHON}}}",
        "rollout.stop=[]",
        f"numerics.max_context={CONTEXT}",
        "layout.rollout_slots=16",
        "layout.threads=1",
    ]
    config = load_config(ROOT / "experiments" / "smollm2" / "sums.yaml", sets)
    model, tokenizer = load_folder(MODEL)
    ends, policy = stop_ids(model, tokenizer), make_policy(model, "deterministic", CONTEXT)
    prompts = [tuple(tokenizer(text)["input_ids"]) for text in QUESTIONS]
    requests = [Request(prompts[i % len(prompts)], 2**62 + i) for i in range(12)]
    with sglang_engine(config, settings_of(config), policy, ends, tmp_path, lambda seconds: None) as engine:
        for sampling in SAMPLINGS:
            expected = built_in(policy, ends).generate(requests, sampling)
            assert sum(len(c.response_ids) for c in expected) > 150
            assert same(engine.generate(requests, sampling), expected)
            assert same(engine.generate(requests[::-1][:5], sampling), expected[::-1][:5])
        with torch.no_grad():  # as after a step of training
            for parameter in policy.parameters():
                parameter += 1e-3 * parameter.abs()
        moved = built_in(policy, ends).generate(requests, SAMPLINGS[0])
        assert not same(moved, expected)
        assert same(engine.generate(requests, SAMPLINGS[0]), moved)
    with row_dependent_linear(NOISE):  # a sampler that differs by construction is found
        native = built_in(make_policy(model, "native", CONTEXT), ends, "native")
        first, alone = native.generate(requests[:2], SAMPLINGS[0]), native.generate(requests[:1], SAMPLINGS[0])
    assert first[0].response_ids != alone[0].response_ids or differing(first[:1], alone) > 0
