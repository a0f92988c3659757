"""Prompts and verifiers of reasoning-gym, and its messages for what is wrong."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from ppo_repro.base.errors import UserError
from ppo_repro.config.tasks import ReasoningGymTask
from ppo_repro.records import manifest
from ppo_repro.tasks.problems import load_source
from ppo_repro.user.process import UserProcess
from tests.support.language import rerun, tiny_run

SETTINGS = {"min_terms": 2, "max_terms": 2, "max_digits": 1}


def gym(**changes: Any) -> ReasoningGymTask:
    usual = {"kind": "reasoning_gym", "dataset": "chain_sum", "settings": SETTINGS, "size": 40, "num_eval_prompts": 5}
    return ReasoningGymTask(**{**usual, **changes})


def test_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reasoning_gym").mkdir()
    (tmp_path / "reasoning_gym" / "__init__.py").write_text("raise ImportError(name='reasoning_gym')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=r"^task\.kind = reasoning_gym: needs reasoning-gym.*'ppo-repro\[tasks\]'$"):
        load_source(gym(), 0)


@pytest.fixture(scope="module")
def process() -> UserProcess:
    """One process for all tests: it takes seconds to import the package."""
    return UserProcess()


def test_the_entries_are_those_of_the_package(process: UserProcess) -> None:
    source = load_source(gym(settings={**SETTINGS, "seed": 3}), 0, process)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        import reasoning_gym
    problems, verifier = [*source.problems.by_key.values()], source.verifier
    assert verifier is not None
    entries = list(reasoning_gym.create_dataset("chain_sum", seed=3, size=40, **SETTINGS))
    first = {entry["question"]: entry["answer"] for entry in reversed(entries)}
    assert {p.prompt: p.answer for p in problems} == first
    assert len(problems) == len({p.key for p in problems}) < 40, "a question that repeats counts once"
    right = [{"key": p.key, "answer": p.answer} for p in problems]
    assert verifier(right) == [1.0] * len(problems)
    assert max(verifier([{**row, "answer": row["answer"] + "1"} for row in right])) < 1.0
    assert verifier([{**row, "answer": None} for row in right]) == [0.0] * len(problems)
    others = load_source(gym(settings={**SETTINGS, "seed": 4}), 0, process).problems
    assert {p.prompt for p in others.by_key.values()} != {p.prompt for p in problems}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"dataset": "chain_sun"},
            r"^task\.dataset = 'chain_sun': reasoning-gym refuses it.*ValueError: .* not regist",
        ),
        ({"settings": {"terms": 2}}, r"^task\.dataset = 'chain_sum': .*TypeError: .* keyword argument 'terms'"),
        ({"settings": {"min_terms": 0}}, r"^task\.dataset = .* min_terms must be positive"),
    ],
)
def test_an_unknown_name_or_setting_is_one_line(process: UserProcess, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_source(gym(**changes), 0, process)


def test_a_run_records_the_version_and_runs_again(tmp_path: Path) -> None:
    task = "{kind: reasoning_gym, dataset: chain_sum, size: 30, num_eval_prompts: 5, answer_extraction: last_number, "
    task += "settings: {min_terms: 2, max_terms: 2, max_digits: 1}}"
    fields = [f"task={task}", "model.vocab_size=60", "model.warm_start_steps=5", "numerics.max_context=80"]
    run_dir = tiny_run(tmp_path, *fields)
    assert re.search(r'"reasoning-gym": "0\.1\.\d+"', (run_dir / "environment.json").read_text())
    found = rerun(run_dir, ["layout.padding=left"])
    assert found.difference is None
    assert found.fingerprint == manifest.load(run_dir).fingerprint
