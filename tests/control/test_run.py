"""Whole control runs: ratios of 1, layouts that do not show, reruns, what the records hold, the command line."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from analysis.mismatch.parity import parity
from ppo_repro.control.loop import control_iterations, prepare
from ppo_repro.control.summary import summarise
from ppo_repro.errors import PromiseBroken, UserError
from ppo_repro.records import control_schema, manifest, reader
from ppo_repro.records.arrow import to_arrow
from ppo_repro.runs.diff import first_difference, first_table_difference
from ppo_repro.runs.resume import Resumed
from ppo_repro.watcher import Silent
from tests.support import synthetic_run
from tests.support.cli import Cli, one_line
from tests.support.control import rerun, resume, run, small_control
from tests.support.paths import ROOT, SMALL, SMALL_CONTROL
from tests.support.row_dependent import row_dependent_linear

REAL = (
    "environment.id=Pendulum-v1", "environment.num_envs=3", "environment.steps_per_env=120", "ppo.minibatch_size=72",
    "ppo.value_clip_range=null", "ppo.iterations=2", "evaluation.episodes=1",
)  # fmt: skip
LIMITED = ("environment.id=tests/Limited-v0", "ppo.iterations=3", "evaluation.episodes=0")
LAYOUTS = [
    ("layout.update_micro_batch=7",),
    ("layout.update_micro_batch=25", "layout.threads=2"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("control")


@pytest.fixture(scope="module")
def deterministic(folder: Path) -> Path:
    return run(small_control(), folder, Silent())[0]


@pytest.fixture(scope="module")
def real(folder: Path) -> Path:
    return run(small_control(*REAL), folder, Silent())[0]


@pytest.fixture(scope="module")
def native(folder: Path) -> Path:
    """The negative control: native numerics whose sums depend on the number of rows on every processor."""
    with row_dependent_linear():
        return run(small_control("numerics.mode=native"), folder, Silent())[0]


@pytest.fixture(scope="module")
def limited(folder: Path) -> Path:
    return run(small_control(*LIMITED), folder, Silent())[0]


@pytest.fixture
def copy(deterministic: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(deterministic, tmp_path / "copy"))


@pytest.mark.parametrize("which", ["deterministic", "real"])
def test_the_ratio_is_one_before_the_first_step_of_every_iteration(which: str, request: pytest.FixtureRequest) -> None:
    found = parity(request.getfixturevalue(which))
    assert found.tokens >= 720 and found.first_minibatch_tokens >= 144
    assert found.unequal_old_rollout_logprobs == found.unequal_first_ratios == found.unequal_values == 0
    assert found.unequal_ratios > found.update_rows // 2, "the weights must have moved, or a constant would pass"


def test_without_learning_every_ratio_of_every_epoch_is_one(tmp_path: Path) -> None:
    still = ("ppo.learning_rate=0", "ppo.iterations=10")
    deterministic = parity(run(small_control(*still), tmp_path, Silent())[0])
    with row_dependent_linear():
        native = parity(run(small_control(*still, "numerics.mode=native"), tmp_path, Silent())[0])
    assert (
        deterministic.update_rows == 2 * deterministic.tokens
        and deterministic.unequal_ratios == deterministic.unequal_update_values == 0
    )
    assert native.unequal_ratios > native.update_rows // 20 and native.unequal_update_values > native.update_rows // 2


def test_native_numerics_fail_the_same_check(native: Path) -> None:
    found = parity(native)
    assert found.unequal_old_rollout_logprobs > found.tokens // 50
    assert found.unequal_first_ratios > 0 and found.unequal_values > 0


@pytest.mark.parametrize("which", ["deterministic", "real", "native"])
def test_the_run_counted_what_the_records_hold(which: str, request: pytest.FixtureRequest) -> None:
    run_dir = request.getfixturevalue(which)
    again, logged = dataclasses.asdict(parity(run_dir)), dataclasses.asdict(summarise(run_dir))
    shared = set(again) & set(logged)
    assert len(shared) >= 6
    assert {name: again[name] for name in shared} == {name: logged[name] for name in shared}


@pytest.mark.parametrize("which", ["deterministic", "real"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=[" ".join(layout) for layout in LAYOUTS])
def test_no_layout_changes_a_bit(which: str, layout: tuple[str, ...], request: pytest.FixtureRequest) -> None:
    run_dir = request.getfixturevalue(which)
    found = rerun(run_dir, Silent(), layout)
    assert found.difference is None, found.difference.describe()
    assert found.fingerprint == manifest.load(run_dir).fingerprint


def test_a_native_run_repeats_under_its_own_layout_only(native: Path) -> None:
    with row_dependent_linear():
        assert rerun(native, Silent()).difference is None
        assert rerun(native, Silent(), ["layout.update_micro_batch=7"]).difference is not None


def test_a_flipped_bit_is_named_by_rerun_diff_and_reader(copy: Path, deterministic: Path) -> None:
    def flip(rows: list[list[float]]) -> list[list[float]]:
        rows[5][1] = float(np.nextafter(np.float32(rows[5][1]), np.float32(9)))
        return rows

    synthetic_run.damage_cell(copy, "tokens", 2, "observations", flip)
    for call in (
        lambda: first_difference(deterministic, copy),
        lambda: rerun(copy, Silent()),
        lambda: reader.read_tokens(copy),
    ):
        with pytest.raises(UserError, match=r"tokens/iteration=000002\.parquet: has another SHA-256"):
            call()
    synthetic_run.accept(copy, "tokens", 2)
    for found in (first_difference(deterministic, copy), rerun(copy, Silent()).difference):
        assert found is not None
        assert (found.table, found.iteration, found.column, found.row) == ("tokens", 2, "observations", 5)
        assert found.unequal_in_column == 1 and "observations" in found.describe()


def test_minus_zero_is_another_observation() -> None:
    table = dataclasses.replace(control_schema.TOKENS, columns=(control_schema.TOKENS.columns[3],), key=())
    nan = np.array([0x7FC00123], np.uint32).view(np.float32)
    left, right = ([np.concatenate([nan, np.array([zero, 1], np.float32)])] for zero in (0.0, -0.0))
    found = first_table_difference(table, *(to_arrow(table, {"observations": side}) for side in (left, right)), 0)
    assert found is not None and "(at 1)" in found.describe()


def test_random_control_tables_come_back(tmp_path: Path) -> None:
    run_dir = synthetic_run.make_run(tmp_path / "a", kind="control")
    tables = [synthetic_run.random_tables(i, 12, kind="control") for i in range(2)]
    for name, read in (("sequences", reader.read_sequences), ("tokens", reader.read_tokens)):
        frame = read(run_dir)
        for column in frame.columns:
            recorded = [value for part in tables for value in part[name].column(column).to_pylist()]
            if isinstance(recorded[0], list):
                assert [row.dtype for row in frame[column]] == [np.dtype(np.float32)] * 24
                assert repr([row.tolist() for row in frame[column]]) == repr(recorded)
            else:
                assert len(frame) == 24
    with pytest.raises(UserError, match=r"a control run, .* a language run"):
        first_difference(run_dir, synthetic_run.make_run(tmp_path / "b"))


@pytest.mark.parametrize("which", ["deterministic", "real"])
def test_an_episode_can_be_played_again_from_its_seed_and_actions(which: str, request: pytest.FixtureRequest) -> None:
    """Gymnasium alone, without our environments, goes through the recorded observations and rewards."""
    run_dir = request.getfixturevalue(which)
    sequences, tokens = reader.read_sequences(run_dir), reader.read_tokens(run_dir)
    steps = tokens.merge(sequences, on=["iteration", "sequence"])
    env = gymnasium.make("CartPole-v1" if which == "deterministic" else "Pendulum-v1")
    ended = 0
    for _, part in steps.groupby(["environment", "episode"]):
        part = part.sort_values(["iteration", "position"])
        observation, _ = env.reset(seed=int(part["seed"].iloc[0]))
        total = 0.0
        for row in part.itertuples():
            assert row.observations.tolist() == observation.tolist()
            action = int(row.actions[0]) if which == "deterministic" else np.clip(row.actions, -2, 2)
            observation, reward, terminated, truncated, _ = env.step(action)
            total += float(reward)
            assert np.float32(reward) == np.float32(row.rewards)
        reason = part["end_reason"].iloc[-1]
        assert reason == ("terminated" if terminated else "truncated" if truncated else "cut")
        if reason != "cut":
            assert part["episode_return"].iloc[-1] == total
            ended += 1
    assert ended >= 3


def test_results_follow_from_the_records(deterministic: Path) -> None:
    sequences = reader.read_sequences(deterministic)
    ended = sequences.dropna(subset=["episode_return"]).sort_values(["iteration", "last_step", "environment"])
    final = reader.open_manifest(deterministic).final
    assert final["episodes"] == len(ended)
    assert final["last_100_return"] == math.fsum(ended["episode_return"].tail(100)) / min(100, len(ended))
    assert (ended["episode_return"] == ended["first_step"] + ended["fragment_length"]).all(), "CartPole pays 1 a step"
    by_iteration = ended.groupby("iteration")["episode_return"].mean().to_dict()
    logged = reader.read_iterations(deterministic).set_index("iteration")["episode_return_mean"].dropna().to_dict()
    assert by_iteration == logged, "sums of whole numbers, so the means are exact in pandas too"


def test_updates_hold_what_the_losses_used(deterministic: Path) -> None:
    tokens, updates, steps = (
        reader.read_tokens(deterministic),
        reader.read_updates(deterministic),
        reader.read_steps(deterministic),
    )
    key = ["iteration", "sequence", "position"]
    joined = updates.merge(tokens, on=key, validate="many_to_one")
    assert len(updates) == 2 * len(tokens) and not updates.duplicated([*key, "epoch"]).any()
    for _, batch in joined.groupby(["iteration", "epoch", "minibatch"]):
        raw = batch["raw_advantages"].astype(float)
        expected = (raw - raw.mean()) / math.sqrt(raw.var(ddof=0) + 1e-8)
        assert batch["advantages"].to_numpy() == pytest.approx(expected.to_numpy(), rel=1e-5, abs=1e-6)
        assert len(batch) == 60
    assert joined["ratios"].to_numpy() == pytest.approx(
        np.exp(joined["new_logprobs"] - joined["rollout_logprobs"].astype(float)), rel=1e-6
    )
    assert joined["returns"].to_numpy() == pytest.approx(joined["raw_advantages"] + joined["values"], rel=1e-6)
    removed = (
        updates["clip_flag"].str.startswith("clip_").groupby([updates[c] for c in ("iteration", "epoch", "minibatch")])
    )
    assert removed.mean().to_numpy() == pytest.approx(steps["clip_fraction"].to_numpy())
    assert steps["learning_rate"].to_numpy() == pytest.approx(3e-3 * (1 - steps["iteration"] / 4))


def test_the_gradient_norm_is_that_of_both_networks() -> None:
    """The same first step by stock autograd in float64, with one loss over both networks."""
    config = small_control("ppo.iterations=1", "ppo.epochs=1", "ppo.minibatch_size=240", "evaluation.episodes=0")
    state = prepare(config)
    twin = prepare(small_control("ppo.iterations=1", "numerics.mode=native")).agent.double()
    (item,) = control_iterations(config, state)
    (step,) = item.updates
    x = item.rollout.observations.double()
    log_p = twin.actor(x).log_softmax(-1)
    chosen = log_p.gather(1, item.rollout.actions.long())[:, 0]
    surrogate = -((chosen - item.rollout.rollout_logprobs.double()).exp() * step.advantages.double()).mean()
    entropy = -(log_p.exp() * log_p).sum(-1).mean()
    value_loss = 0.5 * ((twin.critic(x)[:, 0] - item.advantages.returns.double()) ** 2).mean()
    (surrogate - 0.01 * entropy + 0.5 * value_loss).backward()
    norm = math.sqrt(sum(float((p.grad**2).sum()) for p in twin.parameters()))
    assert step.joint_grad_norm == pytest.approx(norm, rel=1e-6)
    assert step.policy_loss == pytest.approx((surrogate - 0.01 * entropy).item(), abs=1e-5)
    assert step.value_loss == pytest.approx(value_loss.item(), rel=1e-5)


@pytest.mark.parametrize(
    "override",
    [
        "ppo.bootstrap_truncated=false",
        "ppo.whiten_advantages=iteration",
        "ppo.whiten_advantages=none",
        "ppo.value_clip_range=null",
        "ppo.value_coef=1.0",
        "ppo.clip_range_schedule=linear",
        "ppo.max_grad_norm=0.1",
        "ppo.adam_eps=1e-3",
        "network.hidden_size=32",
    ],
)
def test_every_option_has_an_effect(override: str, limited: Path, tmp_path: Path) -> None:
    changed = run(small_control(*LIMITED, override), tmp_path, Silent())[0]
    assert manifest.load(limited).fingerprint != manifest.load(changed).fingerprint


def test_a_killed_run_is_completed_and_compared(copy: Path, deterministic: Path) -> None:
    complete = manifest.load(deterministic)
    synthetic_run.cut_back(copy, 2, "interrupted")
    with pytest.raises(UserError, match="the run is interrupted"):
        rerun(copy, Silent())
    assert resume(copy, Silent(), ["layout.update_micro_batch=7"]) == Resumed(0, 2)
    resumed = manifest.load(copy)
    assert resumed == complete.model_copy(update={"notes": resumed.notes, "log_digest": resumed.log_digest})
    assert set(resumed.notes) == {"environment.json", "resumed-001.json", "times.json"}
    with pytest.raises(UserError, match="the run is finished"):
        resume(copy, Silent())


def test_a_resumed_run_finds_what_was_changed(copy: Path) -> None:
    synthetic_run.cut_back(copy, 2, "interrupted")
    synthetic_run.rewrite_cell(copy, "tokens", 1, "rewards", lambda v: np.concatenate([v[:3], v[3:4] + 1, v[4:]]))
    with pytest.raises(PromiseBroken, match="table tokens, iteration 1, column rewards, row 3"):
        resume(copy, Silent())
    assert manifest.load(copy).status == "failed"


def test_a_changed_configuration_is_refused(copy: Path) -> None:
    path = copy / "config.yaml"
    path.write_text(path.read_text().replace("epochs: 2", "epochs: 3"))
    with pytest.raises(UserError, match="is not the configuration the run was started with"):
        rerun(copy, Silent())


def test_commands(cli: Cli, tmp_path: Path) -> None:
    code, out, _ = cli("control", SMALL_CONTROL, "--set", "ppo.iterations=2", "--out", tmp_path, "--json")
    found = json.loads(out)
    assert code == 0 and found["tokens"] == 480 and found["unequal_first_ratios"] == 0
    run_dir = found["run_dir"]
    code, out, _ = cli("rerun", run_dir, "--set", "layout.update_micro_batch=7")
    assert code == 0 and out == f"identical: 2 iterations, fingerprint {found['fingerprint']}\n"
    code, out, _ = cli("diff", run_dir, run_dir)
    assert (code, out) == (0, "identical\n")
    code, out, _ = cli("show", run_dir)
    assert code == 0 and "complete, 2 iterations" in out and "0 of 480 training log-probs differ" in out
    assert json.loads(cli("show", run_dir, "--json")[1])["fingerprint"] == found["fingerprint"]
    code, _, err = cli("control", SMALL_CONTROL, "--set", "ppo.iterations=2", "--out", tmp_path)
    assert code == 2 and "exists already" in one_line(err)
    code, _, err = cli("rerun", run_dir, "--set", "seed=3")
    assert code == 2 and "may change fields of layout and records only" in one_line(err)
    code, _, err = cli("resume", run_dir)
    assert code == 2 and "the run is finished" in one_line(err)
    code, _, err = cli("control", SMALL_CONTROL, "--set", "environment.id=Nothing-v0", "--out", tmp_path)
    assert code == 2 and "environment.id" in one_line(err)
    assert sorted(p.name for p in (tmp_path / "small_control").iterdir()) == [Path(run_dir).name], "nothing is left"


WITHOUT_GYMNASIUM = """
import sys
sys.modules["gymnasium"] = None
from ppo_repro.commands.cli import main
sys.argv = ["ppo-repro", "control", sys.argv[1], "--out", sys.argv[2]]
main()
"""


@pytest.mark.slow
def test_without_gymnasium_one_line_says_what_to_install(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_GYMNASIUM, str(SMALL_CONTROL), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2 and "pip install 'ppo_repro[control]'" in one_line(done.stderr)
    assert not list(tmp_path.iterdir())


def test_the_config_of_a_language_run_is_refused(cli: Cli) -> None:
    code, _, err = cli("control", SMALL)
    assert code == 2 and "is a file for `ppo-repro run`; give it to that command" in one_line(err)
