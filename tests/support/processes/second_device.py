"""Runs of several configurations on the CPU and on the double of a device; says of each whether the records are equal.

`python -m tests.support.processes.second_device FOLDER '["a.b=c", ...]' ...`, a process of its own: autograd counts
devices once, at the first backward pass.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest.mock import patch

from ppo_repro.config.files import load_config
from ppo_repro.runs import prepare
from ppo_repro.runs.diff import first_difference
from ppo_repro.watcher import Silent
from tests.support.device_double import device_double
from tests.support.language import run
from tests.support.paths import TINY

# the float64 model beside which accuracy is measured swaps the data of its parameters, which the double cannot
USUAL = (
    *("layout.backend=eager", "numerics.accuracy_sequences=0"),
    *("model.warm_start_steps=2", "ppo.iterations=1"),
)


def main() -> None:
    folder, cases = Path(sys.argv[1]), [json.loads(text) for text in sys.argv[2:]]
    with device_double():
        pass  # before the first backward pass
    for index, overrides in enumerate(cases):
        config = load_config(TINY, [*USUAL, *overrides])
        on_cpu, _ = run(config, folder / f"cpu{index}", Silent())
        with device_double() as device, patch.object(prepare, "device_of", lambda _: device):
            elsewhere, _ = run(config, folder / f"device{index}", Silent())
        difference = first_difference(on_cpu, elsewhere)
        print(f"{index}: {'equal' if difference is None else difference}", flush=True)


if __name__ == "__main__":
    main()
