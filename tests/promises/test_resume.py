"""A run that was killed or interrupted, resumed under any layout, is the uninterrupted run to the bit.

`KILLS=200 python -m pytest -m slow tests/promises/test_resume.py -k killed -s` kills more often and says where.
"""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ppo_repro.base.errors import PromiseBroken, UserError
from ppo_repro.base.files import MANIFEST
from ppo_repro.base.lock import only_writer
from ppo_repro.buffers import Coefficients, ReturnStatistics
from ppo_repro.config.files import dump_yaml, load_config
from ppo_repro.config.inputs import run_folder
from ppo_repro.numerics.adamw import OptimizerState
from ppo_repro.records import manifest
from ppo_repro.records.next_command import how_to_go_on
from ppo_repro.records.writer import RunWriter
from ppo_repro.runs import checkpoint, kept_checkpoints
from ppo_repro.runs.checkpoint import Checkpoint
from ppo_repro.runs.resume import Resumed, require_same_layout
from ppo_repro.runs.verify_files import verify_files
from tests.support.forked import forked
from tests.support.language import resume, tiny_run
from tests.support.paths import TINY
from tests.support.ranks import cli_ranks
from tests.support.recipes import OTHER_LAYOUT
from tests.support.resume import Recorded, newest, record, require_as_uninterrupted
from tests.support.runs import run_below, small_config

