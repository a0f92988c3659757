"""Whether what the CPU computes comes out on the double of a device: runs, resumed runs, DPO, probe.

`python -m tests.support.processes.second_device FOLDER JOB ...`, a process of its own: autograd counts devices once,
at the first backward pass. A job is the overrides of a run as a JSON list, or the name of a function in JOBS; the
process prints what each said, one JSON value a line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import PreTrainedModel

from ppo_repro.checks import probe
from ppo_repro.config.files import load_config, load_dpo_config
from ppo_repro.dpo.run import train_dpo
from ppo_repro.models import networks
from ppo_repro.models.batches import TokenBatch
from ppo_repro.models.networks import make_policy
from ppo_repro.numerics import backend
from ppo_repro.numerics.device import moved
from ppo_repro.numerics.trunk.forward import TrunkForward
from ppo_repro.records.config_file import ENVIRONMENT_NAME
from ppo_repro.runs import prepare
from ppo_repro.runs.diff import first_difference
from ppo_repro.runs.tables import unequal_bits
from ppo_repro.sglang_plugin.pool import PoolCache
from ppo_repro.testing.small_models import CONFIGS, CONTEXT, small_model
from ppo_repro.watcher import Silent
from tests.support.device_double import device_double
from tests.support.language import resume, run
from tests.support.paths import TINY

# the float64 model beside which accuracy is measured swaps the data of its parameters, which the double cannot
USUAL = (
    *("layout.backend=eager", "numerics.accuracy_sequences=0", "model.warm_start_steps=2"),
    *("ppo.iterations=1", "ppo.epochs=1", "rollout.prompts_per_iteration=2", "task.num_eval_prompts=2"),
)
CUDA = "layout.device=cuda"
DPO = """
experiment: baseline
seed: 2
run: {run}
num_eval_prompts: 1
dpo: {{beta: 0.1, epochs: 2, minibatch_size: 4, learning_rate: 2e-3}}
numerics: {{max_context: 12}}
layout: {{backend: eager}}
"""


class Noting(Silent):
    """A watcher that keeps the warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warning(self, text: str) -> None:
        self.warnings.append(text)


class Stopping(Silent):
    """A watcher that ends the run after its first iteration."""

    def iteration(self, done: int, total: int, figures: str) -> None:
        raise KeyboardInterrupt


@contextmanager
def cuda_is_the_double() -> Iterator[None]:
    """What asks for cuda gets the double."""
    with (
        device_double() as device,
        patch.object(prepare, "device_of", lambda name: torch.device("cpu") if name == "cpu" else device),
        patch.object(torch.cuda, "is_available", lambda: True),
        patch.object(torch.cuda, "get_device_name", lambda: "a double"),
    ):
        yield


def on_double(overrides: list[str], folder: Path) -> tuple[Path, list[str]]:
    """The folder of a run on the double, and its warnings."""
    config, watcher = load_config(TINY, [*USUAL, CUDA, *overrides]), Noting()
    with cuda_is_the_double():
        return run(config, folder, watcher)[0], watcher.warnings


def difference(left: Path, right: Path) -> str:
    """The first difference of two runs in words, or `equal`."""
    found = first_difference(left, right)
    return "equal" if found is None else found.describe()


def compared(overrides: list[str], folder: Path) -> dict[str, Any]:
    """A run on the CPU and on the double."""
    on_cpu = run(load_config(TINY, [*USUAL, *overrides]), folder / "cpu", Silent())[0]
    elsewhere, warnings = on_double(overrides, folder / "device")
    device = json.loads((elsewhere / ENVIRONMENT_NAME).read_text())["device"]
    return {"said": difference(on_cpu, elsewhere), "warnings": warnings, "device": device}


def resumed(folder: Path) -> dict[str, str]:
    """Runs of two iterations, stopped after the first on one device and resumed on the other, beside a whole one."""
    two = [*USUAL, "ppo.iterations=2", "checkpoints.every=1"]
    whole, said = run(load_config(TINY, two), folder / "whole", Silent())[0], dict[str, str]()
    for first, second in (("cpu", "cuda"), ("cuda", "cpu")):
        with cuda_is_the_double():
            try:
                run(load_config(TINY, [*two, f"layout.device={first}"]), folder / first, Stopping())
            except KeyboardInterrupt:
                (stopped,) = (path.parent for path in (folder / first).rglob("manifest.json"))
            start = resume(stopped, Silent(), [f"layout.device={second}"]).start
        said[f"{first}, then {second}"] = f"from {start}: {difference(whole, stopped)}"
    return said


def preferences(folder: Path) -> dict[str, Any]:
    """Is the fingerprint of DPO on the double the CPU's; and with other square roots there?"""
    pairs = (
        *("rollout.prompts_per_iteration=12", "rollout.samples_per_prompt=4", "ppo.minibatch_size=12"),
        *("model.warm_start_steps=40", "checkpoints.every=1"),
    )
    source, watcher = run(load_config(TINY, [*USUAL, *pairs]), folder / "source", Silent())[0], Noting()
    path = folder / "dpo.yaml"
    path.write_text(DPO.format(run=source))
    expected = train_dpo(load_dpo_config(path), folder / "cpu", Silent()).fingerprint
    with cuda_is_the_double():
        found = train_dpo(load_dpo_config(path, [CUDA]), folder / "device", watcher).fingerprint
        with another_root():
            other = train_dpo(load_dpo_config(path, [CUDA]), folder / "other", Silent()).fingerprint
    return {"equal": found == expected, "warnings": watcher.warnings, "with another root": other == expected}


