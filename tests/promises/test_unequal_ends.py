"""If sampler and trainer differ in one bit, the run ends and names the token; its records can be read.

Every fault is one flipped bit, so it is there on every processor.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from ppo_repro.base.errors import UserError
from ppo_repro.buffers import MinibatchUpdate
from ppo_repro.config.files import load_config
from ppo_repro.config.inputs import run_folder
from ppo_repro.models.load import load_folder
from ppo_repro.numerics.weights import weights_digest
from ppo_repro.records import manifest, reader
from ppo_repro.records.folder import UNEQUAL, UNEQUAL_TOKENS
from ppo_repro.runs.resume import Resumed
from ppo_repro.runs.verify_files import verify_files
from ppo_repro.stages.equal_bits import UnequalBits
from tests.support.cli import Cli
from tests.support.language import rerun, resume, run, tiny_run
from tests.support.paths import TINY
from tests.support.unequal import first_step_differs, other_ratio, other_value, sampler_differs

QUICK = ("model.warm_start_steps=4",)


def ended(out: Path, *overrides: str) -> tuple[Path, str]:
    """The folder of a run that has to end because bits are unequal, and its error."""
    config = load_config(TINY, [*QUICK, *overrides])
    with pytest.raises(UnequalBits) as stop:
        run(config, out)
    return run_folder(config, out), str(stop.value)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run without the fault: the control of what follows."""
    return tiny_run(tmp_path_factory.mktemp("whole"), *QUICK)


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The sampler's log-prob of token 0 of response 3 is another one in iteration 1."""
    with pytest.MonkeyPatch.context() as patch:
        sampler_differs(patch, 1, 3, 0)
        return ended(tmp_path_factory.mktemp("failed"))


def test_the_error_names_the_token_and_both_values(failed: tuple[Path, str], whole_run: Path) -> None:
    run_dir, error = failed
    tokens = reader.read_tokens(whole_run).set_index(["iteration", "sequence", "position"])
    value = tokens.at[(1, 3, 0), "old_logprobs"]
    other = (value.view("int32") ^ 1).view("float32")
    rollout, old = (f"{float(x)!r} (bits {int(x.view('uint32')):08x})" for x in (other, value))
    assert error == (
        f"iteration 1, response 3, token 0: rollout_logprobs {rollout}, old_logprobs {old}; "
        f"1 of {len(tokens.loc[1])} tokens differ; "
        f"all of them: {run_dir / 'checkpoints' / 'unequal' / 'unequal.parquet'}"
    )


def test_complete_iterations_are_kept_and_the_token_can_be_looked_at(failed: tuple[Path, str], whole_run: Path) -> None:
    run_dir, _ = failed
    recorded = manifest.load(run_dir)
    assert recorded.status == "failed"
    assert recorded.iterations == manifest.load(whole_run).iterations[:1]
    found = pd.read_parquet(run_dir / UNEQUAL / UNEQUAL_TOKENS)
    assert found[["iteration", "sequence", "position"]].values.tolist() == [[1, 3, 0]]
    assert found["rollout_logprobs"].item() != found["old_logprobs"].item()
    last_step = reader.read_table("steps", whole_run).query("iteration == 0").iloc[-1]
    assert weights_digest(load_folder(run_dir / UNEQUAL)[0].named_parameters()) == last_step["policy_digest"]
    whole = verify_files(run_dir)
    assert (whole.status, whole.iterations, whole.model_folders) == ("failed", 1, 1)
    assert (whole.unfinished, whole.uncovered) == ((), ())


def test_rerun_refuses_it_and_resume_ends_there_again_or_goes_on(
    failed: tuple[Path, str], whole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = Path(shutil.copytree(failed[0], tmp_path / "copy"))
    with pytest.raises(UserError, match="the run is failed"):
        rerun(run_dir)
    with monkeypatch.context() as patch:
        sampler_differs(patch, 1, 3, 0)
        with pytest.raises(UnequalBits, match="iteration 1, response 3, token 0: "):
            resume(run_dir)
    assert manifest.load(run_dir).status == "failed"
    assert len(manifest.load(run_dir).iterations) == 1
    # once what was wrong is put right, it is the run that it would have been
    assert resume(run_dir) == Resumed(0, 1)
    assert manifest.load(run_dir).fingerprint == manifest.load(whole_run).fingerprint
    assert verify_files(run_dir).status == "complete"


def test_from_a_checkpoint_it_goes_on_and_what_was_kept_is_gone(
    whole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        sampler_differs(patch, 1, 3, 0)
        run_dir, _ = ended(tmp_path, "checkpoints.every=1")
    assert verify_files(run_dir).model_folders == 2  # and the reference
    assert resume(run_dir) == Resumed(1, 1)
    assert manifest.load(run_dir).fingerprint == manifest.load(whole_run).fingerprint
    assert not (run_dir / UNEQUAL).exists()
    assert verify_files(run_dir).uncovered == ()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (other_ratio, r"ratios (1\.0000001192092896 \(bits 3f800001\)), expected 1\.0 \(bits 3f800000\); 1 of "),
        (other_value, r"values \S+ \(bits \w{8}\), new_values \S+ \(bits \w{8}\); 1 of "),
    ],
)
def test_a_ratio_or_a_value_of_the_first_minibatch_ends_the_first_iteration(
    change: Callable[[MinibatchUpdate], MinibatchUpdate],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first_step_differs(monkeypatch, change)
    run_dir, error = ended(tmp_path, "ppo.ratio_anchor=old")
    assert re.match(rf"iteration 0, response \d+, token 0: {says}", error)
    # without a complete iteration the folder stays too: there is something to look at
    assert manifest.load(run_dir).status == "failed"
    assert verify_files(run_dir).iterations == 0


@pytest.mark.parametrize("override", ["numerics.mode=native", "rollout.mismatch_sigma=0.1"])
def test_where_it_is_measured_nothing_changes(override: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler_differs(monkeypatch, 0, 3, 0)
    first_step_differs(monkeypatch, other_ratio)
    run_dir = tiny_run(tmp_path, *QUICK, override, "ppo.iterations=1")
    counted = reader.read_iterations(run_dir).iloc[0]
    assert counted["unequal_old_rollout_logprobs"] > 0
    assert counted["unequal_first_ratios"] > 0


def test_the_command_says_it_on_one_line_with_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    sampler_differs(monkeypatch, 0, 3, 0)
    code, out, err = cli("run", TINY, "--out", tmp_path)
    said = [line for line in err.splitlines() if line.startswith("promise broken: ")]
    assert code == 1
    assert out == ""
    assert len(said) == 1
    assert "Traceback" not in err
    assert said[0].startswith("promise broken: iteration 0, response 3, token 0: rollout_logprobs -")
