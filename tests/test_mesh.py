"""`layout.mesh`: what fits the processes is taken, what does not is said in one line before anything is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ppo_repro.config.files import load_config
from ppo_repro.errors import UserError
from ppo_repro.plan.shapes import plan_run
from ppo_repro.shares import check_mesh
from tests.support.cli import Cli, one_line
from tests.support.paths import TINY
from tests.support.ranks import end, start_ranks

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