def probed(folder: Path) -> dict[str, Any]:
    """Rows of a probe on the double, those that are unequal, and whether other square roots there would be."""
    config = load_config(TINY, [*USUAL, CUDA])
    with cuda_is_the_double():
        rows = probe.probe(config, lambda what, done, total: None).rows
        with another_root():
            subject = probe._subject(config, "exact")
            here, there = probe._forward(subject, "right", probe.SEQUENCES), probe._on_the_cpu(subject)
    on_device = [f"{row.promise}, {row.condition}" for row in rows if row.condition in ("eager backend", "on the CPU")]
    unequal = [row.condition for row in rows if row.unequal_exact]
    other = unequal_bits(here, there) == 0
    return {"rows": len(rows), "of the device": on_device, "unequal": unequal, "with another root": other}


class Pool:
    """Memory for keys and values as SGLang's pool has it, a location for each token."""

    def __init__(self, layers: int, locations: int, heads: int, dim: int, device: torch.device) -> None:
        self.buffers = [torch.zeros(2, locations, heads, dim, device=device) for _ in range(layers)]

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        return self.buffers[layer][0]

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        return self.buffers[layer][1]


@torch.no_grad()
def _served(device: torch.device) -> list[torch.Tensor]:
    """What the plugin's cache gives two requests, of which the second has the prefix of the first; and its pool."""
    trunk = moved(make_policy(small_model(CONFIGS["qwen3"](), seed=0), "exact", CONTEXT), device).get_decoder()
    config, found = trunk.config, list[torch.Tensor]()
    pool = Pool(config.num_hidden_layers, 16, config.num_key_value_heads, config.head_dim, device)
    table = torch.tensor([[1, 2, 3, 4, 0], [1, 2, 5, 6, 0]]).to(device)  # locations by request and position
    cache = PoolCache(config, table, pool, CONTEXT)
    # request, first new position, new tokens, their locations
    for request, start, new in ((0, 0, [7, 8, 9]), (0, 3, [10]), (1, 2, [11, 12])):
        ids = torch.tensor([new]).to(device)
        one = [torch.tensor([x]).to(device) for x in (request, start, len(new))]
        cache.begin(*one, table[request, start : start + len(new)])
        found.append(TrunkForward(trunk).over_cache(ids, cache).cpu())
    return [*found, *(buffer.cpu() for buffer in pool.buffers)]


def served(folder: Path) -> dict[str, bool | str]:
    """Whether the plugin's cache gives the same bits on the double; and what it says of a location on the CPU."""
    backend.use("eager", 1)
    ours, cpu = _served(torch.device("cpu")), torch.device("cpu")
    with cuda_is_the_double():
        device = prepare.device_of("cuda")
        theirs = _served(device)
        with patch.object(Pool, "get_key_buffer", lambda self, layer: self.buffers[layer][0].to(cpu)):
            fault = _error(lambda: _served(device))
    return {"equal": all(map(torch.equal, ours, theirs)), "any": bool(ours[-1].any()), "fault": fault}


def _error(work: Callable[[], object]) -> str:
    try:
        work()
    except (RuntimeError, TypeError) as error:
        return str(error)
    return "nothing"


def without_a_move(folder: Path) -> dict[str, str]:
    """What a run says whose batches stay on the CPU."""

    def staying(trunk: PreTrainedModel, batch: TokenBatch) -> torch.Tensor:
        inputs = batch.input_ids, batch.position_ids, batch.first_key, batch.predictors
        return TrunkForward(trunk).over_batch(*inputs)

    with patch.object(networks, "hidden_states", staying):
        return {"said": _error(lambda: on_double([], folder))}


@contextmanager
def another_root() -> Iterator[None]:
    """Square roots of the double are a thousandth larger; on the CPU they are NumPy's."""
    root = torch.sqrt
    with patch.object(torch, "sqrt", lambda x: root(x) * 1.001):
        yield


def with_another_root(folder: Path) -> dict[str, str]:
    """How a run on the CPU differs from one on a device with other square roots."""
    on_cpu = run(load_config(TINY, USUAL), folder / "cpu", Silent())[0]
    with another_root():
        return {"said": difference(on_cpu, on_double([], folder / "device")[0])}


_JOBS = (resumed, preferences, probed, served, without_a_move, with_another_root)
JOBS = {job.__name__: job for job in _JOBS}


def main() -> None:
    folder = Path(sys.argv[1])
    with device_double():
        pass  # before the first backward pass
    for index, job in enumerate(sys.argv[2:]):
        own = folder / str(index)
        own.mkdir()
        said = JOBS[job](own) if job in JOBS else compared(json.loads(job), own)
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
