"""Runs in Python: opened, read, compared, and trained with a reward and a callback of a notebook."""

from __future__ import annotations

import math
import re
import runpy
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

import ppo_repro
from ppo_repro.api.training import reward_path
from ppo_repro.base.errors import UserError
from ppo_repro.base.ranks import ALONE
from ppo_repro.base.watcher import Silent
from ppo_repro.config.algorithm import SeparateValue
from ppo_repro.config.run import RunConfig
from ppo_repro.runs.language import LanguageKind
from ppo_repro.runs.rerun import rerun
from tests.support.paths import TINY
from tests.support.runs import small_config

TREE = small_config("ppo.iterations=2", "model.warm_start_steps=20", "ppo.epochs=1").model_dump(mode="json")
BONUS = 0.5


def of_a_notebook(source: str, name: str, **around: object) -> Any:
    """A function as a notebook makes it: in `__main__`, its source known to `linecache` alone."""
    import linecache

    file = f"<cell {name} {len(source)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    namespace: dict[str, object] = {"__name__": "__main__", **around}
    exec(compile(source, file, "exec"), namespace)
    return namespace[name]


CELL = '''
def graded(prompt, response, answer):
    """Right answers, and a little for each digit."""
    return float(response.strip() == answer) + BONUS * math.sqrt(sum(c.isdigit() for c in response))
'''


def test_a_run_opened_in_python_is_what_the_records_say(deterministic_run: Path) -> None:
    run = ppo_repro.open_run(str(deterministic_run))
    assert run.status == "complete"
    assert run.num_iterations == 3
    assert run.config.seed == 7
    assert len(run.table("tokens", iterations=[1])) == len(run.table("tokens").query("iteration == 1"))
    assert set(run.table("evaluations")["iteration"]) == {0, 2, 3}
    assert len(run.table("evaluations", iterations=[3])) == len(run.table("evaluations").query("iteration == 3"))
    assert run.final["eval_accuracy"] == run.table("evaluations").query("iteration == 3")["is_correct"].mean()
    for call, message in (
        (lambda: run.table("tokenz"), "no table 'tokenz'; there are .*tokens"),
        (lambda: run.table("tokens", columns=["nothing"]), "has no column 'nothing'"),
        (lambda: run.table("tokens", iterations=[3]), "no iteration 3; recorded are 0 to 2"),
        (lambda: run.table("evaluations", iterations=[4]), "no iteration 4; recorded are 0 to 3"),
        (lambda: ppo_repro.open_run(deterministic_run / "nowhere"), "no such folder"),
    ):
        with pytest.raises(UserError, match=message):
            call()


def test_a_run_says_what_it_is_at_a_prompt(deterministic_run: Path, tmp_path: Path) -> None:
    run = ppo_repro.open_run(deterministic_run)
    assert repr(run).startswith(f"<run {deterministic_run}; complete, 3 iterations; ")
    assert f"fingerprint {run.fingerprint[:12]}>" in repr(run)
    assert "no such folder" in repr(ppo_repro.Run(tmp_path / "nowhere"))


def test_training_from_a_notebook_is_shown_and_recorded_and_can_be_executed_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[pd.Series[Any]] = []
    reward = of_a_notebook(CELL, "graded", math=math, BONUS=BONUS)
    run = ppo_repro.train(TREE, reward=reward, on_iteration=rows.append, out=tmp_path)
    assert "iteration 2/2: score" in capsys.readouterr().err
    assert [row["iteration"] for row in rows] == [0, 1]
    assert rows[-1]["score_mean"] == run.table("iterations")["score_mean"].iloc[-1]
    sequences = run.table("sequences")
    for _, row in sequences.iterrows():
        answer = str(sum(map(int, row["prompt_key"].split("+"))))
        assert row["scores"] == reward("", row["response"], answer)
    (term,) = run.config.reward.terms  # type: ignore[union-attr]
    written = Path(term.path.rpartition(":")[0])
    assert written.parent == run.path / "inputs"
    assert written.read_text().startswith("BONUS = 0.5\nimport math as math\n")
    assert rerun(LanguageKind(Silent(), ALONE), run.path, ["layout.threads=2"]).difference is None


