"""`layout.mesh.pipeline`: processes that hold some layers each leave the fingerprint of one. Native numerics do not.

The models themselves, with threads for processes: `numerics/sharding/test_stages.py`; two groups of two processes:
`test_tensor_mesh.py`.
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
from ppo_repro.shares import check_mesh
from ppo_repro.watcher import Silent
from tests.support.cli import Cli, one_line
from tests.support.language import run
from tests.support.paths import TINY
from tests.support.processes.pipeline_worker import HEAD, LONGER, NATIVE, PIPELINE, QUICK
from tests.support.processes.tensor_worker import interrupted
from tests.support.ranks import end, start_ranks

pytestmark = pytest.mark.timeout(600)


def test_a_pipeline_has_as_many_processes_as_were_started() -> None:
    for data, size in ((0, 4), (2, 4), (1, 2), (0, 2)):
        check_mesh(data, size, pipeline=2)
    with pytest.raises(UserError, match=r"^layout.mesh.pipeline = 2: this is one process, .*; start 2 with `torchrun "):
        check_mesh(0, 1, pipeline=2)
    with pytest.raises(UserError, match=r"^layout.mesh.pipeline = 2: 3 processes were started, .*start 4 with "):
        check_mesh(2, 3, pipeline=2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["numerics.mode=native"], "layout.mesh.pipeline = 2 needs numerics.mode = exact; take 1"),
        (["layout.mesh.tensor=2"], "layout.mesh.tensor = 2 does not go with this: layout.mesh.pipeline = 2; remove"),
        (["layout.mesh.zero=1"], "layout.mesh.pipeline = 2 does not go with this: layout.mesh.zero = 1; remove one"),
        (["lora={rank: 2, alpha: 4.0}"], "layout.mesh.pipeline = 2 does not go with this: lora is set; "),
        (["mismatch.sampler.lag={kind: fixed, iterations: 1}"], "does not go with this: mismatch.sampler.lag is set; "),
        (["layout.mesh.pipeline=0"], "layout.mesh.pipeline = 0: input should be greater than or equal to 1"),
    ],
)
def test_what_has_no_pipeline_is_refused_by_name(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        load_config(TINY, ["layout.mesh.pipeline=2", *overrides])


def test_a_pipeline_that_does_not_fit_is_one_line(cli: Cli, tmp_path: Path) -> None:
    code, out, err = cli("run", TINY, "--out", tmp_path, "--set", "layout.mesh.pipeline=2")
    said = [line for line in err.splitlines() if line.startswith("error: ")]
    assert (code, out) == (2, "") and len(said) == 1 and "layout.mesh.pipeline = 2: this is one process" in said[0]
    assert not list(tmp_path.iterdir())
    code, out, err = cli("plan", TINY, "--set", "layout.mesh.pipeline=2")
    assert (code, out) == (2, "") and "num_hidden_layers = 1, and each process needs one" in one_line(err)


def test_the_plan_is_of_a_stage() -> None:
    alone, staged = (plan_run(load_config(TINY, [*QUICK, *mesh])) for mesh in ([], [PIPELINE]))
    assert staged.work.processes == 2 and staged.work.sequences == alone.work.sequences
    for whole, part in zip(alone.residents, staged.residents, strict=True):
        assert whole.weights / 2 <= part.weights < 0.55 * whole.weights, "the last norm is whole on both"
    assert staged.phases["rollout"]["key/value cache"] * 2 == alone.phases["rollout"]["key/value cache"]
    assert staged.phases["update"]["activations"] < 0.6 * alone.phases["update"]["activations"]


def under_two(folder: Path) -> list[dict[str, Any]]:
    """What each of two processes found."""
    command = ["-m", "tests.support.processes.pipeline_worker", str(folder)]
    ended = end(start_ranks(command, command), 500.0)
    assert [e.code for e in ended] == [0, 0], ended
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def alone(out: Path, overrides: Sequence[str]) -> str:
    return manifest.load(run(load_config(TINY, list(overrides)), out, Silent())[0]).fingerprint


Two = tuple[Path, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Two:
    folder = tmp_path_factory.mktemp("pipeline")
    interrupted(folder / "from one", LONGER, ALONE)
    return folder, under_two(folder)


@pytest.mark.slow
def test_two_processes_with_some_layers_each_have_the_fingerprint_of_one(two: Two, tmp_path: Path) -> None:
    usual = {"pipeline": alone(tmp_path, QUICK), "head": alone(tmp_path, HEAD)}
    for found in two[1]:
        assert {name: found[name] for name in usual} == usual


@pytest.mark.slow
def test_what_is_handed_over_in_16_bits_leaves_another_fingerprint(two: Two) -> None:
    """The control: the run that is equal, with a residual stream that is rounded between the processes."""
    assert two[1][0]["rounded"] == two[1][1]["rounded"] != two[1][0]["pipeline"]


@pytest.mark.slow
def test_native_numerics_have_another_fingerprint_in_each_mesh(two: Two, tmp_path: Path) -> None:
    """The control of all meshes: stock sums depend on who adds up what."""
    assert len({alone(tmp_path, NATIVE), two[1][0]["native"], two[1][0]["native, unequal"]}) == 3


@pytest.mark.slow
def test_each_process_holds_its_layers(two: Two) -> None:
    planned = {r.name: r.weights // 4 for r in plan_run(load_config(TINY, [PIPELINE, *QUICK])).residents}
    for found in two[1]:
        # the plan is for the largest vocabulary that the configuration allows
        assert all(0.9 * count < found["held"][name] <= count for name, count in planned.items())


@pytest.mark.slow
def test_a_run_goes_on_in_another_mesh_with_the_same_bits(two: Two, tmp_path: Path) -> None:
    """Interrupted in a pipeline and resumed with weights in pieces; in one process, and resumed in a pipeline."""
    folder, found = two
    whole, _ = run(load_config(TINY, LONGER), tmp_path, Silent())
    usual = manifest.load(whole).fingerprint
    assert [(each["resumed"], each["from one"]) for each in found] == [(usual, usual)] * 2
    for name in ("interrupted", "from one"):
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
