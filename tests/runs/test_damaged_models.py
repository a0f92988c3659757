"""Models that a run left: whatever happens to a file of them, nobody goes on from it, and nobody waits for it."""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path

import pytest

from ppo_repro.base.errors import UserError
from ppo_repro.base.output import one_line
from ppo_repro.models.load import load_folder
from ppo_repro.runs.verify import verify
from tests.support.damage import Damage, cut, device, flipped
from tests.support.language import fork, tiny_run

USUAL = ("model.warm_start_steps=3", "ppo.iterations=1", "lora={rank: 2, alpha: 4}")
SECONDS = 2.0  # of this process, for a refusal


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an adapter and a value model of its own."""
    return tiny_run(tmp_path_factory.mktemp("finished"), *USUAL)


def drawn(folder: Path, seed: int) -> tuple[str, Damage]:
    """What happens to one file of the folder, by seed."""
    draw = random.Random(seed)
    name = draw.choice(sorted(path.name for path in folder.iterdir()))
    size = (folder / name).stat().st_size
    ways = {
        "bytes": flipped(name, size, seed),
        "cut": cut(name, seed),
        "gone": device(name, lambda path: None),
        "FIFO": device(name, os.mkfifo),
        "folder": device(name, os.mkdir),
        "more": lambda at: shutil.copy(at / name, at / "more"),
    }
    way = draw.choice(list(ways))
    return f"{name}: {way}", ways[way]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["checkpoints/final", "checkpoints/value_model", "checkpoints/adapter"])
def test_no_damage_of_a_models_folder_is_gone_on_from(finished: Path, tmp_path: Path, name: str) -> None:
    """And value model and adapter are no model, damaged or not."""
    assert verify(finished).status == "complete"
    for seed in range(100):
        run_dir = Path(shutil.copytree(finished, tmp_path / "run"))
        what, damage = drawn(run_dir / name, seed)
        before = content(run_dir / name)
        damage(run_dir / name)
        start = time.process_time()
        try:
            if content(run_dir / name) != before:
                with pytest.raises(UserError) as refused:
                    fork(run_dir, tmp_path / "forks", None, "ppo.iterations=2")
                assert len(one_line(refused.value)) < 1000
            if name != "checkpoints/final":
                with pytest.raises(UserError):
                    load_folder(run_dir / name)
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {what}") from error
        assert time.process_time() - start < SECONDS, what
        shutil.rmtree(run_dir)
