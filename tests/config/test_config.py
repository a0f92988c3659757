"""The configuration: what is read, what is refused and how it is said, and what its digest sees."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ppo_repro.config.files import build_config, load_config
from ppo_repro.config.yaml_text import parse_yaml
from ppo_repro.errors import Mistakes, UserError
from tests.config.trees import FOLDER, JSONL, tree
from tests.support.paths import ROOT, SMALL, SMALL_CONTROL, TINY_GRID
from tests.support.runs import small_config


def refusal(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        small_config(*overrides)
    message = str(caught.value)
    assert "\n" not in message, "an error is one line"
    return message.removeprefix(f"{SMALL}: ")


def test_numbers_without_a_dot_are_numbers() -> None:
    assert small_config("ppo.learning_rate=1e-3").ppo.learning_rate == 1e-3
    assert parse_yaml("a: 1e-3") == {"a": 1e-3} and type(parse_yaml("5E6")) is float
    assert parse_yaml("[1e-3, -2.5e+4, .5, 5., 7, +7, -7]") == [1e-3, -2.5e4, 0.5, 5.0, 7, 7, -7]
    assert [type(x) for x in parse_yaml("[1., 1]")] == [float, int]


@pytest.mark.parametrize(
    "word", ["no", "yes", "on", "off", "True", "FALSE", "n", "1_000", "0x10", "0o7", ".inf", "1:30"]
)
def test_words_that_look_like_other_things_stay_words(word: str) -> None:
    assert parse_yaml(f"a: {word}") == {"a": word}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("ppo.clip=0.1", "ppo.clip: unknown field; remove it or correct its name"),
        ("colour=red", "colour: unknown field; remove it or correct its name"),
        ("task.chat_template=true", "task.chat_template: unknown field; remove it or correct its name"),
        ("model.path=x", "model.path: unknown field; remove it or correct its name"),
        ("ppo.objective.clip_range=wide", "ppo.objective.clip_range = 'wide': input should be a valid number"),
        ("ppo.epochs=1.5", "ppo.epochs = 1.5: input should be a valid integer"),
        ("ppo.epochs=true", "ppo.epochs = True: input should be a valid integer"),
        ("ppo.epochs=", "ppo.epochs = None: input should be a valid integer"),
        ("ppo.epochs=0", "ppo.epochs = 0: input should be greater than or equal to 1"),
        ("ppo.objective.clip_range=1", "ppo.objective.clip_range = 1"),
        ("rollout.top_p=0", "rollout.top_p = 0: input should be greater than 0"),
        ("seed=-1", "seed = -1: input should be greater than or equal to 0"),
        ("seed=9223372036854775808", "seed = 9223372036854775808: input should be less than"),
        ("model.hidden_size=0", "model.hidden_size = 0: input should be greater than or equal to 1"),
        ("numerics.mode=fast", "numerics.mode = 'fast': input should be 'deterministic' or 'native'"),
        ("model.kind=huge", "model.kind = 'huge': must be one of 'tiny', 'folder'"),
        ("experiment=../x", "experiment = '../x': string should match pattern"),
        ("ppo=3", "ppo = 3: "),
    ],
)
def test_a_wrong_field_is_named_with_its_value_and_what_is_allowed(override: str, message: str) -> None:
    assert refusal(override).startswith(message)


@pytest.mark.parametrize("path", ["seed", "ppo.learning_rate", "model.vocab_size", "numerics", "model.kind"])
def test_a_missing_field_is_named(path: str) -> None:
    node = parent = tree()
    *groups, leaf = path.split(".")
    for group in groups:
        parent = parent[group]
    del parent[leaf]
    with pytest.raises(UserError, match=f"^file: {re.escape(path)}: missing; add it$"):
        build_config(node, "file")


def all_mistakes(*overrides: str) -> list[str]:
    with pytest.raises(Mistakes) as caught:
        small_config(*overrides)
    assert str(caught.value) == "; ".join(caught.value.lines)
    return [line.removeprefix(f"{SMALL}: ") for line in caught.value.lines]


def test_every_mistake_has_a_line() -> None:
    found = all_mistakes("ppo.epochs=0", "advantages.gamma=2", "seed=-1")
    assert [line.partition(" = ")[0] for line in found] == ["seed", "advantages.gamma", "ppo.epochs"]
    assert all("input should be" in line for line in found)


def test_every_contradiction_has_a_line() -> None:
    found = all_mistakes("ppo.minibatch_size=7", "rollout.max_response_tokens=24", "value={kind: none}")
    assert [line.partition(" ")[0] for line in found] == [
        "ppo.minibatch_size",
        "rollout.max_response_tokens",
        "advantages.kind",
    ]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("ppo.epoch=1", "; did you mean ppo.epochs?"),
        ("ppo.clip_range=0.1", "; did you mean value.clip_range or ppo.objective.clip_range?"),
        ("sed=1", "; did you mean seed?"),
        ("layout.microbatch=1", "did you mean layout."),
        ("advantages={kind: gea}", "must be one of 'gae', 'group'; did you mean gae?"),
        ("ppo.schedule=cosin", "; did you mean cosine?"),
        ("model.path=x", "; it belongs to kind folder, and this is tiny"),
        ("value={kind: head, lora: null}", "; it belongs to kind separate, and this is head"),
        ("reward.terms=[{kind: exact_match, target: 3}]", "; it belongs to kind length, and this is exact_match"),
        ("reward.terms=[{kind: length, target: 3, wieght: 1}]", "; did you mean reward.terms.0.weight?"),
    ],
)
def test_what_was_meant(override: str, said: str) -> None:
    assert said in " ".join(all_mistakes(override))


@pytest.mark.parametrize(
    ("path", "command"),
    [(SMALL_CONTROL, "control"), (ROOT / "experiments" / "dpo.yaml", "dpo"), (TINY_GRID, "grid")],
)
def test_a_file_for_another_command_is_named(path: Path, command: str) -> None:
    with pytest.raises(UserError, match=f"is a file for `ppo-repro {command}`; give it to that command"):
        load_config(path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["ppo.minibatch_size=7"], "ppo.minibatch_size = 7 must divide the 48 sequences of an iteration"),
        (["rollout.max_response_tokens=24"], "rollout.max_response_tokens = 24 must be smaller than numerics.max_con"),
        (
            ["layout.device=cuda"],
            "layout.device = cuda needs numerics.mode = native, and it is deterministic; take cpu",
        ),
        (
            ["numerics.mode=native", "numerics.accuracy_sequences=3"],
            "numerics.accuracy_sequences needs numerics.mode = deterministic",
        ),
        (
            ["ppo.importance_weights={kind: truncated}"],
            "ppo.importance_weights needs ppo.ratio_anchor = old: with rollout the ratio corrects already",
        ),
        (
            ["ppo.ratio_anchor=old", "ppo.importance_weights={kind: truncated, floor: 2}"],
            "ppo.importance_weights: floor = 2.0 must be smaller than 1",
        ),
        (
            ["ppo.ratio_anchor=old", "ppo.importance_weights={kind: masked, cap: null}"],
            "ppo.importance_weights: kind = masked without cap and floor masks nothing",
        ),
        (
            ["ppo.importance_weights={kind: truncated, cap: 1}"],
            "ppo.importance_weights.cap = 1: input should be greater",
        ),
        (["ppo.rejection=[{kind: ratio, low: 2, high: 3}]"], "ppo.rejection.0: low = 2.0 must be smaller than 1"),
        (["ppo.rejection=[{kind: veto}, {kind: veto}]"], "ppo: rejection holds an entry of kind veto twice; keep one"),
        (["ppo.rejected_tokens=left_out"], "ppo: rejected_tokens = left_out needs rejection, or importance_weights of"),
        (
            ["ppo.objective={kind: clip_cov, covariance_low: 5, covariance_high: 1}"],
            "ppo.objective: covariance_low = 5.0 must be smaller than covariance_high = 1.0",
        ),
        (["ppo.objective={kind: cispo, floor: 1}"], "ppo.objective: floor = 1.0 must be smaller than 1"),
        (
            ["ppo.epochs=1", "ppo.minibatch_size=48", "ppo.early_stop_kl=1e-9"],
            "ppo.early_stop_kl needs more than one optimizer step per iteration to see a KL",
        ),
        (
            ["kl={placement: reward, kl_coef: 0.0, controller: {kind: adaptive, target_kl: 1}}"],
            "kl.controller.kind = adaptive needs a kl.kl_coef above 0: it multiplies it",
        ),
        (["rollout.temperature=1e300"], "rollout.temperature = 1e+300: input should be less than or equal to 1000000"),
        (
            ["rollout.temperature=1e-300"],
            "rollout.temperature = 1e-300: input should be greater than or equal to 0.000001",
        ),
        (["ppo.learning_rate=1e300"], "ppo.learning_rate = 1e+300: input should be less than or equal to 1"),
        (["ppo.objective={kind: gspo}"], "ppo.objective.kind = 'gspo': must be one of 'clip', 'adaptive_clip', 'seq"),
        (["model.hidden_size=34"], "model: hidden_size must be an even multiple of num_attention_heads"),
        (["model.num_key_value_heads=3"], "model: num_attention_heads must be a multiple of num_key_value_heads"),
    ],
)
def test_contradictions_are_explained(overrides: list[str], message: str) -> None:
    assert refusal(*overrides).startswith(message)


def test_the_tiny_model_has_no_chat_template() -> None:
    templated = {**JSONL, "chat_template": True}
    with pytest.raises(UserError, match=r"task\.chat_template needs model\.kind = folder"):
        build_config({**tree(), "task": templated}, "file")
    build_config({**tree(), "model": FOLDER, "task": templated}, "file")


@pytest.mark.parametrize("override", ["ppo.epochs", "=3", "", "ppo"])
def test_an_override_without_field_or_value_is_refused(override: str) -> None:
    assert refusal(override) == f"--set {override}: must be FIELD=VALUE, for example --set ppo.learning_rate=1e-4"


def test_a_bad_override_is_quoted() -> None:
    assert refusal("seed.x=1") == "--set seed.x=1: 'seed' is a value, not a group of fields"
    assert refusal("seed=[").startswith("--set seed=[: ")
    assert refusal("ppo={a: 1, a: 2}").startswith("--set ppo={a: 1, a: 2}: ")


def test_overrides_apply_in_order_and_reach_sections_that_the_file_leaves_out() -> None:
    assert "layout" in tree() and "padding" not in tree()["layout"]
    config = small_config("seed=1", "layout.padding=left", "seed=2")
    assert (config.seed, config.layout.padding) == (2, "left")
    assert config == build_config({**tree(), "seed": 2, "layout": {"rollout_slots": 48, "padding": "left"}}, "file")
