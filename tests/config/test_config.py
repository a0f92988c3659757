"""The configuration: what is read, and what is refused in one line by field, value and advice."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml
from pydantic import Field, ValidationError

from ppo_repro.base.errors import Mistakes, UserError
from ppo_repro.config.files import build_config, dump_yaml, found, load_config, read_tree
from ppo_repro.config.mistakes import mistakes as lines_of
from ppo_repro.config.section import Section
from ppo_repro.config.tree import apply_overrides, from_pyyaml
from ppo_repro.config.yaml_text import parse_yaml, write_yaml
from ppo_repro.grids.spec import load_grid
from tests.support.paths import ROOT, SMALL, SMALL_CONTROL, TINY_GRID
from tests.support.runs import small_config

FOLDER = {"kind": "folder", "path": "some/model"}
JSONL = {"kind": "jsonl", "path": "some.jsonl", "num_eval_prompts": 3}

GROUP = ("advantages={kind: group}", "value={kind: none}", "kl={placement: none}", "rollout.samples_per_prompt=2")
ONE_STEP = ("ppo.epochs=1", "ppo.minibatch_size=48")
ROUNDED, STOCK, SGLANG = "mismatch.sampler.precision.weights=int8", "mismatch.sampler.stock=float32", "{kind: sglang}"
FUNCTION = "{kind: function, path: 'engine.py:Engine'}"


def tree() -> dict[str, Any]:
    """`small.yaml`, parsed."""
    found: dict[str, Any] = parse_yaml(SMALL.read_text(encoding="utf-8"))
    return found


def mistakes(*overrides: str) -> list[str]:
    with pytest.raises(Mistakes) as caught:
        small_config(*overrides)
    assert "\n" not in str(caught.value)
    assert str(caught.value) == "; ".join(caught.value.lines)
    return [line.removeprefix(f"{SMALL}: ") for line in caught.value.lines]


def test_numbers_are_numbers_and_words_stay_words() -> None:
    assert parse_yaml("[1e-3, -2.5e+4, .5, 5., 7, +7, -7]") == [1e-3, -2.5e4, 0.5, 5.0, 7, 7, -7]
    assert [type(x) for x in parse_yaml("[1., 1, 5E6]")] == [float, int, float]
    for word in ("n", "none", "1_000", "0x10", "0o7", ".inf", "1:30"):
        assert parse_yaml(f"a: {word}") == {"a": word}


def test_truth_values_have_the_spellings_of_yaml_and_other_words_for_them_need_quotes() -> None:
    """A template takes every text for true, also `False` and `off`."""
    assert parse_yaml("[True, TRUE, true, False, FALSE, Null, NULL]") == [True] * 3 + [False] * 2 + [None] * 2
    for word in ("no", "Yes", "ON", "off", "None"):
        with pytest.raises(
            UserError, match=f'line 1: {word} may be a text or not; write true, false, null, or "{word}"'
        ):
            parse_yaml(f"a: {word}")
        assert parse_yaml(f'a: "{word}"') == parse_yaml(write_yaml({"a": word})) == {"a": word}


def test_dates_of_pyyaml_are_the_texts_that_a_file_has() -> None:
    for day in ("2026-11-28", "2026-11-28T12:00:00"):
        text = f"{{template_time: {day}, times: [{day}]}}"
        assert from_pyyaml(yaml.safe_load(text)) == parse_yaml(text) == {"template_time": day, "times": [day]}


def test_texts_of_pyyaml_for_a_function_or_a_template_stay_texts() -> None:
    written: dict[str, Any] = {name: {"x": "1e5"} for name in ("settings", "parameters", "template_arguments")}
    written |= {"task.template_arguments.x": "1e5"}
    assert from_pyyaml({"ppo.learning_rate": "1e5", **written}) == {"ppo.learning_rate": 1e5, **written}
    text = "{parameters: {day: 2026-11-28}}"
    assert from_pyyaml(yaml.safe_load(text)) == parse_yaml(text) == {"parameters": {"day": "2026-11-28"}}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("colour=red", "colour: unknown field; remove it or correct its name"),
        ("ppo.epoch=1", "ppo.epoch: unknown field; remove it or correct its name; did you mean ppo.epochs?"),
        ("ppo.clip_range=0.1", "; did you mean ppo.objective.clip_range?"),
        ("clip_range=0.1", "; did you mean value.clip_range or ppo.objective.clip_range?"),
        ("pppo={epochs: 2}", "pppo: unknown field; remove it or correct its name; did you mean ppo?"),
        ("advantages={kind: gea}", "advantages.kind = 'gea': must be one of gae, group, function; did you mean gae?"),
        ("ppo.objective={kind: 'a.py:loss'}", "; a function of your own is {kind: function, path: 'a.py:loss'}"),
        ("model.path=x", "model.path: belongs to another model.kind than tiny; remove it, or replace the section: "),
        (
            "value={kind: head, lora: null}",
            "value.lora: belongs to another value.kind than head; remove it, or replace",
        ),
        ("reward.terms=[{kind: length, target: 3, wieght: 1}]", "; did you mean reward.terms.weight?"),
        ("ppo.objective.clip_range=wide", "ppo.objective.clip_range = 'wide': must be a number"),
        ("ppo.epochs=true", "ppo.epochs = True: must be a whole number"),
        ("ppo.epochs=0", "ppo.epochs = 0: must be at least 1"),
        ("numerics.mode=fast", "numerics.mode = 'fast': must be one of deterministic, native"),
        ("experiment=../x", "experiment = '../x': must match the pattern"),
        ("reward.terms={kind: exact_match}", "reward.terms = {'kind': 'exact_match'}: must be a list"),
        ("task=arithmetic", "task = 'arithmetic': must be a mapping of fields"),
        ("layout.threads={a: 1}", "layout.threads = {'a': 1}: must be a whole number"),
        ("ppo.epochs", "--set ppo.epochs: must be FIELD=VALUE, for example --set ppo.learning_rate=1e-4"),
        ("seed.x=1", "--set seed.x=1: 'seed' is a value, not a group of fields"),
        ("seed=[", "--set seed=[: line 1: not valid YAML"),
    ],
)
def test_a_wrong_field_is_named_with_its_value_and_advice(override: str, message: str) -> None:
    (line,) = mistakes(override)
    assert message in line


@pytest.mark.parametrize(
    ("override", "works"),
    [
        ("kl.placement=none", "kl={placement: none}"),
        ("ppo.objective.kind=cispo", "ppo.objective={kind: cispo}"),
        ("value.kind=head", "value={kind: head, clip_range: 0.5}"),
        ("rollout.engine.kind=torch", "rollout.engine={kind: torch}"),
    ],
)
def test_another_kind_says_the_option_that_works(override: str, works: str) -> None:
    value = "value={kind: separate, learning_rate: 1e-3, epochs: 2, clip_range: 0.5}"
    objective, kl = "ppo.objective={kind: clip, clip_range: 0.3}", "kl={kl_coef: 0.1, charge: word}"
    fields = value, objective, kl, "rollout.engine={kind: sglang, servers: 2}"
    (line,) = mistakes(*fields, override)
    section, _, kind = override.partition("=")
    assert f"belongs to another {section} than {kind}" in line or f"belong to another {section} than {kind}" in line
    assert line.endswith(f"or replace the section: --set '{works}'")
    small_config(*fields, works)


def test_a_field_of_a_group_that_is_null_makes_the_group() -> None:
    written = dump_yaml(small_config("ppo.ratio_anchor=old"))
    assert "importance_weights: null" in written
    tree = parse_yaml(written)
    apply_overrides(tree, ["ppo.importance_weights.kind=truncated"])
    assert build_config(tree, "file") == small_config("ppo.ratio_anchor=old", "ppo.importance_weights.kind=truncated")


def test_overrides_of_an_engine_say_the_same_in_either_order() -> None:
    fields = "rollout.engine.servers=2", "rollout.engine.kind=sglang"
    assert small_config(*fields) == small_config(*fields[::-1])


def test_another_kind_says_what_it_needs() -> None:
    lines = mistakes("model.kind=folder")
    assert lines[0] == "model.path: missing; add it"
    assert lines[1].startswith("model.hidden_size, model.num_layers, ")
    assert len(lines) == 2
    assert lines[1].endswith("; remove them, or replace the section: --set 'model={kind: folder, path: PATH}'")


def test_a_field_with_two_types_says_both() -> None:
    assert mistakes("checkpoints.every=[1]") == ["checkpoints.every = [1]: must be a whole number or auto"]


@pytest.mark.parametrize("path", ["seed", "ppo.learning_rate", "model.vocab_size", "numerics"])
def test_a_missing_field_is_named(path: str) -> None:
    node = parent = tree()
    *groups, leaf = path.split(".")
    for group in groups:
        parent = parent[group]
    del parent[leaf]
    with pytest.raises(UserError, match=f"^file: {re.escape(path)}: missing; add it$"):
        build_config(node, "file")


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("{}", ["model.kind: missing; must be one of tiny, folder"]),
        ("{path: x}", ["model.kind: missing; must be one of tiny, folder; with these fields folder"]),
        (
            "{name: x}",
            [
                "model.kind: missing; must be one of tiny, folder",
                "model.name: unknown field; remove it or correct its name; did you mean model.path (a folder, with "
                "`kind: folder`)?",
            ],
        ),
    ],
)
def test_a_missing_kind_is_named_with_the_kinds_and_what_is_wrong_beside_it(model: str, said: list[str]) -> None:
    assert mistakes(f"model={model}") == said


def test_every_mistake_and_every_contradiction_has_a_line() -> None:
    lines = mistakes("ppo.epochs=0", "advantages.gamma=2", "seed=-1")
    assert [line.partition(" = ")[0] for line in lines] == ["seed", "advantages.gamma", "ppo.epochs"]
    lines = mistakes("ppo.minibatch_size=7", "rollout.max_response_tokens=24", "value={kind: none}")
    fields = ["ppo.minibatch_size", "rollout.max_response_tokens", "advantages.kind"]
    assert [line.partition(" ")[0] for line in lines] == fields
    lines = mistakes("ppo.warmup_iterations=3", "ppo.importance_weights={kind: truncated}")
    assert [line.split()[1] for line in lines] == ["warmup_iterations", "importance_weights"]


@pytest.mark.parametrize(
    ("path", "kind", "command"),
    [(SMALL_CONTROL, "control", "run"), (ROOT / "experiments" / "dpo.yaml", "dpo", "run"), (TINY_GRID, "grid", "grid")],
)
def test_a_file_for_another_command_is_named(path: Path, kind: str, command: str) -> None:
    with pytest.raises(UserError, match=f"is a {kind} file; give it to `ppo-repro {command}`"):
        load_config(path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["value={kind: none}"], "advantages.kind = gae needs a value model; take value.kind = separate or head"),
        (
            ["advantages={kind: group}", "kl={placement: none}"],
            "advantages.kind = group has no use for a value model; take value.kind = none",
        ),
        (["layout.device=gpu"], "layout.device = 'gpu': must be cpu, cuda or cuda:N"),
        (["ppo.importance_weights={kind: truncated}"], "ppo: importance_weights needs ratio_anchor = old"),
        (["ppo.importance_weights={kind: masked, cap: null}"], "ppo.importance_weights: kind = masked without cap"),
        (["ppo.rejection=[{kind: ratio, low: 2, high: 3}]"], "ppo.rejection.0.low = 2: must be below 1"),
        (["ppo.rejection=[{kind: veto}, {kind: veto}]"], "ppo: rejection holds an entry of kind veto twice; keep one"),
        (["ppo.rejected_tokens=left_out"], "ppo: rejected_tokens = left_out needs rejection, or importance_weights of"),
        (["ppo.warmup_iterations=3"], "ppo: warmup_iterations = 3 must be smaller than iterations = 3"),
        (
            ["kl={kl_coef: 0, controller: {kind: adaptive, target_kl: 1}}"],
            "kl: controller.kind = adaptive needs a kl_coef",
        ),
        (["mismatch.flip=bit", "lora={rank: 8, alpha: 16}"], "mismatch.flip = bit needs lora = null: the reference"),
        (["mismatch.sampler.lag=1", "ppo.iterations=1"], "mismatch.sampler.lag needs ppo.iterations of at least 2"),
        (["ppo.objective={kind: clip, dual_clip: 1.1}"], "ppo.objective: dual_clip = 1.1 must be greater than 1 + the"),
        ([*ONE_STEP, "ppo.early_stop_kl=0.1"], "ppo.early_stop_kl needs more than one step per iteration"),
        (
            [*ONE_STEP, "ppo.objective={kind: adaptive_clip, target_kl: 0.1}"],
            "ppo.objective.target_kl needs more than one step per iteration",
        ),
        (["model.hidden_size=34"], "model: hidden_size must be an even multiple of num_attention_heads"),
        (["numerics.precision=high", "numerics.mode=native"], "numerics: precision = high needs mode = deterministic"),
        ([ROUNDED, "numerics.mode=native"], "mismatch.sampler.precision needs numerics.mode = deterministic, whose"),
        (
            [STOCK, f"rollout.engine={SGLANG}"],
            "mismatch.sampler.stock needs rollout.engine.kind = torch: SGLang has rollout.engine.numerics = stock",
        ),
        (
            [STOCK, f"rollout.engine={FUNCTION}"],
            "mismatch.sampler.stock needs rollout.engine.kind = torch: your class has its own numerics",
        ),
        ([STOCK, ROUNDED], "mismatch.sampler: stock rounds as torch does, so precision has no effect; "),
        (
            [*GROUP, "reward.terms=[{kind: steps, placement: step_ends}]"],
            "reward.terms of kind steps: placement = step_ends acts on per-token rewards, which advantages",
        ),
        (["mismatch.sampler.precision.rest=bfloat16"], "mismatch.sampler.precision: rest is for what weights or"),
    ],
)
def test_contradictions_are_explained(overrides: list[str], message: str) -> None:
    assert mistakes(*overrides)[0].startswith(message)


def test_a_mistake_that_no_words_are_written_for_has_the_words_of_pydantic() -> None:
    class Short(Section):
        numbers: Annotated[tuple[int, ...], Field(max_length=1, strict=False)]

    written = {"numbers": [1, 2]}
    with pytest.raises(ValidationError) as caught:
        Short.model_validate(written)
    (line,) = lines_of(Short, written, caught.value)
    assert line.startswith("numbers = [1, 2]: Tuple should have at most 1 item")


def test_every_function_of_the_user_is_found_by_its_field() -> None:
    own = "{kind: function, path: own.py:f}"
    fields = ["reward.placement", "kl.estimator", "advantages", "ppo.objective"]
    config = small_config(*(f"{field}={own}" for field in fields))
    assert [(field, type(function).__name__) for field, function in config.functions.items()] == [
        ("reward.placement", "FunctionPlacement"),
        ("kl.estimator", "FunctionEstimator"),
        ("advantages", "FunctionAdvantages"),
        ("ppo.objective", "FunctionObjective"),
    ]
    assert small_config().functions == {}


def test_only_a_model_folder_has_a_chat_template() -> None:
    templated = {**JSONL, "chat_template": True}
    with pytest.raises(UserError, match=r"task\.chat_template needs model\.kind = folder"):
        build_config({**tree(), "task": templated}, "file")
    build_config({**tree(), "model": FOLDER, "task": templated}, "file")


def test_overrides_apply_in_order_and_reach_sections_that_the_file_leaves_out() -> None:
    assert "layout" in tree()
    assert "padding" not in tree()["layout"]
    config = small_config("seed=1", "layout.padding=left", "seed=2")
    assert (config.seed, config.layout.padding) == (2, "left")
    assert config == build_config({**tree(), "seed": 2, "layout": {"rollout_slots": 48, "padding": "left"}}, "file")


def test_a_name_is_a_file_of_the_package_unless_there_is_one_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert found(Path("quickstart")) == ROOT / "experiments" / "quickstart.yaml"
    assert found(Path("sub/quickstart")) == Path("sub/quickstart")
    (tmp_path / "quickstart").write_text("experiment: mine")
    assert found(Path("quickstart")) == Path("quickstart")


def test_relative_paths_in_a_file_of_the_package_start_at_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "quickstart.yaml").write_text("task: {kind: jsonl, path: prompts.jsonl}")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr("ppo_repro.config.files.installed", lambda name: tmp_path / name)
    assert read_tree(Path("quickstart"))["task"]["path"] == str(tmp_path / "prompts.jsonl")


def test_relative_paths_follow_the_file_and_paths_of_overrides_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, elsewhere = tmp_path / "mine", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    terms = [{"kind": "function", "path": "reward.py:score"}]
    (folder / "c.yaml").write_text(write_yaml({**tree(), "task": {**JSONL, "path": "p"}, "reward": {"terms": terms}}))
    (folder / "g.yaml").write_text(
        "question: q\nexpectation: e\nbase: c.yaml\nseeds: [1]\naxes: {task.path: [a.jsonl, b.jsonl]}\nread_with: r\n"
    )
    monkeypatch.chdir(elsewhere)
    config = load_config(Path("../mine/c.yaml"))
    assert (config.task.path, config.reward.terms[0].path) == (str(folder / "p"), str(folder / "reward.py:score"))
    assert load_config(Path("../mine/c.yaml"), ["task.path=p"]).task.path == str(elsewhere / "p")
    paths = [cell.config.task.path for cell in load_grid(Path("../mine/g.yaml")).cells]
    assert paths == [str(folder / "a.jsonl"), str(folder / "b.jsonl")]


@pytest.mark.parametrize(
    ("reward", "possible"),
    [
        ("{}", (0.0, 1.0)),
        ("{missing_eos_penalty: 0.5}", (-0.5, 1.0)),
        ("{terms: [{kind: exact_match, weight: 2}, {kind: length, target: 3}]}", (-math.inf, 2.0)),
        ("{terms: [{kind: exact_match}, {kind: format, weight: -1}]}", (-2.0, 1.0)),
    ],
)
def test_the_possible_range_of_scores(reward: str, possible: tuple[float, float]) -> None:
    assert small_config(f"reward={reward}").reward.score_range == possible
