"""Which prompts an iteration asks, and the random stream of each response."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ppo_repro.config.files import load_config
from ppo_repro.stages.rollout import choose_prompts
from ppo_repro.tasks.problems import Problem, choose
from tests.support.paths import TINY

PROBLEMS = tuple(Problem(f"key {i}", f"prompt {i}", str(i)) for i in range(6))


def test_every_pass_asks_each_prompt_once_in_an_order_of_its_own() -> None:
    """Iterations of four prompts: the second one ends a pass and begins the next."""
    asked = [problem.key for iteration in range(3) for problem in choose(PROBLEMS, 4, 7, iteration)]
    first, second = asked[:6], asked[6:]
    assert sorted(first) == sorted(second) == [problem.key for problem in PROBLEMS]
    assert first != second


def test_every_response_of_a_run_has_a_seed_of_its_own() -> None:
    """Also where an iteration asks a prompt twice: the numbers of its samples go on."""
    config = load_config(TINY, ["rollout.prompts_per_iteration=8", "rollout.samples_per_prompt=3"])
    task: Any = SimpleNamespace(
        problems=SimpleNamespace(train=PROBLEMS), prompt_ids=dict.fromkeys([problem.key for problem in PROBLEMS], (1,))
    )
    iterations = [choose_prompts(config, task, iteration) for iteration in range(2)]
    for prompts in iterations:
        assert len(set(zip(prompts.prompt_key, prompts.sample_index, strict=True))) == 24
        assert max(prompts.sample_index) == 5
    assert len({seed for prompts in iterations for seed in prompts.seed}) == 48