def test_overrides_are_a_dict_or_texts_for_a_file_and_for_a_tree(tmp_path: Path) -> None:
    tree = ppo_repro.train(TINY, overrides={"ppo.iterations": 1, "rollout.stop": ["x"]}, out=tmp_path).config
    assert tree.ppo.iterations == 1
    assert tree.rollout.stop == ("x",)
    given = tree.model_dump(mode="json")
    run = ppo_repro.train(given, overrides=["seed=5"], out=tmp_path)
    assert run.config.seed == 5, "the caller's dict stays"
    assert given["seed"] == tree.seed, "the caller's dict stays"


NESTED = '''
def nested(prompt, response, answer, bonus=BONUS):
    """Names inside a lambda and a generator, in a default, and an attribute with the name of a variable."""
    right = any(re.match(word, response) for word in answer.split())
    return (lambda x: x * math.pi)(bonus) if right else 0.0
'''


def test_a_notebooks_reward_takes_what_its_inner_functions_and_defaults_read(tmp_path: Path) -> None:
    reward = of_a_notebook(NESTED, "nested", math=math, re=re, BONUS=BONUS, split=["a", "list"])
    file, _, name = reward_path(reward, tmp_path).rpartition(":")
    assert Path(file).read_text().startswith("BONUS = 0.5\nimport math as math\nimport re as re\n")
    namespace: dict[str, Any] = {}
    exec(Path(file).read_text(), namespace)
    assert namespace[name]("", "12", "12 3") == reward("", "12", "12 3") == BONUS * math.pi


def test_a_notebooks_reward_is_no_coroutine(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="made by `def`, not by `async def`"):
        reward_path(of_a_notebook("async def later(response):\n    return 1.0\n", "later"), tmp_path)


OF_THIS_FOLDER = ModuleType("mine")
OF_THIS_FOLDER.__file__ = str(Path.cwd() / "mine.py")
BORROWED = "def graded(response):\n    return mine.score(response)\n"
INSIDE = "def closure():\n    bonus = 1.0\n    def inner(a, b, c):\n        return bonus\n    return inner\n"
MISTAKES: dict[str, tuple[Any, str]] = {
    "a lambda": (lambda prompt, response, answer: 1.0, "must be a function made by `def`"),
    "a class": (FunctionType, "must be a function made by `def`"),
    "a closure": (of_a_notebook(INSIDE, "closure")(), "uses 'bonus' of the notebook, of type float; put it inside"),
    "a module that no rerun finds": (
        of_a_notebook(BORROWED, "graded", mine=OF_THIS_FOLDER),
        "uses the module mine of this folder, which is not copied",
    ),
    "a helper": (of_a_notebook(CELL, "graded", math=math, BONUS=[]), "uses 'BONUS' of the notebook"),
    "a number of NumPy": (
        of_a_notebook(CELL, "graded", math=math, BONUS=np.float64(0.5)),
        "'BONUS'.*, of type float64;",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_reward_that_could_not_be_computed_again_is_refused(mistake: str, tmp_path: Path) -> None:
    reward, message = MISTAKES[mistake]
    with pytest.raises(UserError, match=message):
        ppo_repro.train(TREE, reward=reward, out=tmp_path)
    assert not list(tmp_path.rglob("*.py"))


@pytest.mark.parametrize("bonus", [math.inf, -math.inf, math.nan, -0.0, None, "a'b"])
def test_every_plain_constant_of_a_notebook_is_in_the_written_file(bonus: object, tmp_path: Path) -> None:
    reward = of_a_notebook("def graded(prompt, response, answer):\n    return BONUS\n", "graded", BONUS=bonus)
    path, _, name = reward_path(reward, tmp_path).rpartition(":")
    assert repr(runpy.run_path(path)[name]("", "", "")) == repr(bonus)


def test_a_dict_that_pyyaml_read_has_its_numbers(tmp_path: Path) -> None:
    tree = yaml.safe_load(TINY.read_text(encoding="utf-8"))
    assert tree["value"]["learning_rate"] == "1e-3", "what PyYAML makes of it"
    few = {"ppo.iterations": 1, "ppo.epochs": 1, "model.warm_start_steps": 0, "ppo.learning_rate": "2E-4"}
    config = ppo_repro.train(tree, overrides=few, out=tmp_path).config
    assert isinstance(config, RunConfig)
    assert isinstance(config.value, SeparateValue)
    assert (config.value.learning_rate, config.ppo.learning_rate) == (1e-3, 2e-4)
