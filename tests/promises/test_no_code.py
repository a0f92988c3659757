"""Reading a run, a checkpoint or a model folder runs no code from its files: a poisoned file is refused."""

from __future__ import annotations

import io
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ppo_repro.base.errors import UserError
from ppo_repro.base.files import MANIFEST, SUMS_NAME, file_digest
from ppo_repro.config.files import load_config
from ppo_repro.models.load import load_folder
from ppo_repro.records import manifest, reader
from ppo_repro.runs import checkpoint


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def poisons(mark: Path) -> list[bytes]:
    """A pickle, and a file of `torch.save`."""
    saved = io.BytesIO()
    torch.save({"model.norm.weight": Bomb(mark)}, saved)
    return [pickle.dumps(Bomb(mark)), saved.getvalue()]


def test_a_poisoned_file_is_refused_and_runs_nothing(deterministic_run: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    pickle.loads(poisons(mark)[0])
    assert mark.exists(), "the negative control: the poison works"
    mark.unlink()

    run_dir = Path(shutil.copytree(deterministic_run, tmp_path / "run"))
    model, table = run_dir / "checkpoints" / "final", run_dir / "records" / "tokens" / "iteration=000000.parquet"
    recorded = manifest.load(run_dir)
    (model / SUMS_NAME).unlink()  # an attacker's digests would be right
    reader.read_moment(run_dir, recorded, 0, verify=False)
    load_folder(model)
    for poison in poisons(mark):
        for path in (table, model / "model.safetensors", tmp_path / "iteration-000001.safetensors"):
            path.write_bytes(poison)
        with pytest.raises(UserError, match=r"tokens/iteration=000000\.parquet: cannot be read"):
            reader.read_moment(run_dir, recorded, 0, verify=False)
        with pytest.raises(UserError, match=r"model\.safetensors cannot be read"):
            load_folder(model)
        with pytest.raises(UserError, match=r"iteration-000001\.safetensors: cannot be read"):
            checkpoint.load(path, file_digest(path))
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pickled weights only .* convert them"):
        load_folder(model)

    settings = json.loads((model / "config.json").read_text())
    (model / "code.py").write_text(f"open({str(mark)!r}, 'w')\nclass Model: ...\n")
    (model / "config.json").write_text(json.dumps({**settings, "auto_map": {"AutoConfig": "code.Model"}}))
    with pytest.raises(UserError, match="has auto_map; code of a model folder is never run"):
        load_folder(model)
    (run_dir / "config.yaml").write_text(f"seed: !!python/object/apply:pathlib.Path.touch [{mark}]\n")
    with pytest.raises(UserError, match=r"config\.yaml"):
        load_config(run_dir / "config.yaml")
    (run_dir / MANIFEST).write_bytes(poisons(mark)[0])
    with pytest.raises(UserError, match="is not valid JSON"):
        manifest.load(run_dir)
    assert not mark.exists()
