"""The model of another stack is an input: a damaged folder is refused soon and in one line, or computes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from ppo_repro.base.errors import UserError
from ppo_repro.models.folder_files import check_config
from ppo_repro.tasks.tokenizer import character_tokenizer
from ppo_repro.testing.audit.load import load_model, load_tokenizer
from tests.support.damage import changed, computes, drawn
from tests.support.models import CONFIGS, MIXTURES, small_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("folders")
    for family, make in {**CONFIGS, **MIXTURES}.items():
        small_model(make(), 0).save_pretrained(root / family)
        character_tokenizer("0123456789+=").save_pretrained(root / family)
    return root


def use(folder: Path) -> None:
    check_config(folder, "--model")
    model = load_model("--model", folder, "cpu")
    load_tokenizer(folder)
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()


def test_a_model_of_many_more_weights_than_its_files_is_refused_before_memory_is_taken(
    folders: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(folders / "gpt2", tmp_path / "model"))
    changed("config.json", ("n_positions",), 10**8)(folder)
    with pytest.raises(UserError, match=r"wants [0-9]+ weights, and its files have"):
        use(folder)


@pytest.mark.slow
def test_no_damage_of_a_folder_is_a_fault(folders: Path) -> None:
    families, computed = sorted(folders.iterdir()), 0
    for seed in range(1000, 1100):
        folder = families[seed % len(families)]
        computed += computes(f"seed {seed}", drawn(folder, seed)[1], folder, use)
    assert 10 < computed < 90
