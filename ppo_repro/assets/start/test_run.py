"""Run with `pytest`: the reward is right, and a run of one iteration keeps its promises."""

import json
import subprocess
import sys
from pathlib import Path

from reward import score

HERE = Path(__file__).resolve().parent


def ppo_repro(*arguments: str) -> dict:
    command = [sys.executable, "-m", "ppo_repro", *arguments, "--json"]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_reward() -> None:
    assert score("2+3=", " 5 ", "5") == 1.0
    assert score("2+3=", "6", "5") == 0.2
    assert score("2+3=", "five", "5") == 0.0


def test_every_prompt_has_an_answer_that_the_reward_likes_best() -> None:
    for line in (HERE / "prompts.jsonl").read_text().splitlines():
        problem = json.loads(line)
        assert score(problem["prompt"], problem["answer"], problem["answer"]) == 1.0


def test_a_run_of_one_iteration_repeats_itself(tmp_path: Path) -> None:
    summary = ppo_repro("run", "run.yaml", "--set", "ppo.iterations=1", "--out", str(tmp_path))
    assert summary["unequal_old_rollout_logprobs"] == summary["unequal_first_ratios"] == 0
    assert ppo_repro("rerun", summary["run_dir"])["identical"]