# what moves from iteration to iteration besides the weights
ADAPTIVE = (
    "kl.controller={kind: adaptive, target_kl: 0.5}",
    "value={learning_rate: 1e-3, normalize_returns: true}",
    "ppo.objective={kind: adaptive_clip, target_kl: 0.01}",
)
KILLS = int(os.environ.get("KILLS", "50"))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Five iterations, a checkpoint after every second, one kept; what a kill after each iteration leaves."""
    usual = ("model.warm_start_steps=5", "ppo.iterations=5", "checkpoints.every=2", "checkpoints.keep=1")
    config = load_config(TINY, [*usual, *ADAPTIVE])
    return record(config, tmp_path_factory.mktemp("recorded"))


@pytest.mark.parametrize(("iterations", "start"), [(3, 2), (5, 4)])
def test_a_resumed_run_is_the_uninterrupted_run(
    recorded: Recorded, tmp_path: Path, iterations: int, start: int
) -> None:
    run_dir = recorded.copy(iterations, tmp_path)
    records = {path: path.read_bytes() for path in (run_dir / "records").rglob("*.parquet")}
    assert resume(run_dir, OTHER_LAYOUT) == Resumed(start, iterations)
    recorded.require_same(run_dir)
    assert all(path.read_bytes() == content for path, content in records.items()), "a committed file was rewritten"
    assert verify_files(run_dir).status == "complete"


@pytest.mark.parametrize(("every", "newest_one"), [(0, 2), (1, 5), (3, 3)])
def test_a_resumed_run_may_save_other_checkpoints(
    recorded: Recorded, tmp_path: Path, every: int, newest_one: int
) -> None:
    run_dir = recorded.copy(3, tmp_path)
    assert resume(run_dir, [f"checkpoints.every={every}"]) == Resumed(2, 3)
    require_as_uninterrupted(run_dir, recorded.whole)
    assert verify_files(run_dir).checkpoints == 1
    assert newest(run_dir).name == f"iteration-{newest_one:06d}.safetensors"


def test_a_reference_that_no_manifest_lists_yet_is_saved_again(recorded: Recorded, tmp_path: Path) -> None:
    """A kill came after the folder had its name; of several chat templates a tokenizer saves a folder inside it."""
    run_dir = recorded.copy(1, tmp_path)
    written, reference = RunWriter(run_dir), "checkpoints/reference"
    written.list_files({n: digest for n, digest in written.head.files.items() if not n.startswith(reference)})
    templates = run_dir / reference / "additional_chat_templates"
    templates.mkdir()
    (templates / "tool_use.jinja").write_text("{{ messages }}")
    of_the_user = [run_dir / "checkpoints" / name for name in ("mine", "final-of-mine")]
    for folder in of_the_user:
        folder.mkdir()
    assert resume(run_dir) == Resumed(0, 1)
    recorded.require_same(run_dir)
    assert not templates.exists()
    assert all(folder.exists() for folder in of_the_user), "empty, and none of the run's"


def altered(run_dir: Path, change: Callable[[Checkpoint], Checkpoint]) -> None:
    """Change the newest checkpoint, its digest right."""
    path, written = newest(run_dir), RunWriter(run_dir)
    name = path.relative_to(run_dir).as_posix()
    digest = checkpoint.save(change(checkpoint.load(path, written.head.files[name])), path)
    written.list_files({**written.head.files, name: digest})


def later(state: OptimizerState) -> OptimizerState:
    return dataclasses.replace(state, steps={name: steps + 1 for name, steps in state.steps.items()})


def times(state: OptimizerState, field: str, name: str) -> OptimizerState:
    tensors = getattr(state, field)
    return dataclasses.replace(state, **{field: {**tensors, name: tensors[name] * 1.01}})


def without(state: OptimizerState, field: str, name: str) -> OptimizerState:
    return dataclasses.replace(state, **{field: {n: kept for n, kept in getattr(state, field).items() if n != name}})


def policy(saved: Checkpoint, change: Callable[..., OptimizerState], *about: str) -> Checkpoint:
    return dataclasses.replace(saved, policy_optimizer=change(saved.policy_optimizer, *about))


def value(saved: Checkpoint, change: Callable[..., OptimizerState], *about: str) -> Checkpoint:
    return dataclasses.replace(saved, value_optimizer=change(saved.value_optimizer, *about))


def coefficients(saved: Checkpoint, **changed: Any) -> Checkpoint:
    return dataclasses.replace(saved, coefficients=dataclasses.replace(saved.coefficients, **changed))


UP = "model.layers.0.mlp.up_proj.weight"
ALTERATIONS: dict[str, Callable[[Checkpoint], Checkpoint]] = {
    "steps": lambda c: policy(c, later),
    "first moment": lambda c: policy(c, times, "first", UP),
    "second moment": lambda c: policy(c, times, "second", UP),
    "value steps": lambda c: value(c, later),
    "value first moment": lambda c: value(c, times, "first", "head.weight"),
    "value second moment": lambda c: value(c, times, "second", "head.weight"),
    "kl_coef": lambda c: coefficients(c, kl_coef=c.coefficients.kl_coef * (1 + 2.0**-20)),
    "clip_range": lambda c: coefficients(c, clip_range=c.coefficients.clip_range / 2),
    "statistics of returns": lambda c: coefficients(c, returns=ReturnStatistics()),
}


# of each optimizer one moment: the run that goes on has all others
QUICK = {"first moment", "value second moment", "kl_coef", "clip_range", "statistics of returns"}


@pytest.mark.parametrize("part", [pytest.param(p, marks=[pytest.mark.slow] * (p not in QUICK)) for p in ALTERATIONS])
def test_every_part_of_a_checkpoint_is_needed(recorded: Recorded, tmp_path: Path, part: str) -> None:
    """The negative control: any part of the state that is another one shows in the iteration computed again."""
    run_dir = recorded.copy(3, tmp_path)
    before = newest(run_dir).read_bytes()
    altered(run_dir, lambda unchanged: unchanged)
    assert newest(run_dir).read_bytes() == before
    altered(run_dir, ALTERATIONS[part])
    with pytest.raises(PromiseBroken, match=r"table (sequences|tokens|updates|steps), iteration 2, column "):
        resume(run_dir)
    assert manifest.load(run_dir).status == "failed"


REFUSALS: dict[str, tuple[Callable[[Checkpoint], Checkpoint], str]] = {
    "chain": (lambda c: dataclasses.replace(c, chain="0" * 64), "is not of this run; remove it to start"),
    "task": (lambda c: dataclasses.replace(c, task={"end tokens": "0"}), "^end tokens: are not what the run had"),
    "a moment": (lambda c: policy(c, without, "first", UP), f"iteration 2 does not fit the model: .* {UP}$"),
    "steps": (lambda c: value(c, without, "steps", "head.weight"), r"does not fit the model: .* head\.weight$"),
}


@pytest.mark.parametrize("part", REFUSALS)
def test_a_checkpoint_of_another_run_or_with_parts_missing_is_refused(
    recorded: Recorded, tmp_path: Path, part: str
) -> None:
    change, message = REFUSALS[part]
    run_dir = recorded.copy(3, tmp_path)
    altered(run_dir, change)
    with pytest.raises(UserError, match=message):
        resume(run_dir)


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Stock torch, under one layout, with the coefficient that the other run has not."""
    penalty = "ppo.objective={kind: kl_penalty, penalty_coef: 2, target_kl: 1e-4}"
    usual = ("model.warm_start_steps=5", "ppo.iterations=3", "checkpoints.every=2")
    config = load_config(TINY, [*usual, "numerics.mode=native", penalty])
    return record(config, tmp_path_factory.mktemp("native"))


def test_a_native_run_goes_on_to_its_own_numbers(native: Recorded, tmp_path: Path) -> None:
    run_dir = native.copy(3, tmp_path)
    assert resume(run_dir) == Resumed(2, 3)
    native.require_same(run_dir)


