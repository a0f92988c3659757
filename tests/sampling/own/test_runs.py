"""Runs that sample with an engine of the user's own: what is recorded, promised, said, repeated and refused."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from ppo_repro.base.errors import UserError
from ppo_repro.config.files import dump_yaml
from ppo_repro.records import reader
from ppo_repro.runs.resume import Resumed
from ppo_repro.runs.verify_files import verify_files
from tests.support.cli import Cli
from tests.support.language import fork, rerun, resume, run
from tests.support.own_engine import UNIFORM, config_of, written
from tests.support.paths import ROOT, TINY
from tests.support.resume import Recorded, record
from tests.support.runs import run_below

ENGINE = "rollout.engine.path = engine.py:Engine"
NOT_PROMISED = f"{ENGINE}: sampled tokens and their log-probs are recorded, not promised"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Three iterations by an engine that never draws the same again, and the states on the way."""
    folder = tmp_path_factory.mktemp("own")
    parameters = f"rollout.engine.parameters={{log: '{folder / 'log'}', draws: true}}"
    return record(config_of(written(folder), parameters, "checkpoints.every=1"), folder)


def test_what_the_engine_returned_is_recorded(recorded: Recorded) -> None:
    tokens, sequences = reader.read_tokens(recorded.whole), reader.read_sequences(recorded.whole)
    assert len(sequences) == 3 * 15
    vocabulary = json.loads((recorded.whole / "checkpoints/final/config.json").read_text())["vocab_size"]
    assert (tokens["rollout_logprobs"] == np.float32(-math.log(vocabulary))).all()


def test_the_trainer_has_its_own_log_probs_and_the_run_counts_those_that_differ(recorded: Recorded) -> None:
    tokens, iterations = reader.read_tokens(recorded.whole), reader.read_iterations(recorded.whole)
    differ = int((tokens["rollout_logprobs"] != tokens["old_logprobs"]).sum())
    assert 0 < differ == iterations["unequal_old_rollout_logprobs"].sum()


def test_the_engine_gets_each_version_of_the_weights_once(recorded: Recorded) -> None:
    calls = [json.loads(line)[0] for line in (recorded.whole.parents[2] / "log").read_text().splitlines()]
    assert calls == ["load", "generate"] * 3  # evaluation is the built-in engine's


def test_a_rerun_takes_the_recorded_responses_and_finds_the_same_bits(recorded: Recorded, cli: Cli) -> None:
    out = cli.done("rerun", recorded.whole)
    assert out.startswith("identical: 3 iterations, fingerprint ")
    assert out.strip().endswith(f"; the responses are the recorded ones, because {ENGINE} promises no bits")


def test_a_rerun_with_the_built_in_engine_finds_other_responses(recorded: Recorded) -> None:
    difference = rerun(recorded.whole, ["rollout.engine={kind: torch}"]).difference
    assert difference is not None
    assert difference.table == "sequences"


@pytest.mark.parametrize("iterations", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_killed_run_goes_on_with_what_it_had_sampled(recorded: Recorded, tmp_path: Path, iterations: int) -> None:
    run_dir = recorded.copy(iterations, tmp_path)
    for checkpoint in (run_dir / "checkpoints").glob("iteration-*"):
        checkpoint.unlink()
    records = {path: path.read_bytes() for path in (run_dir / "records").rglob("*.parquet")}
    assert resume(run_dir) == Resumed(0, iterations)
    assert all(path.read_bytes() == content for path, content in records.items())
    assert verify_files(run_dir).status == "complete"
    assert rerun(run_dir).difference is None


def test_another_engine_does_not_go_on_with_a_run(recorded: Recorded, tmp_path: Path) -> None:
    run_dir = recorded.copy(1, tmp_path)
    other = written(tmp_path, UNIFORM + "\n")
    with pytest.raises(UserError, match=r"rollout.engine: would sample with Engine of a file of SHA-256 \w{12}, ") as e:
        resume(run_dir, [other])
    assert "leave rollout.engine as it is recorded" in str(e.value)


def test_a_fork_samples_on_and_is_repeated_without_its_origin(recorded: Recorded, tmp_path: Path) -> None:
    forked = fork(recorded.whole, tmp_path, 2, "ppo.iterations=4", "ppo.learning_rate=5e-4")
    assert len(reader.read_iterations(forked)) == 4
    assert rerun(forked).difference is None


def test_show_verify_and_the_report_say_what_is_promised(recorded: Recorded, cli: Cli, tmp_path: Path) -> None:
    for command in ("show", "verify"):
        _, out, _ = cli(command, recorded.whole)
        assert f"{NOT_PROMISED}; scores, rewards and updates follow from them bit for bit" in out
    cli.done("report", recorded.whole, "--out", tmp_path / "report.html")
    assert NOT_PROMISED in (tmp_path / "report.html").read_text()


def test_the_plan_says_that_it_leaves_the_engine_out(cli: Cli) -> None:
    _, out, _ = cli("plan", ROOT / "experiments" / "own_sampler" / "measure.yaml")
    assert out.endswith("not counted: the processes of rollout.engine.kind = function\n")


def test_the_run_keeps_a_copy_of_the_engine_and_no_weights_of_it(recorded: Recorded) -> None:
    assert (recorded.whole / "inputs" / "engine.py").read_text() == UNIFORM
    assert not (recorded.whole / "engine").exists()


LOADS = "    def load(self, folder):\n"


def test_the_folder_is_a_transformers_folder_with_tokenizer_and_end_tokens(tmp_path: Path) -> None:
    copying = f"{LOADS}        import shutil; shutil.copytree(folder, '{tmp_path / 'copy'}', dirs_exist_ok=True)\n"
    record(config_of(written(tmp_path, UNIFORM.replace(LOADS, copying)), "ppo.iterations=1"), tmp_path)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "copy", output_loading_info=True)
    assert not report["missing_keys"]
    assert isinstance(model.config.eos_token_id, list)
    assert (tmp_path / "copy" / "tokenizer.json").exists()


