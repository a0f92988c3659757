"""Whole runs with a reward model from a folder, and with a potential: what the records then hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ppo_repro.config.files import load_config
from ppo_repro.errors import UserError
from ppo_repro.records import reader
from ppo_repro.watcher import Silent
from tests.support.cases.options import REWARD_MODEL
from tests.support.language import rerun, run
from tests.support.paths import TINY


def recorded(out: Path, *overrides: str) -> Path:
    return run(load_config(TINY, overrides), out, Silent())[0]


def test_a_reward_model_made_in_one_run_judges_another_from_its_folder(tmp_path: Path) -> None:
    made = recorded(tmp_path / "made", f"reward.terms=[{REWARD_MODEL}]")
    folder = tmp_path / "folder"
    (made / "checkpoints" / "reward_model").rename(folder)
    taken = recorded(tmp_path / "taken", f"reward.terms=[{{kind: model, path: '{folder}'}}]")
    frames = [reader.read_sequences(path, columns=["response", "scores"]) for path in (made, taken)]
    assert frames[0].equals(frames[1]), "the same policy and the same reward model"
    assert frames[0]["scores"].nunique() > 5
    assert rerun(taken, Silent(), ["layout.padding=left", "layout.forward_micro_batch=1"]).difference is None
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    with pytest.raises(UserError, match=r"model\.safetensors"):
        rerun(taken, Silent(), [])


@pytest.mark.slow
def test_a_potential_changes_every_summed_reward_by_that_of_the_start(tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("def phi(prompt, response, answer):\n    return 2.0 + len(response)\n")
    still = ("ppo.learning_rate=0", "value.learning_rate=0", "kl.placement=none")
    plain = recorded(tmp_path / "plain", *still[:2], "kl={placement: none}")
    shaped = recorded(
        tmp_path / "shaped", *still[:2], "kl={placement: none}", f"reward.potential='{tmp_path}/p.py:phi'"
    )
    sums = [reader.read_sequences(path, columns=["reward_sum"])["reward_sum"] for path in (plain, shaped)]
    # small whole numbers: no rounding
    assert np.array_equal(sums[1], sums[0] - 2.0)
    rewards = [reader.read_tokens(path, columns=["rewards"])["rewards"] for path in (plain, shaped)]
    assert (rewards[0] != rewards[1]).any()


def test_a_reward_model_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"reward model .*nowhere: must be a transformers model folder"):
        recorded(tmp_path, f"reward.terms=[{{kind: model, path: '{tmp_path}/nowhere'}}]")
    assert not list(tmp_path.rglob("manifest.json"))
