"""`layout.mesh`: one fingerprint under every mesh; what does not fit the processes is said before anything is written.

Optimizers that are divided, without processes: `numerics/optim/test_division.py`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ppo_repro.config.files import load_config
from ppo_repro.errors import UserError
from ppo_repro.plan.memory import Plan
from ppo_repro.plan.shapes import plan_run
from ppo_repro.ranks import ALONE
from ppo_repro.records import manifest
from ppo_repro.shares import check_mesh
from ppo_repro.watcher import Silent
from tests.support.cli import Cli, one_line
from tests.support.language import resume, run
from tests.support.paths import TINY
from tests.support.processes.mesh_worker import LORA, QUICK, RUNS, interrupted
from tests.support.ranks import cli_ranks, end, start_ranks

pytestmark = pytest.mark.timeout(600)


def test_a_mesh_has_as_many_processes_as_were_started() -> None:
    for size in (1, 2, 5):
        check_mesh(0, size)
        check_mesh(size, size)
    with pytest.raises(UserError, match=r"^layout.mesh.data = 2: this is one process; start 2 with `torchrun "):
        check_mesh(2, 1)
    with pytest.raises(UserError, match=r"^layout.mesh.data = 3: 2 processes were started; .* or take 2, or 0 for all"):
        check_mesh(3, 2)


def test_a_mesh_that_is_not_set_is_not_written_down() -> None:
    usual = load_config(TINY)
    assert "mesh" not in usual.model_dump(mode="json")["layout"]
    assert load_config(TINY, ["layout.mesh={}"]).digest() == usual.digest()
    assert load_config(TINY, ["layout.mesh.data=2"]).digest() != usual.digest()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("layout.mesh.data=2", "layout.mesh.data = 2: this is one process; "),
        ("layout.mesh.data=-1", "layout.mesh.data = -1: input should be greater than or equal to 0"),
        ("layout.mesh.data=two", "layout.mesh.data = 'two': input should be a valid integer"),
        ("layout.mesh.expert=2", "layout.mesh.expert: unknown field"),
        ("layout.mesh=2", "layout.mesh = 2: "),
        ("layout.mesh.zero=4", "layout.mesh.zero = 4: input should be 0, 1, 2 or 3"),
    ],
)
def test_a_mesh_that_does_not_fit_is_one_line(cli: Cli, tmp_path: Path, override: str, message: str) -> None:
    code, out, err = cli("run", TINY, "--out", tmp_path, "--set", override)
    said = [line for line in err.splitlines() if line.startswith("error: ")]
    assert (code, out) == (2, "") and len(said) == 1 and message in said[0]
    assert not list(tmp_path.iterdir())


def test_the_plan_is_of_one_process_of_the_mesh(cli: Cli) -> None:
    alone, halved = plan_run(load_config(TINY)), plan_run(load_config(TINY, ["layout.mesh.data=2"]))
    assert (alone.work.sequences, halved.work.sequences) == (15, 8)
    assert (alone.work.update_sequences, halved.work.update_sequences) == (3, 2)
    assert halved.peak < alone.peak and halved.resident == alone.resident
    unequal = plan_run(load_config(TINY, ["layout.mesh.data=2", "layout.rank_shares=[4,1]"]))
    assert unequal.work.sequences == 12
    code, out, _ = cli("plan", TINY, "--set", "layout.mesh.data=2", "--json")
    assert code == 0 and json.loads(out)["processes"] == 2
    code, out, _ = cli("plan", TINY, "--set", "layout.mesh.data=2")
    assert code == 0 and "each of the 2 processes" in out
    code, out, err = cli("plan", TINY, "--set", "layout.mesh.data=3", "--set", "layout.rank_shares=[1,1]")
    assert (code, out) == (2, "") and "layout.rank_shares = [1, 1]: must have one entry for each" in one_line(err)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["numerics.mode=native"], "layout.mesh.zero = 2 needs numerics.mode = exact; take 0"),
        (["layout.mesh.data=1"], "layout.mesh.zero = 2 divides among processes, and layout.mesh.data = 1; take 0, or"),
        (["lora={rank: 2, alpha: 4.0}"], "layout.mesh.zero = 2 needs all weights to be trained, and lora is set"),
        (
            ["value={kind: separate, learning_rate: 1e-3, lora: {rank: 2, alpha: 4.0}}"],
            "layout.mesh.zero = 2 needs all weights to be trained, and value.lora is set",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        load_config(TINY, ["layout.mesh.zero=2", *overrides])


def test_the_plan_divides_moments_and_sums() -> None:
    def planned(zero: int) -> Plan:
        return plan_run(load_config(TINY, [f"layout.mesh={{data: 4, zero: {zero}}}"]))

    usual, moments, sums = (planned(zero) for zero in (0, 1, 2))
    for before, after in zip(usual.residents, moments.residents, strict=True):
        assert 4 * (after.moments - 8) <= before.moments <= 4 * after.moments and after.weights == before.weights
    assert usual.phases == moments.phases and moments.residents == sums.residents
    both = [r.gradient_sums for r in usual.residents[:2]]
    assert (usual.phases["update"]["gradient sums"], sums.phases["update"]["gradient sums"]) == (sum(both), max(both))


def test_the_plan_divides_weights() -> None:
    def planned(zero: int) -> Plan:
        return plan_run(load_config(TINY, [f"layout.mesh={{data: 4, zero: {zero}}}"]))

    sums, weights = planned(2), planned(3)
    for before, after in zip(sums.residents, weights.residents, strict=True):
        assert 0.25 * before.weights < after.weights < 0.35 * before.weights, "norms are whole"
        assert after.moments == before.moments and after.gradient_sums == before.gradient_sums
    for phase in ("rollout", "scoring", "update"):
        # of all matrices in turn the largest, whole and prepared
        assert 0 < weights.phases[phase]["operands"] < 0.5 * sums.phases[phase]["operands"]
    assert weights.phases["loading"]["copies before sharing"] == sums.phases["loading"]["model as it is read"]
    assert weights.resident < sums.resident


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["lora={rank: 2, alpha: 4.0}"], "layout.mesh.zero = 3 needs all weights to be trained, and lora is set"),
        (["mismatch.sampler.stock=float32"], "layout.mesh.zero = 3 does not go with this: mismatch.sampler.stock is "),
        (["mismatch.sampler.lag={kind: fixed, iterations: 1}"], "go with this: mismatch.sampler.lag is set; take 2"),
        (["model.experts={family: mixtral, count: 4, per_token: 2}"], "go with this: model.experts is set; take 2"),
        (
            ["mismatch.trainer.precision.gradients=bfloat16"],
            "this: mismatch.trainer.precision rounds; take 2, or remove",
        ),
    ],
)
def test_what_needs_all_weights_is_refused_by_name(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        load_config(TINY, ["layout.mesh.zero=3", *overrides])


@dataclass(frozen=True)
class Meshes:
    """What several processes found under meshes, and what one alone finds."""

    found: list[dict[str, Any]]  # by rank
    folder: Path


def under_meshes(folder: Path, size: int, *names: str) -> Meshes:
    folder.mkdir(exist_ok=True)
    command = ["-m", "tests.support.processes.mesh_worker", str(folder), *names]
    ended = end(start_ranks(*[command] * size), 500.0)
    assert [e.code for e in ended] == [0] * size, ended
    return Meshes([json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)], folder)


def alone(out: Path, *overrides: str) -> Path:
    return run(load_config(TINY, [*QUICK, *overrides]), out, Silent())[0]


def fingerprint(out: Path, *overrides: str) -> str:
    return manifest.load(alone(out, *overrides)).fingerprint


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Meshes:
    folder = tmp_path_factory.mktemp("meshes")
    interrupted(folder / "from one", [], ALONE)
    return under_meshes(folder, 2)


@pytest.mark.slow
def test_two_processes_have_the_fingerprint_of_one_under_every_mesh(two: Meshes, tmp_path: Path) -> None:
    usual = dict.fromkeys(two.found[0].keys() & RUNS.keys() - {"adapters", "head"}, fingerprint(tmp_path))
    others = {"adapters": fingerprint(tmp_path, LORA), "head": fingerprint(tmp_path, "value={kind: head}")}
    for found in two.found:
        assert {name: found[name] for name in (*usual, *others)} == {**usual, **others}


@pytest.mark.slow
def test_three_processes_with_unequal_shares_have_the_fingerprint_of_one(tmp_path: Path) -> None:
    usual = fingerprint(tmp_path)
    for found in under_meshes(tmp_path / "three", 3).found:
        assert found == {"data": usual, "zero 2": usual, "zero 3": usual}


@pytest.mark.slow
def test_sums_in_float32_leave_another_fingerprint(two: Meshes, tmp_path: Path) -> None:
    """The control: the mesh of a run that is equal, with gradients that are rounded where they are added."""
    assert two.found[0]["rounded"] != fingerprint(tmp_path, "ppo.learning_rate=0.01")


@pytest.mark.slow
def test_each_process_holds_its_part_of_the_moments(two: Meshes) -> None:
    undivided = two.found[0]["moments"][0]
    for zero in (1, 2, 3):
        held = [found["moments"][zero] for found in two.found]
        assert sum(held) == undivided and max(held) < 0.51 * undivided, "pieces differ by one number at most"


@pytest.mark.slow
def test_each_process_holds_its_part_of_the_weights(two: Meshes) -> None:
    whole = two.found[0]["weights"][2]
    assert two.found[0]["weights"][:3] == [whole] * 3
    residents = plan_run(load_config(TINY, [*QUICK, "layout.mesh={data: 2, zero: 3}"])).residents
    for found in two.found:
        # norms and biases are whole; the plan is for the largest vocabulary that the configuration allows
        assert 0.5 * whole < found["weights"][3] < 0.56 * whole
        assert 0.9 * sum(r.weights for r in residents) < found["weights"][3] <= sum(r.weights for r in residents)


@pytest.mark.slow
def test_a_run_goes_on_under_another_mesh_with_the_same_bits(two: Meshes, tmp_path: Path) -> None:
    whole = alone(tmp_path, "ppo.iterations=3", "checkpoints.every=1", "checkpoints.keep=9")
    usual = manifest.load(whole).fingerprint
    assert [(found["resumed"], found["from one"]) for found in two.found] == [(usual, usual)] * 2
    (for_one,) = {path.parent for path in (two.folder / "for one").rglob("manifest.json")}
    assert manifest.load(for_one).status == "interrupted"
    with pytest.raises(UserError, match=r"layout.mesh.data = 2: this is one process"):
        resume(for_one, Silent())
    resume(for_one, Silent(), ["layout.mesh.data=0"])
    assert manifest.load(for_one).fingerprint == usual
    for folder in ("interrupted", "from one"):
        (other,) = {path.parent for path in (two.folder / folder).rglob("manifest.json")}
        for name in ("iteration-000001", "iteration-000002", "iteration-000003"):
            files = sorted((whole / "checkpoints" / name).iterdir())
            assert len(files) == 5
            for file in files:
                assert (other / "checkpoints" / name / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.slow
def test_the_command_goes_on_in_two_processes(tmp_path: Path) -> None:
    run_dir = interrupted(tmp_path / "interrupted", [], ALONE)
    ended = cli_ranks(2, "resume", run_dir, "--set", "layout.mesh.zero=2", "--json")
    assert [e.code for e in ended] == [0, 0], ended
    assert ended[1].out == ended[1].err == ""
    whole = fingerprint(tmp_path, "ppo.iterations=3", "checkpoints.every=1", "checkpoints.keep=9")
    assert json.loads(ended[0].out)["fingerprint"] == whole
    refused = cli_ranks(2, "resume", run_dir)
    assert [e.code for e in refused] == [2, 2]
    assert "the run is finished" in refused[0].errors[-1] and refused[1].err == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["layout.mesh.data=2", "layout.mesh.data=0"], "layout.mesh: rank 1 has "),
        (["layout.mesh.data=3"] * 2, "layout.mesh.data = 3: 2 processes were started; "),
    ],
)
def test_a_mesh_of_which_the_processes_differ_ends_all_of_them(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    ended = end(
        start_ranks(*[["-m", "ppo_repro", "run", str(TINY), "--out", str(tmp_path), "--set", o] for o in overrides])
    )
    assert [e.code for e in ended] == [2, 2]
    assert len(ended[0].errors) == 1 and ended[0].errors[0].startswith("error: ") and message in ended[0].errors[0]
    assert ended[1].out == ended[1].err == ended[0].out == ""
    assert not list(tmp_path.rglob("*"))