RETURNS = "        return [self.response("


def returning(value: str) -> str:
    """An engine that spoils what it returns, `good`, on line 24."""
    return UNIFORM.replace(RETURNS, "        good = [self.response(").replace(
        "for seed in seeds]\n", f"for seed in seeds]\n        return {value}\n"
    )


# an engine, and what the one line says after `rollout.engine.path`
REFUSED: dict[str, tuple[str, str]] = {
    "no class of that name": (
        UNIFORM.replace("class Engine", "class Other"),
        " = '{file}:Engine': {file} has no Engine",
    ),
    "a function": ("def Engine():\n    pass\n", ": {file}:1: Engine is no class; must be one with load and"),
    "no load": (UNIFORM.replace("def load", "def lode"), ": {file}:7: Engine has no method load(folder); add"),
    "no generate": (UNIFORM.replace("def gen", "def g"), ": {file}:7: Engine has no method generate(prompts, "),
    "another signature": (
        UNIFORM.replace("prompts, sampling, seeds)", "prompts)"),
        ": {file}:19: Engine.generate cannot be called (too many positional arguments); it gets prompts, samp",
    ),
    "a parameter without a value": (UNIFORM.replace("log=None", "log"), ": {file}:7: Engine cannot be called"),
    "raises in generate": (UNIFORM.replace("ids = []", "ids = [][0]"), ": {file}:24: Engine.generate raised Ind"),
    "ends its process": (returning("__import__('os')._exit(3)"), ": {file}:Engine: generate ended its process"),
    "an id outside": (
        returning("[([99], [-1.0], 'length')] + good[1:]"),
        ": {file}:19: Engine.generate returned as response 0 the id 99 at place 0; must be a whole number in 0..",
    ),
}


def refusal(cli: Cli, folder: Path, text: str, *overrides: str) -> str:
    """The line that ends a run with an engine."""
    config = folder / "run.yaml"
    config.write_text(dump_yaml(config_of(written(folder, text), *overrides)))
    return cli.refusal("run", config, "--out", folder / "runs")


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_engine_is_one_line_and_leaves_no_run(name: str, cli: Cli, tmp_path: Path) -> None:
    text, said = REFUSED[name]
    expected = "error: rollout.engine.path" + said.format(file=tmp_path / "engine.py")
    assert refusal(cli, tmp_path, text).startswith(expected)
    assert not list((tmp_path / "runs").rglob("manifest.json"))


def test_a_path_without_a_file_is_one_line(cli: Cli, tmp_path: Path) -> None:
    engine = written(tmp_path, UNIFORM, "x/Engine")
    assert cli.refusal("run", TINY, "--set", engine, "--out", tmp_path).startswith("error: rollout.engine.path = ")


def test_an_engine_that_hangs_is_given_up(cli: Cli, tmp_path: Path) -> None:
    said = refusal(cli, tmp_path, returning("__import__('time').sleep(60)"), "rollout.engine.timeout_s=1")
    assert said.endswith(":Engine: generate gave no answer within 1 s; make it end, or raise rollout.engine.timeout_s")


def test_an_error_later_keeps_the_iterations_before_it(cli: Cli, tmp_path: Path) -> None:
    once = UNIFORM.replace(
        '        self.note("generate", len(prompts))\n',
        "        self.calls = getattr(self, 'calls', 0) + 1\n        assert self.calls < 3, 'tired'\n",
    )
    said = refusal(cli, tmp_path, once)
    assert "Engine.generate raised AssertionError: tired; 2 iterations are recorded" in said
    run_dir = run_below(tmp_path / "runs")
    assert verify_files(run_dir).iterations == 2
    assert resume(run_dir) == Resumed(0, 2)  # 2 calls suffice now


def test_importance_weights_correct_the_mismatch_and_are_replayed(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text(UNIFORM)
    engine = written(tmp_path, "from beside import Engine as Uniform\n\n\nclass Engine(Uniform):\n    pass\n")
    weights = "ppo.importance_weights={kind: truncated, cap: 1.5}"
    run_dir, _ = run(config_of(engine, "ppo.ratio_anchor=old", weights, "ppo.iterations=1"), tmp_path)
    updates = reader.read_updates(run_dir, columns=["importance_weights", "correction"])
    assert (updates["correction"] == "truncated_high").any()
    assert updates["importance_weights"].max() == 1.5
    assert cli("verify", run_dir)[0] == 0
    assert (run_dir / "inputs" / "beside.py").read_text() == UNIFORM


def test_the_figure_compares_samplers(recorded: Recorded, deterministic_run: Path, tmp_path: Path, cli: Cli) -> None:
    figure = tmp_path / "mismatch.svg"
    cli.done("analyse", "figure", "mismatch", figure, recorded.whole, deterministic_run)
    assert re.search(r"engine draws: [\d,]+ of [\d,]+ differ, by \d", figure.read_text())
    assert re.search(r"built in, deterministic: 0 of [\d,]+ differ<", figure.read_text())