NATIVE_ALTERATIONS: dict[str, Callable[[Checkpoint], Checkpoint]] = {
    "steps": lambda c: policy(c, later),
    "first moment": lambda c: policy(c, times, "first", UP),
    "second moment": lambda c: policy(c, times, "second", UP),
    "penalty_coef": lambda c: coefficients(c, penalty_coef=c.coefficients.penalty_coef * 2),
}


QUICK_NATIVE = {"first moment", "penalty_coef"}


@pytest.mark.parametrize(
    "part", [pytest.param(p, marks=[pytest.mark.slow] * (p not in QUICK_NATIVE)) for p in NATIVE_ALTERATIONS]
)
def test_every_part_of_a_native_checkpoint_is_needed(native: Recorded, tmp_path: Path, part: str) -> None:
    run_dir = native.copy(3, tmp_path)
    altered(run_dir, NATIVE_ALTERATIONS[part])
    with pytest.raises(PromiseBroken, match="iteration 2, column "):
        resume(run_dir)


ADAPTERS = ("lora={rank: 1, alpha: 2}", "value={learning_rate: 1e-3, lora: {rank: 1, alpha: 2}}")


def test_a_run_of_adapters_keeps_small_checkpoints_by_itself_and_goes_on_from_them(
    deterministic_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is trained is counted; the control trains all weights of the same model, and keeps none."""
    monkeypatch.setattr(kept_checkpoints, "AUTO", 2)
    monkeypatch.setattr(kept_checkpoints, "SMALL", 1100)
    model = f"model={{kind: folder, path: '{deterministic_run}/checkpoints/final'}}"
    config = load_config(TINY, [model, "ppo.iterations=3", *ADAPTERS])
    adapted = record(config, tmp_path / "adapted")
    run_dir = adapted.copy(3, tmp_path)
    weights = deterministic_run / "checkpoints" / "final" / "model.safetensors"
    assert newest(run_dir).stat().st_size < weights.stat().st_size
    assert not (run_dir / "checkpoints" / "reference").exists(), "the folder of the model has it"
    assert resume(run_dir, OTHER_LAYOUT) == Resumed(2, 3)
    adapted.require_same(run_dir)
    whole = tiny_run(tmp_path / "whole", model, "ppo.iterations=3")
    assert not list((whole / "checkpoints").glob("iteration-*"))


def test_a_checkpoint_holds_every_coefficient(recorded: Recorded, tmp_path: Path) -> None:
    """Also those of other objectives than this run's."""
    path = newest(recorded.parts / "3")
    saved = checkpoint.load(path, manifest.load(recorded.parts / "3").files[f"checkpoints/{path.name}"])
    numbers = Coefficients(kl_coef=0.1, clip_range=0.2, penalty_coef=0.3, returns=ReturnStatistics(7, 0.4, 0.5))
    digest = checkpoint.save(dataclasses.replace(saved, coefficients=numbers), tmp_path / "checkpoint")
    assert checkpoint.load(tmp_path / "checkpoint", digest).coefficients == numbers


def test_what_cannot_go_on_is_one_line_and_changes_nothing(recorded: Recorded, tmp_path: Path) -> None:
    run_dir = recorded.copy(5, tmp_path)
    path, content = newest(run_dir), newest(run_dir).read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    manifest_before = (run_dir / MANIFEST).read_bytes()
    with pytest.raises(UserError, match=r"iteration-000004\.safetensors: has another SHA-256 .* remove "):
        resume(run_dir)
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"may change fields of layout and rollout\.engine "):
        resume(run_dir, ["ppo.epochs=3"])
    with only_writer(run_dir), pytest.raises(UserError, match="another process is writing it"):
        resume(run_dir)
    assert (run_dir / MANIFEST).read_bytes() == manifest_before
    # a damaged checkpoint that is removed costs what it would have saved
    path.unlink()
    assert resume(run_dir) == Resumed(0, 5)
    recorded.require_same(run_dir)
    with pytest.raises(UserError, match="the run is finished"):
        resume(run_dir)


@pytest.mark.parametrize(
    ("fields", "bound"),
    [
        (("numerics.mode=native",), "numerics.mode = native"),
        (("mismatch.sampler.stock=float32",), "mismatch.sampler.stock = float32"),
    ],
    ids=["native", "stock"],
)
def test_a_layout_that_may_change_bits_is_refused(fields: tuple[str, ...], bound: str, tmp_path: Path) -> None:
    part = record(load_config(TINY, [*fields, "checkpoints.every=1"]), tmp_path).copy(1, tmp_path)
    before = (part / MANIFEST).read_bytes()
    for field, now, recorded in (("device", "cuda", "cpu"), ("threads", "2", "1")):
        said = f"^--set layout.{field}={now}: the run has {recorded}, and with {bound} another layout may give other"
        with pytest.raises(UserError, match=said):
            resume(part, [f"layout.{field}={now}"])
    assert (part / MANIFEST).read_bytes() == before
    assert resume(part, ["layout.threads=1"]) == Resumed(1, 1)


