"""Everything in a model folder is an input: a damaged folder is refused soon and in one line, or computes."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
import torch

import ppo_repro
from ppo_repro.base.errors import UserError
from ppo_repro.models.folders import load_reward_model, write_model
from ppo_repro.models.load import load_folder, stop_ids
from ppo_repro.models.reward_model import reward_scores
from ppo_repro.numerics.families import CLASSIFIER_OF
from ppo_repro.runs.plan import plan_run
from ppo_repro.tasks.templates import rendered
from ppo_repro.tasks.tokenizer import character_tokenizer
from tests.support.damage import SECONDS, changed, computes, drawn
from tests.support.models import CLASSES, CONFIGS, MIXTURES, fill, small_model, unequal
from tests.support.runs import small_config

FAMILIES = {**CONFIGS, **MIXTURES}
TURNS = [{"role": "user", "content": "ab"}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder of each family, and a reward model `reward FAMILY` of each family that has classifiers."""
    root = tmp_path_factory.mktemp("folders")
    for family, make in FAMILIES.items():
        config = make()
        models = {family: small_model(config, 0)}
        if kind := CLASSIFIER_OF.get(CLASSES[type(config)]):
            config.num_labels = 1
            models[f"reward {family}"] = kind(config).eval()
            fill(models[f"reward {family}"], 1)
        for name, model in models.items():
            model.save_pretrained(root / name)
            character_tokenizer("0123456789+=").save_pretrained(root / name)
    return root


def test_a_plan_refuses_a_million_layers_at_once(folders: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders / "llama", tmp_path / "model"))
    changed("config.json", ("num_hidden_layers",), 10**6)(folder)
    start = time.process_time()
    with pytest.raises(UserError, match="num_hidden_layers = 1000000: must be"):
        plan_run(small_config(f"model={{kind: folder, path: {folder}}}"))
    assert time.process_time() - start < SECONDS


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATES = {
    "{% for i in range(10**9) %}{% endfor %}": "Range too big",
    "{{ 'x' * 10**10 }}": "needs more than 1 GiB",
    "{% if %}": "TemplateSyntaxError",
}


def refused_template(template: object, message: str) -> None:
    tokenizer = character_tokenizer("abc")
    tokenizer.chat_template = template  # type: ignore[assignment]
    with pytest.raises(UserError, match=f"^task.chat_template: the tokenizer's template.*{message}"):
        rendered(tokenizer, [TURNS])


def test_a_chat_template_that_fails_is_refused_and_the_next_one_is_rendered() -> None:
    for template, message in TEMPLATES.items():
        refused_template(template, message)
    tokenizer = character_tokenizer("abc")
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    stock = tokenizer.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True)
    assert rendered(tokenizer, [TURNS]) == [stock]


@pytest.mark.slow
@pytest.mark.parametrize("template", [LOOP, "{{ 9 ** (9 ** 9) }}"])
def test_a_chat_template_without_an_end_is_refused(template: str) -> None:
    refused_template(template, "gave no answer within 10 s")


@pytest.mark.slow
def test_no_damage_of_a_folder_is_a_fault(folders: Path) -> None:
    """A damaged folder is refused by UserError; or its model gives equal bits in every batch, and can be saved."""
    families, computed = sorted(folders.iterdir()), 0
    for seed in range(300):
        folder = families[seed % len(families)]
        what, damage = drawn(folder, seed)
        computed += computes(
            f"seed {seed}: {what}", damage, folder, use_reward_model if folder.name.startswith("reward") else use
        )
    assert 30 < computed < 200


def use(folder: Path) -> None:
    source, tokenizer = load_folder(folder)
    stop_ids(source, tokenizer)
    model, ids = ppo_repro.deterministic(source, max_context=16), torch.tensor([[1, 2, 3, 4], [4, 3, 2, 1]])
    alone = torch.cat([ppo_repro.logprobs(model, row[None]) for row in ids])
    assert unequal(ppo_repro.logprobs(model, ids), alone) == 0
    write_model(source, folder)
    tokenizer.save_pretrained(folder)


def use_reward_model(folder: Path) -> None:
    model, _ = load_reward_model(folder, "deterministic", 16)
    together, alone = (reward_scores(model, [[1, 2, 3], [3, 4]], "right", size) for size in (0, 1))
    assert unequal(together, alone) == 0
