"""Models that a run left: whatever happens to a file of them, nobody goes on from it, and nobody waits for it."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

import pytest

from ppo_repro.base.errors import UserError
from ppo_repro.base.files import SUMS_NAME
from ppo_repro.base.output import one_line
from ppo_repro.base.watcher import Silent
from ppo_repro.config.files import load_config
from ppo_repro.models.load import load_folder
from ppo_repro.runs.verify import verify
from tests.support.damage import drawn
from tests.support.language import fork, run
from tests.support.paths import TINY

USUAL = ("model.warm_start_steps=3", "ppo.iterations=1", "lora={rank: 2, alpha: 4}")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an adapter and a value model of its own."""
    return run(load_config(TINY, USUAL), tmp_path_factory.mktemp("finished"), Silent())[0]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["checkpoints/final", "checkpoints/value_model", "checkpoints/adapter"])
def test_no_damage_of_a_models_folder_is_gone_on_from(finished: Path, tmp_path: Path, name: str) -> None:
    assert (finished / name).is_dir()
    assert verify(finished).status == "complete"
    for seed in range(100):
        run_dir = Path(shutil.copytree(finished, tmp_path / "run"))
        what, damage = drawn(run_dir / name, seed)
        before = {path.name: path.read_bytes() for path in (run_dir / name).iterdir()}
        damage(run_dir / name)
        start = time.process_time()
        try:
            after = {path.name: path.read_bytes() for path in (run_dir / name).iterdir() if path.is_file()}
            if after != before:
                with pytest.raises(UserError) as refused:
                    fork(run_dir, tmp_path / "forks", None, "ppo.iterations=2")
                assert len(one_line(refused.value)) < 1000
            if random.Random(seed).random() < 0.5:
                (run_dir / name / SUMS_NAME).unlink()
            if name != "checkpoints/final":  # no model of its own
                with pytest.raises(UserError):
                    load_folder(run_dir / name)
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {what}") from error
        assert time.process_time() - start < 3.0, what
        shutil.rmtree(run_dir)
