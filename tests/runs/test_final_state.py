"""What a finished run keeps of its training: the value model and the optimizers' state, beside the policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ppo_repro.config.files import load_config
from ppo_repro.errors import UserError
from ppo_repro.models.folders import load_value_model
from ppo_repro.numerics.optimizer import weights_digest
from ppo_repro.records import contents, manifest
from ppo_repro.runs import checkpoint_format, checkpoints
from ppo_repro.runs.checkpoint_format import Checkpoint
from ppo_repro.runs.verify import verify
from ppo_repro.watcher import Silent
from tests.support.language import run
from tests.support.paths import TINY

# overrides, and folders of trained models
KINDS: dict[str, tuple[tuple[str, ...], int]] = {
    "separate": ((), 2),
    "head": (("value={kind: head}",), 2),
    "none": (("value={kind: none}", "advantages={kind: group}", "kl={placement: loss}"), 1),
    "lora": (("lora={rank: 2, alpha: 4.0}",), 4),
}


def recorded(out: Path, *overrides: str) -> Path:
    return run(load_config(TINY, ["ppo.iterations=1", "model.warm_start_steps=2", *overrides]), out, Silent())[0]


def require_equal(found: Checkpoint, expected: Checkpoint) -> None:
    for name in ("policy", "value_model"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert set(ours) == set(theirs)
        assert all(torch.equal(ours[key].view(torch.int32), theirs[key].view(torch.int32)) for key in ours)
    for name in ("policy_optimizer", "value_optimizer"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        for moment in ("first", "second", "factors"):
            left, right = getattr(ours, moment), getattr(theirs, moment)
            assert set(left) == set(right) and all(torch.equal(left[key], right[key]) for key in left)
        nothing = {"first": {}, "second": {}, "factors": {}}
        assert replace(ours, **nothing) == replace(theirs, **nothing)
    assert (found.iteration, found.chain) == (expected.iteration, expected.chain)
    assert found.coefficients == expected.coefficients


@pytest.mark.parametrize(("overrides", "folders"), KINDS.values(), ids=KINDS)
def test_a_finished_run_has_the_state_of_a_checkpoint_after_its_last_iteration(
    tmp_path: Path, overrides: tuple[str, ...], folders: int
) -> None:
    run_dir = recorded(tmp_path / "final", *overrides)
    same = recorded(tmp_path / "checkpoint", "checkpoints.every=1", *overrides)
    assert not contents.final_state_folder(same).exists(), "the same twice"
    found, expected = (checkpoints.load_final(folder, manifest.load(folder)) for folder in (run_dir, same))
    require_equal(found, expected)
    assert verify(run_dir).model_folders == folders


def test_the_value_model_of_a_run_can_be_loaded(tmp_path: Path) -> None:
    run_dir = recorded(tmp_path)
    for mode in ("deterministic", "native"):
        loaded = load_value_model(contents.value_folder(run_dir), mode, 12)
        assert weights_digest(loaded.named_parameters()) == manifest.load(run_dir).final["value_digest"]


def test_a_head_is_no_model_by_itself(tmp_path: Path) -> None:
    run_dir = recorded(tmp_path, "value={kind: head}")
    with pytest.raises(UserError, match="holds a head on the policy's trunk"):
        load_value_model(contents.value_folder(run_dir), "deterministic", 12)


def test_the_state_can_be_left_out(tmp_path: Path) -> None:
    run_dir = recorded(tmp_path, "checkpoints.final_state=false")
    assert not contents.final_state_folder(run_dir).exists() and verify(run_dir).model_folders == 2
    with pytest.raises(UserError, match=r"checkpoints\.final_state"):
        checkpoints.load_final(run_dir, manifest.load(run_dir))


def test_a_damaged_state_or_value_model_is_named(tmp_path: Path) -> None:
    run_dir = recorded(tmp_path)
    folders = contents.final_state_folder(run_dir), contents.value_folder(run_dir)
    for path in (folders[0] / "policy_optimizer.safetensors", folders[1] / "value_model.safetensors"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        with pytest.raises(UserError, match=str(path)):
            verify(run_dir)
        content[-1] ^= 1
        path.write_bytes(content)
    index = folders[0] / checkpoint_format.INDEX_NAME
    index.unlink()
    with pytest.raises(UserError, match=str(index)):
        verify(run_dir)
