"""The engines of experiments/own_sampler in runs of their own: transformers' generate, and a real vLLM server.

The trainer computes in float32; a sampler in float32 is near it, a sampler in bfloat16 is not, and the audit knows.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ppo_repro.numerics.library import cpu_words
from ppo_repro.records import reader
from tests.support.cli import Cli
from tests.support.language import rerun, small_run
from tests.support.paths import ROOT

EXAMPLES = ROOT / "experiments" / "own_sampler"
VLLM = os.environ.get("PPO_REPRO_VLLM_PYTHON", "")
MODEL = "model.hidden_size=64", "model.num_attention_heads=1", "model.warm_start_steps=20", "rollout.temperature=0.7"
SETS = *MODEL, "ppo.iterations=2", "ppo.learning_rate=1e-2", "checkpoints.every=1", "numerics.accuracy_sequences=0"
STALE = """
from transformers_generate import Engine as Generating


class Engine(Generating):
    def load(self, folder):
        if not hasattr(self, "model"):
            super().load(folder)
"""


def sampled_by(path: Path, out: Path, parameters: str) -> Path:
    engine = f"rollout.engine={{kind: function, path: '{path}:Engine', parameters: {{{parameters}}}}}"
    return small_run(out, *SETS, engine)


def require_near(run_dir: Path, dtype: str) -> None:
    apart = float(reader.read_iterations(run_dir)["max_abs_old_rollout"].max())
    assert 0 < apart < 1e-4 if dtype == "float32" else 1e-3 < apart < 0.5


def require_judged(cli: Cli, run_dir: Path, dtype: str) -> None:
    code, out, _ = cli("audit", run_dir, "--responses", "16", "--json")
    sides = json.loads(out)
    assert sides["trainer"]["is_right"]
    assert sides["sampler"]["is_right"] == (dtype == "float32")
    assert code == (0 if dtype == "float32" else 1)
    assert dtype == "float32" or dtype in sides["sampler"]["cause"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_generate_of_transformers(dtype: str, cli: Cli, tmp_path: Path) -> None:
    run_dir = sampled_by(EXAMPLES / "transformers_generate.py", tmp_path, f"dtype: {dtype}, batch: 20")
    require_near(run_dir, dtype)
    require_judged(cli, run_dir, dtype)
    assert rerun(run_dir).difference is None


@pytest.mark.slow
def test_an_engine_with_older_weights_is_found(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "transformers_generate.py").write_text((EXAMPLES / "transformers_generate.py").read_text())
    (tmp_path / "stale.py").write_text(STALE)
    run_dir = sampled_by(tmp_path / "stale.py", tmp_path, "dtype: float32")
    code, out, _ = cli("audit", run_dir, "--responses", "16")
    assert code == 1
    assert "sampler is wrong: " in out
    assert "; weights that the run started with; that leaves" in out


# the worker of vLLM 0.32 dies at its first bfloat16 request on a CPU with AMX, and vLLM answers with status 500
NO_BFLOAT16_ON_AMX = pytest.mark.skipif("amx_bf16" in cpu_words("flags"), reason="vLLM: bfloat16 on a CPU with AMX")
SMALL_SERVER = "arguments: [--enforce-eager, --gpu-memory-utilization, '0.1']"


@pytest.mark.vllm
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=NO_BFLOAT16_ON_AMX)])
def test_a_vllm_server(dtype: str, cli: Cli, tmp_path: Path) -> None:
    assert VLLM, "PPO_REPRO_VLLM_PYTHON: the interpreter of an environment that .ci/server.sh made"
    run_dir = sampled_by(EXAMPLES / "vllm_server.py", tmp_path, f"python: {VLLM}, dtype: {dtype}, {SMALL_SERVER}")
    require_near(run_dir, dtype)
    require_judged(cli, run_dir, dtype)
    assert rerun(run_dir).difference is None


@pytest.mark.vllm
@pytest.mark.timeout(1200)
def test_the_audit_finds_the_matrix_that_vllm_does_not_reload_on_a_cpu(cli: Cli, tmp_path: Path) -> None:
    parameters = f"python: {VLLM}, dtype: float32, reload: true, {SMALL_SERVER}"
    code, out, _ = cli("audit", sampled_by(EXAMPLES / "vllm_server.py", tmp_path, parameters), "--responses", "16")
    assert code == 1
    assert "the last matrix of the weights that the run started with; that leaves" in out
