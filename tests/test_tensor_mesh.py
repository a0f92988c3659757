"""`layout.mesh.tensor`: processes that hold the models together leave the fingerprint of one.

The sums and the models themselves, with threads for processes: `numerics/sharding`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ppo_repro.config.files import load_config
from ppo_repro.errors import UserError
from ppo_repro.plan.shapes import plan_run
from ppo_repro.ranks import ALONE
from ppo_repro.records import manifest
from ppo_repro.runs import language
from ppo_repro.shares import check_mesh, check_shares
from ppo_repro.watcher import Silent
from tests.support.cli import Cli, one_line
from tests.support.language import resume, run
from tests.support.paths import TINY
from tests.support.processes.tensor_worker import CUT, HEAD, LONGER, QUICK, STAGED, interrupted
from tests.support.ranks import end, start_ranks
from tests.support.thread_ranks import in_threads, thread_mesh

pytestmark = pytest.mark.timeout(600)


def test_groups_are_as_many_processes_as_were_started() -> None:
    for data, size in ((0, 4), (2, 4), (1, 2), (0, 2)):
        check_mesh(data, size, 2)
    with pytest.raises(UserError, match=r"^layout.mesh.tensor = 2: this is one process, .*; start 2 with `torchrun "):
        check_mesh(0, 1, 2)
    with pytest.raises(UserError, match=r"^layout.mesh.tensor = 2: 3 processes were started, .*start 4 with "):
        check_mesh(2, 3, 2)
    with pytest.raises(UserError, match=r"^layout.mesh.data = 2: 2 processes were started; start 4 .* or take 1, "):
        check_mesh(2, 2, 2)
    check_shares((1, 2), 4, 2)
    with pytest.raises(UserError, match=r"one entry for each of the 2 groups of 2 processes"):
        check_shares((1, 2, 1, 1), 4, 2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["numerics.mode=native"], "layout.mesh.tensor = 2 needs numerics.mode = exact; take 1"),
        (["layout.mesh.zero=1"], "does not go with this: layout.mesh.zero = 1; remove one of them"),
        (["lora={rank: 2, alpha: 4.0}"], "does not go with this: lora is set; "),
        (["mismatch.sampler.lag={kind: fixed, iterations: 1}"], "does not go with this: mismatch.sampler.lag is set; "),
        (["mismatch.sampler.stock=float32"], "does not go with this: mismatch.sampler.stock is set; "),
        (["mismatch.trainer.precision.gradients=bfloat16"], "this: mismatch.trainer.precision rounds; "),
        (["mismatch.sampler.precision.weights=bfloat16"], "this: mismatch.sampler.precision rounds; "),
        (["model.experts={family: mixtral, count: 4, per_token: 2}"], "this: model.experts is set; "),
        (["layout.mesh.tensor=0"], "layout.mesh.tensor = 0: input should be greater than or equal to 1"),
    ],
)
def test_what_needs_all_weights_is_refused_by_name(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        load_config(TINY, ["layout.mesh.tensor=2", *overrides])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.num_key_value_heads=2", "layout.mesh.tensor = 2: this is one process, "),
        ("model.num_key_value_heads=1", "layout.mesh.tensor = 2: "),
    ],
)
def test_a_mesh_that_does_not_fit_is_one_line(cli: Cli, tmp_path: Path, override: str, message: str) -> None:
    code, out, err = cli("run", TINY, "--out", tmp_path, "--set", override, "--set", "layout.mesh.tensor=2")
    said = [line for line in err.splitlines() if line.startswith("error: ")]
    assert (code, out) == (2, "") and len(said) == 1 and message in said[0]
    assert not list(tmp_path.iterdir())


def test_the_plan_is_of_a_part_of_the_models(cli: Cli) -> None:
    alone, halved = (plan_run(load_config(TINY, [*QUICK, *mesh])) for mesh in ([], ["layout.mesh.tensor=2"]))
    assert halved.work.processes == 2 and halved.work.sequences == alone.work.sequences
    for whole, part in zip(alone.residents, halved.residents, strict=True):
        # norms and the head of the value model are whole on both
        assert whole.weights / 2 < part.weights < 0.6 * whole.weights
        assert part.moments == 2 * part.weights or part.moments == 0
    assert halved.phases["rollout"]["key/value cache"] * 2 == alone.phases["rollout"]["key/value cache"]
    assert halved.phases["loading"]["copies before sharing"] == alone.phases["loading"]["model as it is read"]
    both = plan_run(load_config(TINY, [*QUICK, "layout.mesh={data: 2, tensor: 2}", "layout.rank_shares=[2,1]"]))
    assert (both.work.processes, both.work.sequences) == (4, 6) and both.resident == halved.resident
    code, out, err = cli("plan", TINY, "--set", "layout.mesh.tensor=2")
    assert (code, out) == (2, "") and "num_key_value_heads = 1, which it does not divide" in one_line(err)


def in_mesh(size: int, tensor: int, overrides: Sequence[str], out: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run of several threads in groups of `tensor`, by the eager code: kernels have one pool of threads."""
    monkeypatch.setattr(language, "as_mesh", lambda ranks, *_: ranks)
    config = load_config(TINY, [*overrides, f"layout.mesh.tensor={tensor}"])
    return in_threads(size, lambda world: run(config, out, Silent(), thread_mesh(world, tensor))[0])[0]


