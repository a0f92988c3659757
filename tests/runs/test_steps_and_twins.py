"""Runs on additions in columns: rewards at the ends of right steps; twins that differ in one bit or one token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ppo_repro.base.errors import UserError
from ppo_repro.config.files import load_config
from ppo_repro.records import manifest, reader
from ppo_repro.tasks.problems import column_steps
from tests.support.cli import Cli
from tests.support.language import rerun, tiny_run
from tests.support.paths import TINY

STEPS = (
    "task={kind: column_addition, digits: 2, base: 3, size: 36, num_eval_prompts: 7}",
    "model.tokenizer=characters",
    "model.warm_start_steps=120",
    "reward.terms=[{kind: exact_match, weight: 0.5}, {kind: steps, weight: 3.0, placement: step_ends}]",
    "rollout.max_response_tokens=20",
    "numerics.max_context=32",
)


def recorded(out: Path, *overrides: str) -> Path:
    return tiny_run(out, *STEPS, *overrides)


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("usual"))


def test_each_right_step_is_rewarded_on_its_last_token_and_the_answer_on_the_last(usual: Path, cli: Cli) -> None:
    tokens, right, wrong = reader.read_tokens(usual), 0, 0
    for row in reader.read_sequences(usual).itertuples():
        steps = column_steps(row.prompt, 3)
        of = tokens[(tokens["iteration"] == row.iteration) & (tokens["sequence"] == row.sequence)]
        expected = np.zeros(len(of))
        expected[-1] = 0.5 * row.is_correct
        position = 0
        for word, step in zip(row.response.split(" "), steps, strict=False):
            position += len(word)  # a token is a character
            right, wrong = right + (word == step), wrong + (word != step)
            expected[position - 1] += 3.0 / len(steps) * (word == step)
            position += 1
        assert of["placed_scores"].to_numpy() == pytest.approx(expected)
        assert row.scores == pytest.approx(expected.sum())
    assert right > 10, "both kinds occur"
    assert wrong > 10, "both kinds occur"
    assert cli("verify", usual)[0] == 0


def test_steps_need_their_task() -> None:
    with pytest.raises(UserError, match=r"of kind steps need task\.kind = column_addition"):
        load_config(TINY, ["reward.terms=[{kind: steps}]"])
    with pytest.raises(UserError, match="size = 37 must be at most 36"):
        load_config(TINY, [STEPS[0].replace("size: 36", "size: 37"), *STEPS[1:]])


def test_a_flipped_bit_and_a_flipped_token_change_a_run(usual: Path, tmp_path: Path) -> None:
    again, bit, token = (recorded(tmp_path / name, f"mismatch.flip={name}") for name in ("null", "bit", "token"))
    runs = usual, again, bit, token
    fingerprints = [manifest.load(path).fingerprint for path in runs]
    assert fingerprints[0] == fingerprints[1]
    assert len(set(fingerprints)) == 3
    ids = [reader.read_tokens(path, iterations=[0], columns=["token_id"])["token_id"].to_numpy() for path in runs]
    assert np.flatnonzero(ids[0] != ids[3]).tolist() == [0]
    logprobs = [reader.read_tokens(path, iterations=[0])["old_logprobs"].to_numpy() for path in (usual, bit)]
    assert 0 < np.abs(logprobs[0] - logprobs[1]).max() < 1e-5
    assert rerun(bit).difference is None
