"""Fields of TRL, verl and OpenRLHF: each is answered with the field here, and the page has the table of the code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ppo_repro.base.errors import UserError
from ppo_repro.config.coming_from import NO_FIELD, ROWS, table
from ppo_repro.config.dpo import DPOConfig
from ppo_repro.config.fields import field_paths
from ppo_repro.config.files import read_tree, set_field, validated
from ppo_repro.config.run import RunConfig
from tests.support.paths import ROOT, SMALL

PAGE = ROOT / "ppo_repro" / "config" / "README.md"
DPO = ROOT / "experiments" / "dpo.yaml"
KNOWN = {RunConfig: set(field_paths(RunConfig)), DPOConfig: set(field_paths(DPOConfig))}


def answer(path: str, model: type[RunConfig | DPOConfig] = RunConfig) -> str:
    """What is said of a field that is written into a file."""
    tree = read_tree(SMALL if model is RunConfig else DPO)
    set_field(tree, path, 1)
    with pytest.raises(UserError) as caught:
        validated(model, tree, "file")
    return str(caught.value)


def others() -> Iterator[tuple[type[RunConfig | DPOConfig], str, str]]:
    """Every name of another framework, with the field here."""
    for row in ROWS:
        model = DPOConfig if row.ours.startswith("dpo.") else RunConfig
        yield from ((model, name, row.ours) for name in row.names if name not in KNOWN[model])


def test_every_name_of_another_framework_is_answered_with_the_field_here() -> None:
    unanswered = [name for model, name, ours in others() if ours not in answer(name, model)]
    assert unanswered == []


def test_every_field_of_the_table_is_a_field_or_a_section_here() -> None:
    paths = [f"{path}." for known in KNOWN.values() for path in known]
    assert [row.ours for row in ROWS if not any(path.startswith(f"{row.ours}.") for path in paths)] == []


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("ppo.lr", "ppo.learning_rate"),
        ("value.lr", "value.learning_rate"),
        ("kl.beta", "kl.kl_coef"),
        ("rollout.n", "rollout.samples_per_prompt"),
        ("model.name", "model.path"),
        ("rollout.max_tokens", "rollout.max_response_tokens"),
        ("ppo.clip", "ppo.objective.clip_range"),
        ("rollout.batch_size", "rollout.prompts_per_iteration"),
        ("ppo.batch_size", "ppo.minibatch_size"),
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
    assert [line.rpartition(" ")[2] for line in lines] == ["advantages.kind?", "advantages.gae_lambda?", "kl.kl_coef?"]


@pytest.mark.parametrize("name", NO_FIELD)
def test_a_field_that_is_left_out_by_intention_has_a_reason(name: str) -> None:
    assert answer(f"model.{name}") == f"file: model.{name}: no such field: {NO_FIELD[name]}"


def test_the_page_has_the_table_of_the_code() -> None:
    assert "\n".join(table()) in PAGE.read_text(encoding="utf-8"), "put this there:\n" + "\n".join(table())