SHORT = ["ppo.iterations=1", "checkpoints.every=1", "checkpoints.file_bytes=2000"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "overrides"),
    [(2, [*QUICK, *SHORT]), (2, CUT), (2, HEAD), (4, [*QUICK, *SHORT, "layout.rank_shares=[1,2]"])],
    ids=["two", "cut", "head", "two groups of two"],
)
def test_a_run_of_threads_leaves_the_fingerprint_and_the_files_of_one(
    size: int, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = [o for o in overrides if "rank_shares" not in o]
    whole, _ = run(load_config(TINY, [*usual]), tmp_path / "one", Silent())
    divided = in_mesh(size, 2, overrides, tmp_path / "divided", monkeypatch)
    assert manifest.load(divided).fingerprint == manifest.load(whole).fingerprint
    files = sorted(p for p in whole.rglob("*") if p.suffix == ".safetensors" or p.name == "checkpoint.json")
    assert len(files) >= 4
    in_parts = [p for p in files if p.name.startswith("model-00002-of-")]
    assert len(in_parts) == (2 if "checkpoints.file_bytes=2000" in overrides else 0), "reference and policy"
    for file in files:
        assert (divided / file.relative_to(whole)).read_bytes() == file.read_bytes(), file


def under(folder: Path, size: int, *names: str) -> list[dict[str, Any]]:
    """What each of several processes found."""
    folder.mkdir(exist_ok=True)
    command = ["-m", "tests.support.processes.tensor_worker", str(folder), *names]
    ended = end(start_ranks(*[command] * size), 500.0)
    assert [e.code for e in ended] == [0] * size, ended
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def alone(out: Path, overrides: Sequence[str]) -> str:
    return manifest.load(run(load_config(TINY, list(overrides)), out, Silent())[0]).fingerprint


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("tensor")
    interrupted(folder / "from one", LONGER, ALONE)
    return folder, under(folder, 2)


Two = tuple[Path, list[dict[str, Any]]]


@pytest.mark.slow
def test_two_processes_that_hold_the_models_together_have_the_fingerprint_of_one(two: Two, tmp_path: Path) -> None:
    usual = {"tensor": alone(tmp_path, QUICK), "cut": alone(tmp_path, CUT), "head": alone(tmp_path, HEAD)}
    for found in two[1]:
        assert {name: found[name] for name in usual} == usual


@pytest.mark.slow
def test_partial_sums_that_are_rounded_leave_another_fingerprint(two: Two) -> None:
    """The control: the run that is equal, with partial sums rounded to float32 before they are added up."""
    assert two[1][0]["rounded"] == two[1][1]["rounded"] != two[1][0]["tensor"]


@pytest.mark.slow
def test_each_process_holds_half_of_weights_and_moments(two: Two) -> None:
    config = load_config(TINY, [*QUICK, "layout.mesh.tensor=2"])
    planned = plan_run(config).residents[:2]
    for found in two[1]:
        assert 4 * found["held"]["moments"] <= sum(r.moments for r in planned)
        assert 4 * found["held"]["weights"] <= sum(r.weights for r in planned)
        # of 15 tokens the first process has 7; the plan is of the other, with the largest allowed vocabulary
        assert 4 * found["held"]["moments"] > 0.9 * sum(r.moments for r in planned)


@pytest.mark.slow
def test_a_run_goes_on_in_another_mesh_with_the_same_bits(two: Two, tmp_path: Path) -> None:
    folder, found = two
    whole, _ = run(load_config(TINY, LONGER), tmp_path, Silent())
    usual = manifest.load(whole).fingerprint
    assert [(each["resumed"], each["from one"]) for each in found] == [(usual, usual)] * 2
    (for_one,) = {path.parent for path in (folder / "for one").rglob("manifest.json")}
    with pytest.raises(UserError, match=r"layout.mesh.tensor = 2: this is one process"):
        resume(for_one, Silent())
    resume(for_one, Silent(), ["layout.mesh.tensor=1"])
    assert manifest.load(for_one).fingerprint == usual
    for name in ("interrupted", "from one", "for one"):
        (other,) = {path.parent for path in (folder / name).rglob("manifest.json")}
        for iteration in ("iteration-000001", "iteration-000002", "iteration-000003"):
            files = sorted((whole / "checkpoints" / iteration).iterdir())
            assert len(files) == 5
            for file in files:
                assert (other / "checkpoints" / iteration / file.name).read_bytes() == file.read_bytes(), file.name
        models = sorted(p for p in whole.rglob("*.safetensors") if "iteration-" not in p.as_posix())
        assert len(models) >= 3, "reference, final policy, value model"
        for model in models:
            assert (other / model.relative_to(whole)).read_bytes() == model.read_bytes(), model


@pytest.mark.slow
def test_two_groups_of_two_processes_have_the_fingerprint_of_one(tmp_path: Path) -> None:
    usual = {"both": alone(tmp_path, QUICK), "pipeline": alone(tmp_path, STAGED)}
    assert under(tmp_path / "four", 4) == [usual] * 4


@pytest.mark.slow
def test_an_error_in_the_middle_of_a_layer_ends_all_processes_with_one_line(tmp_path: Path) -> None:
    command = ["-m", "tests.support.processes.tensor_worker", str(tmp_path), "fails"]
    ended = end(start_ranks(command, command), 200.0)
    assert [e.code for e in ended] == [1, 1]
    assert "UserError: rank 1: wrong on purpose" in ended[0].err and "wrong on purpose" in ended[1].err