def test_the_advice_of_one_of_several_processes_names_their_number(
    recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = recorded.copy(3, tmp_path)
    assert "processes" not in how_to_go_on(run_dir)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert f"`ppo-repro resume {run_dir}` (in native numerics with 2 processes) goes on from" in how_to_go_on(run_dir)


@pytest.mark.slow
def test_another_number_of_processes_of_a_native_run_is_refused(native: Recorded, tmp_path: Path) -> None:
    run_dir = native.copy(3, tmp_path)
    before = (run_dir / MANIFEST).read_bytes()
    ended = cli_ranks(2, "resume", run_dir)
    said = "error: processes = 2: the run has 1, and with numerics.mode = native another number may give other bits; "
    assert (ended[0].code, ended[0].errors[-1][: len(said)]) == (2, said)
    assert (run_dir / MANIFEST).read_bytes() == before


def test_another_layout_of_stock_servers_that_the_run_starts_is_refused() -> None:
    stock = "{kind: sglang, numerics: stock, servers: 1}"
    recorded = small_config(f"rollout.engine={stock}")
    config = small_config(f"rollout.engine={stock}", "layout.threads=2")
    with pytest.raises(UserError, match=r"threads=2: the run has 1, and with rollout\.engine\.numerics = stock"):
        require_same_layout(recorded, config)
    running = "{kind: sglang, numerics: stock, urls: ['http://127.0.0.1:1']}"
    require_same_layout(
        small_config(f"rollout.engine={running}"), small_config(f"rollout.engine={running}", "layout.threads=2")
    )


def test_a_link_out_of_the_folder_is_refused(recorded: Recorded, tmp_path: Path) -> None:
    run_dir = recorded.copy(3, tmp_path)
    (run_dir / "records" / "tokens" / "iteration=000003.parquet.tmp").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is a symbolic link"):
        resume(run_dir)
    assert not (tmp_path / "elsewhere").exists()


def killed(log: Path, after: float | None, *command: str | Path) -> bool:
    """Whether a command that is killed after so many seconds was still at work then."""
    process = forked(log, *command)
    process.join(after)
    process.kill()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL), log.read_text()
    return process.exitcode != 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_runs_and_forks_killed_at_any_instant_are_resumed(tmp_path: Path) -> None:
    """Chains of kills: a run or a fork is killed, resumed and killed again until one resumption gets to the end."""
    config = load_config(TINY, ["ppo.iterations=4", "checkpoints.every=1", "model.warm_start_steps=3"])
    path, generator, seen, kills, chain = tmp_path / "config.yaml", random.Random(11), Counter[str](), 0, 0
    path.write_text(dump_yaml(config))
    run_dir = run_folder(config, tmp_path / "whole")
    begins = {"run": ("run", path, "--out"), "fork": ("fork", run_dir, "--set", "ppo.iterations=7", "--out")}
    log = tmp_path / "log"
    assert not killed(log, None, *begins["run"], tmp_path / "whole")
    assert not killed(log, None, *begins["fork"], tmp_path / "longer")
    wholes = {"run": run_dir, "fork": run_below(tmp_path / "longer")}
    started = time.perf_counter()
    assert not killed(log, None, *begins["run"], tmp_path / "timed")
    seconds = time.perf_counter() - started
    while kills < KILLS:
        chain += 1
        command = ("run", "fork")[chain % 2]
        whole, out = wholes[command], tmp_path / f"chain{chain}"
        expected, killed_dir, is_complete = manifest.load(whole), out / whole.relative_to(whole.parents[1]), False
        while not is_complete:
            words = ("resume", killed_dir) if killed_dir.exists() else (*begins[command], out)
            after = generator.uniform(0.0, seconds) if kills < KILLS else None
            kills += killed(log, after, *words)
            if not killed_dir.exists():
                seen[f"{command}: no folder yet"] += 1
                continue
            # everything that is there is of the uninterrupted run
            found = manifest.load(killed_dir)
            assert found.iterations == expected.iterations[: found.num_iterations]
            half = "" if not verify_files(killed_dir).unfinished else ", while it wrote"
            seen[f"{command}: {found.num_iterations} recorded{half}"] += 1
            is_complete = found.status == "complete"
        require_as_uninterrupted(killed_dir, whole)
        assert verify_files(killed_dir).unfinished == ()
        shutil.rmtree(out)
    assert verify_files(run_dir).status == "complete", "a fork shares files with its origin"
    print(f"\n{kills} kills in {chain} runs and forks of {seconds:.2f} s; found: {dict(sorted(seen.items()))}")
    assert kills >= KILLS
    assert len(seen) > 4
