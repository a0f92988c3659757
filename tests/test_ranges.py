"""The ranges of pyproject.toml are true: fresh environments at both ends give this environment's fingerprint.

Every documented extra works alone at its lowest version. torch is this environment's build, except in the case "lowest
torch", which needs the PyTorch index: the packages of PyPI carry CUDA, gigabytes of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.cli import sets
from tests.support.paths import ROOT, SMALL_CONTROL, TINY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

UV = Path(sys.executable).with_name("uv")
PROJECT = ROOT / "pyproject.toml"
LOWEST, HERE = ("--resolution", "lowest-direct"), f"torch=={version('torch')}"
# shorter, with the code of the whole quickstart: warm start, evaluation, rollout, all stages and optimizer steps
QUICKSTART = ("ppo.iterations=2", "model.warm_start_steps=60", "rollout.prompts_per_iteration=128")
REASONING = """
experiment: chain
seed: 1
model: {kind: tiny, hidden_size: 16, num_layers: 1, num_attention_heads: 2, num_key_value_heads: 1,
  intermediate_size: 32, vocab_size: 300, warm_start_steps: 1, warm_start_batch_size: 2, warm_start_learning_rate: 1e-3}
task: {kind: reasoning_gym, dataset: chain_sum, size: 8, num_eval_prompts: 2}
rollout: {prompts_per_iteration: 4, samples_per_prompt: 1, max_response_tokens: 4}
value: {learning_rate: 1e-4}
ppo: {iterations: 1, epochs: 1, minibatch_size: 4, learning_rate: 1e-4}
numerics: {max_context: 128}
"""
VIEW = """
import sys
from pathlib import Path
from ppo_repro.analysis.view.server import Server
server = Server([Path(sys.argv[1])], 0)
server.index.look()
assert server.index.responses.rows("select count(*) as n from responses")[0]["n"] > 0
server.index.close()
"""
WANDB = """
import wandb
run = wandb.init(project="x", dir=".", mode="offline")
run.log({"score": 1.0})
run.finish()
"""
FIGURE = """
import ipykernel, nbclient, nbformat
from ppo_repro.analysis import figures
from matplotlib.figure import Figure
assert figures.svg(Figure().subplots()).startswith("<")
"""
OURS = ("test", "dev")  # extras of developers
SERVERS = "sglang"  # gigabytes, and an environment of its own: resolved only


def extras() -> list[str]:
    return [name for name in tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"] if name not in OURS]


class Environment:
    """An environment that uv makes in a folder, with the wheel of this checkout."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.python = folder, folder / "env" / "bin" / "python"
        self._uv("venv", "--python", sys.executable, str(folder / "env"))
        self._uv("build", "--wheel", "--python", sys.executable, "--out-dir", str(folder), str(ROOT))
        (self.wheel,) = folder.glob("*.whl")

    def resolve(self, *options: str, torch: str | None = HERE, extra: str | None = None) -> str:
        """The packages of the project with these options of uv, a line each."""
        (self.folder / "torch.txt").write_text(torch or "")
        options += ("--extra", extra) if extra else ()
        options += ("-c", str(self.folder / "torch.txt"), "--python", str(self.python))
        return self._uv("pip", "compile", "--no-annotate", "--no-header", *options, str(PROJECT))

    def install(self, packages: str, *options: str) -> None:
        """Make the environment hold these packages and the project, nothing else."""
        path = self.folder / "packages.txt"
        path.write_text(f"{packages}\nppo_repro @ {self.wheel.as_uri()}\n")
        self._uv("pip", "sync", *options, "--python", str(self.python), str(path))

    def run(self, *command: str | Path) -> str:
        """What a program of the environment prints; its folder is the working directory."""
        return self._done([str(self.python), *map(str, command)])

    def _uv(self, *arguments: str) -> str:
        try:
            return self._done([str(UV), *arguments, "--quiet"])
        except AssertionError as error:
            if any(word in str(error) for word in ("dns error", "Failed to fetch", "client error", "timed out")):
                pytest.skip(f"the package index cannot be reached: uv {' '.join(arguments[:2])}: {str(error)[-300:]}")
            raise

    def _done(self, command: Sequence[str]) -> str:
        settings = {"UV_FIND_LINKS": os.environ.get("PIP_FIND_LINKS", "").replace(" ", ","), "OMP_NUM_THREADS": "1"}
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | settings
        done = subprocess.run(command, env=environment, cwd=self.folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr[-3000:]}"
        return done.stdout


