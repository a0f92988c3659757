"""What a run says on a terminal about its work, and about what a user most likely did not mean."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from ppo_repro import open_run
from ppo_repro.analysis.report.run_page import run_page
from ppo_repro.analysis.view.index import Index
from ppo_repro.records import manifest, reader
from tests.support.cli import Cli, folder_config, sets, write_prompts
from tests.support.paths import ROOT, TINY


@pytest.fixture(scope="module")
def policy_folder(deterministic_run: Path) -> Path:
    return deterministic_run / "checkpoints" / "final"


def test_many_cut_responses_and_too_few_prompts_are_named_and_steps_are_counted(cli: Cli, tmp_path: Path) -> None:
    few = ("rollout.prompts_per_iteration=40", "ppo.minibatch_size=20")
    for fields, warned in ((("rollout.max_response_tokens=1", *few), True), ((), False)):
        code, out, err = cli("run", TINY, "--out", tmp_path, *sets(*fields))
        assert code == 0, err
        cut = re.compile(r"(\d+)% of the responses were cut at rollout\.max_response_tokens; raise it")
        while_running = [line for line in err.splitlines() if line.startswith("warning: iteration ")]
        assert len(while_running) == warned
        assert all(cut.search(line) for line in while_running)
        assert (cut.search(out) is not None) is warned
        asked = "rollout.prompts_per_iteration = 40: there are 29 prompts to train on; an iteration asks some of them"
        assert (asked in err) is warned
        run_dir = Path("/" + out.split("\nrecords     /")[1].splitlines()[0])
        last = [line for line in err.splitlines() if line.startswith("warm start ")][-1]
        steps = len(reader.read_table("warm_start_steps", run_dir))
        assert last.startswith(f"warm start {steps}/{steps}: "), "optimizer steps, as in the table"
        iterations = reader.read_iterations(run_dir)
        score, reward = (
            f"{iterations[name].iloc[0]:.3f} -> {iterations[name].iloc[-1]:.3f}"
            for name in ("score_mean", "reward_mean")
        )
        said = f"sampled responses: mean score {score}; mean reward, the score minus the KL penalty, {reward}"
        assert said in out.splitlines()


def test_a_long_prompt_is_named_by_its_key_and_length(cli: Cli, tmp_path: Path, policy_folder: Path) -> None:
    prompts = write_prompts(tmp_path / "p.jsonl", *[f"{n}+1=" for n in range(8)], "1+" * 3000)
    line = cli.refusal("run", folder_config(tmp_path / "c.yaml", policy_folder, prompts), "--out", tmp_path)
    assert re.search(r"prompt 'p8': prompt of \d{4} tokens: with rollout\.max_response_tokens = 4 it", line)
    assert len(line) < 250


def test_a_reward_that_is_no_function_is_one_line_also_of_its_own_process(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "r.py").write_text("def score(prompt, response, answer):\n    return 1.0 +\n")
    terms = f"reward.terms=[{{kind: function, path: '{tmp_path}/r.py:score'}}]"
    code, out, err = Cli(monkeypatch, capfd)("run", TINY, "--out", tmp_path, "--set", terms)
    begins, *errors = err.splitlines()
    assert (code, out, len(errors)) == (2, "", 1)
    assert "iterations into" in begins
    assert "r.py:2 fails to load (SyntaxError in Python 3." in errors[0]


@pytest.mark.parametrize(("reward", "moves"), [("-100.1", False), ("-100.1 - (response == answer)", True)])
def test_equal_scores_move_nothing(reward: str, moves: bool, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(f"def score(prompt, response, answer):\n    return {reward}\n")
    fields = (
        "advantages={kind: group}", "value={kind: none}", "kl={placement: loss, kl_coef: 0}", "ppo.entropy_coef=0",
        "rollout.samples_per_prompt=3", f"reward.terms=[{{kind: function, path: '{tmp_path}/r.py:score'}}]",
    )  # fmt: skip
    run_dir = Path(cli.json("run", TINY, "--out", tmp_path, *sets(*fields))["run_dir"])
    final = manifest.load(run_dir).final
    assert (final["policy_digest"] != final["initial_policy_digest"]) is moves
    assert (reader.read_tokens(run_dir)["advantages"] != 0.0).any() == moves


@pytest.mark.parametrize(("kind", "has_accuracy"), [("function", False), ("exact_match", True)])
def test_no_accuracy_where_a_function_rewards(kind: str, has_accuracy: bool, cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def score(prompt, response, answer):\n    return 0.25\n")
    term = f"{{kind: function, path: '{tmp_path}/r.py:score'}}" if kind == "function" else "{kind: exact_match}"
    code, out, err = cli("run", TINY, "--out", tmp_path, "--set", f"reward.terms=[{term}]")
    assert code == 0, err
    run_dir = Path("/" + out.split("\nrecords     /")[1].splitlines()[0])
    page, index, shown = run_page(run_dir, 0), Index([run_dir]), cli("show", run_dir)[1]
    index.look()
    said = {
        "run": "held-out accuracy " in out,
        "progress": "accuracy " in err,
        "show": "held-out accuracy" in shown,
        "report": "Held-out accuracy" in page or "Accuracy, sampled" in page or "Accuracy, held out" in page,
        "view": index.runs[0].judged != "none",
        "Python": "eval_accuracy" in repr(open_run(run_dir)),
    }
    index.close()
    assert said == dict.fromkeys(said, has_accuracy)
    of_iterations = shown[shown.index("iteration ") : shown.index("\n  '")].splitlines()
    assert "score_mean" in of_iterations[0]
    assert "eval_score" in of_iterations[0]
    assert max(map(len, of_iterations)) <= 80
    if not has_accuracy:
        assert "held-out score stayed at 0.250 (greedy)" in out
        assert "Held-out score stayed at 0.250 after" in page


def test_commands_in_messages_can_be_pasted_wherever_a_run_lies(
    cli: Cli, deterministic_run: Path, tmp_path: Path
) -> None:
    here = Path(shutil.copytree(deterministic_run, tmp_path / "my runs" / "it's"))
    (command,) = re.findall("`(.*)`", cli.refusal("resume", here))
    assert shlex.split(command) == ["ppo-repro", "show", str(here)]
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / "ppo_repro").rglob("*.py")}
    plain = re.compile(r"ppo-repro [a-z]+ \{(?!shlex\.|quoted)")
    assert [path for path, text in sources.items() if plain.search(text)] == []
