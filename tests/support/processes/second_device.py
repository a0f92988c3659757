"""Runs of several configurations on the CPU and on the double of a device; says of each whether the records are equal.

`python -m tests.support.processes.second_device FOLDER '["a.b=c", ...]' ...`, a process of its own: autograd counts
devices once, at the first backward pass. The last two lines are of runs with a fault.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from unittest.mock import patch

import torch
from transformers import PreTrainedModel

from ppo_repro.config.files import load_config
from ppo_repro.models import networks
from ppo_repro.models.batches import TokenBatch
from ppo_repro.numerics.trunk.forward import TrunkForward
from ppo_repro.runs import prepare
from ppo_repro.runs.diff import first_difference
from ppo_repro.watcher import Silent
from tests.support.device_double import device_double
from tests.support.language import run
from tests.support.paths import TINY

# the float64 model beside which accuracy is measured swaps the data of its parameters, which the double cannot
USUAL = (
    *("layout.backend=eager", "numerics.accuracy_sequences=0", "model.warm_start_steps=2"),
    *("ppo.iterations=1", "ppo.epochs=1", "rollout.prompts_per_iteration=2", "task.num_eval_prompts=2"),
)


class Noting(Silent):
    """A watcher that keeps the warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warning(self, text: str) -> None:
        self.warnings.append(text)


def on_double(overrides: list[str], folder: Path) -> tuple[Path, list[str]]:
    """The folder of a run on the double, and its warnings."""
    config, watcher = load_config(TINY, [*USUAL, "layout.device=cuda", *overrides]), Noting()
    with (
        device_double() as device,
        patch.object(prepare, "device_of", lambda _: device),
        patch.object(torch.cuda, "is_available", lambda: True),
    ):
        return run(config, folder, watcher)[0], watcher.warnings


def without_a_move(folder: Path) -> str:
    """What a run says whose batches stay on the CPU."""

    def staying(trunk: PreTrainedModel, batch: TokenBatch) -> torch.Tensor:
        inputs = batch.input_ids, batch.position_ids, batch.first_key, batch.predictors
        return TrunkForward(trunk).over_batch(*inputs)

    with patch.object(networks, "hidden_states", staying):
        try:
            on_double([], folder)
        except RuntimeError as error:
            return str(error)
    return "nothing"


def with_another_root(overrides: list[str], on_cpu: Path, folder: Path) -> str:
    """How a run on the CPU differs from one on a device whose square roots are one bit larger."""
    root = torch.sqrt  # of CUDA alone: on the CPU it is NumPy's
    with patch.object(torch, "sqrt", lambda x: torch.nextafter(root(x), torch.full_like(x, math.inf))):
        return difference(on_cpu, on_double(overrides, folder)[0])


def difference(left: Path, right: Path) -> str:
    """The first difference of two runs in words, or `equal`."""
    found = first_difference(left, right)
    return "equal" if found is None else found.describe()


def main() -> None:
    folder, cases = Path(sys.argv[1]), [json.loads(text) for text in sys.argv[2:]]
    with device_double():
        pass  # before the first backward pass
    on_cpu = [run(load_config(TINY, [*USUAL, *case]), folder / f"cpu{i}", Silent())[0] for i, case in enumerate(cases)]
    for index, overrides in enumerate(cases):
        elsewhere, warnings = on_double(overrides, folder / f"device{index}")
        print(json.dumps({"said": difference(on_cpu[index], elsewhere), "warnings": warnings}), flush=True)
    for fault in (without_a_move(folder / "staying"), with_another_root(cases[0], on_cpu[0], folder / "root")):
        print(json.dumps({"said": fault}), flush=True)


if __name__ == "__main__":
    main()