@pytest.fixture(scope="module")
def environment() -> Iterator[Environment]:
    """One for all tests: what Python compiled for one of them serves the next."""
    if not UV.exists():
        pytest.skip("no uv in this environment; `make setup` installs it")
    with TemporaryDirectory(prefix="ppo-repro-ranges-") as folder:
        yield Environment(Path(folder))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The fingerprint that this environment gives."""
    return fingerprint_here(tmp_path_factory.mktemp("runs"))


def fingerprint_here(out: Path, *fields: str) -> str:
    command = [sys.executable, *quickstart(out, *fields)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return str(json.loads(done.stdout)["fingerprint"])


def quickstart(out: Path, *fields: str) -> list[str]:
    return ["-m", "ppo_repro", "run", "quickstart", "--out", str(out), "--json", *sets(*QUICKSTART, *fields)]


ENDS: dict[str, tuple[tuple[str, ...], str | None, tuple[str, ...]]] = {  # options, torch, options of the torch build
    "highest": ((), HERE, ()),
    "lowest": (LOWEST, HERE, ()),
    "lowest torch": (LOWEST, None, ("--torch-backend", "cpu")),
}


@pytest.mark.parametrize("end", ENDS)
def test_both_ends_of_the_ranges_give_one_fingerprint(
    end: str, environment: Environment, expected: str, tmp_path: Path
) -> None:
    options, torch, backend = ENDS[end]
    packages = environment.resolve(*options, *backend, torch=torch)
    environment.install(packages, *backend)
    found = json.loads(environment.run(*quickstart(tmp_path)))
    assert found["fingerprint"] == expected, packages
    environment.run("-m", "ppo_repro", "analyse", "compare", found["run_dir"], found["run_dir"])


def test_another_seed_gives_another_fingerprint(expected: str, tmp_path: Path) -> None:
    """Control of the tests above."""
    assert fingerprint_here(tmp_path, "seed=1") != expected


def test_every_extra_resolves_at_its_highest(environment: Environment) -> None:
    for extra in extras():
        assert environment.resolve(extra=extra, torch=None if extra == SERVERS else HERE)


def test_every_extra_works_alone_at_its_lowest(environment: Environment) -> None:
    folder = environment.folder
    (folder / "chain.yaml").write_text(REASONING)
    program = ("-m", "ppo_repro")
    commands: dict[str, tuple[str | Path, ...]] = {
        "lora": ("-c", "import peft"),
        "control": (*program, "run", SMALL_CONTROL, "--set", "ppo.iterations=1"),
        "tasks": (*program, "run", "chain.yaml"),
        "real": ("-c", "import gguf, ppo_repro.assets.smollm2; gguf.GGUFReader, gguf.dequantize"),
        "tensorboard": (*program, "run", TINY, "--set", "ppo.iterations=1", "--out", "tiny", "--tensorboard", "events"),
        "wandb": ("-c", WANDB),
        "view": ("-c", VIEW, "tiny"),
        "grid": ("-c", "import ray, submitit"),
        "notebook": ("-c", FIGURE),
        "docs": (ROOT / ".ci" / "docs.py", "docs"),
    }
    assert [*commands, SERVERS] == sorted(extras(), key=[*commands, SERVERS].index)
    for extra, command in commands.items():
        environment.install(environment.resolve(*LOWEST, extra=extra))
        environment.run(*command)
    assert environment.resolve(*LOWEST, torch=None, extra=SERVERS)
