"""The parity of long episodes: what it compares, how it counts, how it goes on; on small models made here."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from experiments.smollm2 import parity
from experiments.smollm2.parity import Interruptions, Size, Slice, Subject, measured, read_slices, scored, table
from ppo_repro.errors import UserError
from ppo_repro.rollout.engine import Request
from ppo_repro.rollout.torch_engine import TorchEngine
from tests.support.cli import one_line
from tests.support.models import CONTEXT, policy, ragged, source_model
from tests.support.rollout import STOPS

SIZE = Size(episodes=6, response_tokens=20, turn=5)
TEXTS = [(3, 9), (11,), (4, 4, 4)]


def subject(mode: str) -> Subject:
    prompts, _ = ragged(3, 7)
    return Subject(policy("llama", mode), mode, STOPS, [tuple(p) for p in prompts], TEXTS)


@pytest.mark.parametrize("index", [0, 1], ids=["whole distribution", "top-p"])
def test_no_bit_of_whole_episodes_differs(index: int) -> None:
    found = subject("deterministic").measure(index, SIZE)
    assert (found.unequal, found.largest, found.top_p) == (0, 0.0, 0.95 if index else 1.0)
    assert found.turns > 2 * SIZE.episodes and found.forced > found.turns - SIZE.episodes
    assert found.tokens + found.forced > SIZE.episodes * (SIZE.response_tokens - 4)


@pytest.mark.usefixtures("row_dependent")
def test_the_control_differs() -> None:
    found = subject("native").measure(0, SIZE)
    assert found.unequal > found.tokens // 2 and found.largest > 0


@pytest.mark.parametrize("index", [0, 1], ids=["whole distribution", "top-p"])
def test_the_numbers_are_those_of_float64_token_by_token(index: int) -> None:
    """Each log-prob from its definition: softmax(logits / temperature) over the tokens kept, in float64."""
    of, sampling = subject("deterministic"), SIZE.sampling(index)
    prompts = list(of.prompts)
    engine = TorchEngine(of.policy, STOPS, "deterministic", CONTEXT, 3, 0)
    asked = [Request(p, i) for i, p in enumerate(prompts)]
    completions = engine.generate(asked, sampling, Interruptions(TEXTS, SIZE.turn))
    model, expected = source_model("llama").double(), []
    for prompt, c in zip(prompts, completions, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *c.episode_ids]])).logits[0] / sampling.temperature
        sampled = [i for i, forced in enumerate(c.is_forced) if not forced]
        for row, i in enumerate(sampled):
            at = logits[len(prompt) + i - 1]
            order = at.argsort(descending=True)
            mass = at.softmax(-1)[order]
            kept = order[(mass.cumsum(-1) - mass) <= sampling.top_p]
            assert c.response_ids[row] == c.episode_ids[i] and c.response_ids[row] in kept.tolist()
            expected.append(float(at[c.response_ids[row]] - at[kept].logsumexp(-1)))
    got = scored(of.policy, prompts, completions, sampling, "deterministic")
    # float32 layers of two layers' depth
    torch.testing.assert_close(got.double(), torch.tensor(expected, dtype=torch.float64), atol=2e-5, rtol=0)


def test_what_is_done_is_not_done_again(capsys: pytest.CaptureFixture[str]) -> None:
    deterministic, native = subject("deterministic"), subject("native")
    whole = list(measured(deterministic, native, SIZE, 150, []))
    rest = list(measured(deterministic, native, SIZE, 150, whole[:2]))
    assert [s.numerics for s in whole[:2]] == ["native", "deterministic"] and len(rest) == len(whole) - 2 > 0

    def counts(s: Slice) -> dict[str, object]:
        return {name: value for name, value in asdict(s).items() if not name.endswith("_s")}

    assert [counts(s) for s in rest] == [counts(s) for s in whole[2:]]
    assert sum(s.tokens for s in whole if s.numerics == "deterministic") >= 150
    assert "of 150 tokens" in capsys.readouterr().err
    assert table(whole)["tokens"].sum() == sum(s.tokens for s in whole)


def test_slices_of_something_else_are_refused(tmp_path: Path) -> None:
    found = subject("deterministic").measure(0, SIZE)
    path = tmp_path / "slices.jsonl"
    path.write_text(json.dumps(asdict(found)) + "\n")
    assert read_slices(path, found.model, SIZE) == [found]
    assert read_slices(tmp_path / "absent", found.model, SIZE) == []
    for model, size in (("another", SIZE), (found.model, Size(response_tokens=21))):
        with pytest.raises(UserError, match="slice 0 is of another model or size; choose another --out"):
            read_slices(path, model, size)
    path.write_text(path.read_text()[:40])
    with pytest.raises(UserError, match="is no file of slices"):
        read_slices(path, found.model, SIZE)


@pytest.mark.parametrize(
    ("change", "said"),
    [({"tokens": 0}, "must be at least 1"), ({"response_tokens": 64}, "above 64"), ({}, "absent")],
)
def test_bad_arguments_are_one_line(
    change: dict[str, int], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = {"model": tmp_path / "absent", "tokens": 1, "response_tokens": 256, "threads": 1, "out": tmp_path / "out"}
    assert parity.main(Namespace(**{**usual, **change})) == 2
    assert said in one_line(capsys.readouterr().err) and not (tmp_path / "out").exists()
