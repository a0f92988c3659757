"""The command line as a user meets it: one line per mistake, exit codes, JSON, real input."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ppo_repro.base.errors import UserError
from ppo_repro.records import manifest, reader
from tests.support.cli import Cli
from tests.support.interrupts import started
from tests.support.paths import ROOT, SMALL
from tests.support.runs import recorded_iterations, run_below
from tests.support.waiting import until


def test_run_show_rerun_diff_in_json(cli: Cli, tmp_path: Path) -> None:
    summary = cli.json("run", SMALL, "--out", tmp_path, "--set", "ppo.iterations=2")
    assert summary["unequal_old_rollout_logprobs"] == summary["unequal_values"] == 0
    assert summary["unequal_first_ratios"] == 0
    assert {"fingerprint", "iterations", "tokens", "reward_first", "reward_last"} <= set(summary)
    assert {"accuracy_before", "accuracy_after"} <= set(summary)
    assert {"preparation", "rollout", "forward", "update", "total"} <= set(summary["seconds"])
    run_dir = summary["run_dir"]
    out = cli.done("show", run_dir)
    assert summary["fingerprint"] in out
    assert "0 of" in out
    ratio = summary["numerical_accuracy"]["ratio"]
    assert 0 < ratio < 4
    assert f"stock float32 {summary['numerical_accuracy']['stock_rms']:.2g} and" in out
    found = cli.json("rerun", run_dir)
    assert (found["identical"], found["first_difference"]) == (True, None)
    out = cli.done("diff", run_dir, run_dir)
    assert out.strip() == "identical"


def test_diff_of_different_runs_is_exit_one(cli: Cli, deterministic_run: Path, native_run: Path) -> None:
    code, out, _ = cli("diff", deterministic_run, native_run)
    assert code == 1
    assert out.splitlines()[1] == "  numerics.mode: deterministic -> native"
    assert out.splitlines()[-1].startswith("different: table ")
    code, out, _ = cli("diff", deterministic_run, native_run, "--json")
    # the warm start comes first, and native numerics train another policy
    assert code == 1
    assert json.loads(out)["first_difference"]["table"] == "warm_start_steps"


MISTAKES = [
    (["run", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
    (["run", SMALL, "--set", "rollout.top_k=1000"], "rollout.top_k = 1000"),
    (["run", SMALL, "--set", "numerics.max_context=9"], "exceeds numerics.max_context = 9"),
    (["run", SMALL, "--set", "model.vocab_size=5"], "model.vocab_size = 5"),
    (["run", SMALL, "--set", "task.num_eval_prompts=500"], "task.num_eval_prompts = 500"),
    (["run", SMALL, "--set", "reward.terms=[{kind: function, path: gone.py:f}]"], "there is no file "),
    (["run", SMALL, "--out", f"{SMALL}/runs"], "cannot be made"),
    (["show", "nowhere"], "nowhere: no such folder"),
    (["rerun", str(ROOT)], "holds no manifest.json"),
    (["run"], "required: CONFIG"),
]


@pytest.mark.parametrize(("arguments", "said"), MISTAKES, ids=[said for _, said in MISTAKES])
def test_a_mistake_is_one_line_and_exit_two(cli: Cli, tmp_path: Path, arguments: list[str], said: str) -> None:
    where = ["--out", str(tmp_path)] if arguments[0] == "run" and "--out" not in arguments else []
    assert said in cli.refusal(*arguments, *where)
    assert not list(tmp_path.rglob("manifest.json")), "a run that could not start must leave nothing"


@pytest.mark.slow
def test_ctrl_c_keeps_complete_iterations_and_no_half_ones(tmp_path: Path) -> None:
    process = started("run", SMALL, "--out", tmp_path, "--set", "ppo.iterations=2000")
    until(lambda: recorded_iterations(tmp_path) > 11, "11 iterations")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    run_dir = run_below(tmp_path)
    done = manifest.load(run_dir).num_iterations
    assert done > 10
    assert (run_dir / "checkpoints" / f"iteration-{done // 10 * 10:06d}.safetensors").exists()
    assert err.rstrip().splitlines()[-1] == (
        f"interrupted; {done} iterations are recorded; `ppo-repro resume {run_dir}` goes on from iteration "
        f"{done // 10 * 10} and computes {done % 10 or 'none'} again"
    )
    assert "Traceback" not in err
    assert manifest.load(run_dir).status == "interrupted"
    with pytest.raises(UserError, match="the run is interrupted"):
        reader.read_tokens(run_dir)
    rows = reader.read_iterations(run_dir, allow_incomplete=True)
    assert rows["iteration"].tolist() == list(range(len(rows)))
    assert len(rows) >= 1
    assert len(reader.read_tokens(run_dir, allow_incomplete=True)) == rows["tokens"].sum()


@pytest.mark.slow
def test_ctrl_c_before_the_first_iteration_leaves_nothing(tmp_path: Path) -> None:
    # the first response is never scored: no speed of the machine brings the run further
    (tmp_path / "r.py").write_text(
        "import time\nfrom pathlib import Path\n\n\ndef r(prompt, response, answer):\n"
        "    Path(__file__).with_name('scoring').touch()\n    time.sleep(600)\n    return 0.0\n"
    )
    reward = f"reward.terms=[{{kind: function, path: '{tmp_path}/r.py:r'}}]"
    process = started("run", SMALL, "--out", tmp_path, "--set", reward)
    until((tmp_path / "scoring").exists, "the first score")
    assert list(tmp_path.rglob("manifest.json"))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert err.rstrip().endswith("interrupted; nothing was recorded; start it again")
    assert not list(tmp_path.rglob("manifest.json"))


HELP_IMPORTS = """
import sys
from ppo_repro.commands.cli import main
sys.argv = ["ppo-repro", "--help"]
try:
    main()
except SystemExit:
    print(sorted({"torch", "transformers", "mlflow", "pandas", "pyarrow", "numpy", "gymnasium"} & set(sys.modules)))
"""


def test_help_needs_no_heavy_import() -> None:
    done = subprocess.run([sys.executable, "-c", HELP_IMPORTS], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.rstrip().endswith("[]")
    assert "rerun" in done.stdout


def test_a_full_disk_is_one_line_and_keeps_what_was_complete(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ppo_repro.records import writer

    real = writer.atomic_write

    def full(path: Path, data: bytes | memoryview) -> None:
        if "iteration=000001" in path.name:
            raise UserError(f"{path}: cannot be written (No space left on device); make room there")
        real(path, data)

    monkeypatch.setattr(writer, "atomic_write", full)
    assert "No space left on device" in cli.refusal("run", SMALL, "--out", tmp_path)
    run_dir = run_below(tmp_path)
    assert manifest.load(run_dir).status == "failed"
    assert len(reader.read_iterations(run_dir, allow_incomplete=True)) == 1
