"""Fields of TRL, verl and OpenRLHF: each is answered with the field here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ppo_repro.base.errors import UserError
from ppo_repro.config.coming_from import NO_FIELD, ROWS
from ppo_repro.config.control import ControlConfig
from ppo_repro.config.dpo import DPOConfig
from ppo_repro.config.fields import field_paths
from ppo_repro.config.files import read_tree, validated
from ppo_repro.config.run import RunConfig
from ppo_repro.config.tree import set_field
from tests.support.paths import ROOT, SMALL, SMALL_CONTROL

Model = type[RunConfig | DPOConfig | ControlConfig]
DPO = ROOT / "experiments" / "dpo.yaml"
FILES: dict[Model, Path] = {RunConfig: SMALL, DPOConfig: DPO, ControlConfig: SMALL_CONTROL}
KNOWN = {model: [f"{path}." for path in field_paths(model)] for model in FILES}


def answer(path: str, model: Model = RunConfig) -> str:
    """What is said of a field that is written into a file."""
    tree = read_tree(FILES[model])
    set_field(tree, path, 1)
    with pytest.raises(UserError) as caught:
        validated(model, tree, "file")
    return str(caught.value)


def others() -> Iterator[tuple[Model, str, str]]:
    """Every name of another framework, with the field here, and a kind of file that has the field."""
    for row in ROWS:
        model = next(model for model in FILES if has(model, row.ours))
        yield from ((model, name, row.ours) for name in row.names if f"{name}." not in KNOWN[model])


def has(model: Model, ours: str) -> bool:
    return any(path.startswith(f"{ours}.") for path in KNOWN[model])


def test_every_name_of_another_framework_is_answered_with_the_field_here() -> None:
    unanswered = [name for model, name, ours in others() if ours not in answer(name, model)]
    assert unanswered == []


def test_every_field_of_the_table_is_a_field_or_a_section_here() -> None:
    assert [row.ours for row in ROWS if not any(has(model, row.ours) for model in FILES)] == []


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("ppo.lr", "ppo.learning_rate"),
        ("value.lr", "value.learning_rate"),
        ("kl.beta", "kl.kl_coef"),
        ("rollout.n", "rollout.samples_per_prompt"),
        ("model.name", "model.path (a folder, with `kind: folder`)"),
        ("rollout.max_tokens", "rollout.max_response_tokens"),
        ("ppo.clip", "ppo.objective.clip_range"),
        ("rollout.batch_size", "rollout.prompts_per_iteration (counts prompts, not responses)"),
        ("ppo.batch_size", "ppo.minibatch_size (counts responses, not prompts)"),
        ("actor_rollout_ref.actor.optim.lr", "ppo.learning_rate"),
        ("critic.optim.lr", "value.learning_rate"),
        ("algorithm.gamma", "advantages.gamma"),
        ("max-new-tokens", "rollout.max_response_tokens"),
    ],
)
def test_the_section_in_which_a_name_is_written_chooses_one_field(written: str, meant: str) -> None:
    assert answer(written).endswith(f"{written}: unknown field; remove it or correct its name; did you mean {meant}?")


def test_a_section_of_verl_has_a_line_for_each_field_that_has_one_here() -> None:
    tree = read_tree(SMALL)
    tree["algorithm"] = {"adv_estimator": "grpo", "lam": 0.95, "kl_ctrl": {"kl_coef": 0.1}, "pf_ppo": {"weight_pow": 2}}
    with pytest.raises(UserError) as caught:
        validated(RunConfig, tree, "file")
    lines = str(caught.value).split("; file: ")
    meant = [line.partition("did you mean ")[2] for line in lines]
    assert meant == ["advantages.kind (GRPO is `group`)?", "advantages.gae_lambda?", "kl.kl_coef?"]


@pytest.mark.parametrize("name", NO_FIELD)
def test_a_field_that_is_left_out_by_intention_has_a_reason(name: str) -> None:
    assert answer(f"model.{name}") == f"file: model.{name}: no such field: {NO_FIELD[name]}"
