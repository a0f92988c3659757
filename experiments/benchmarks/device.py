"""Does another device give the same bits, and how fast? The eager code and Triton's kernels on it beside the CPU.

`python -m experiments.benchmarks.device [--device cuda] [--seconds N] [--json FILE]` compares and measures, the most
important first: elementary functions, the cases by which backends prove themselves, optimizer steps of a model, with
LoRA and in micro-batches, speed beside stock torch, the fingerprint of a run, a million tokens decoded and in one pass,
the other families. Without time left, stages are left out and said to be; the file is written after every row.

It needs torch, transformers and NumPy. Without Triton its kernels are left out, without Numba a stand-in is taken, and
without the packages of a run the fingerprint is left out. Exit status 0 where all was compared and is equal, 1 where an
exact digest differs or a stage failed, 2 where nothing can be compared, 3 where something was left out. `--small` is
for Triton's interpreter on a CPU. It was never run on a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experiments.benchmarks.device_stages import Report

NEEDED = ("torch", "transformers", "numpy")
GRACE = 20.0  # seconds for the stage in progress when time is up


def _give_up(report: Report) -> None:
    """End the process in the middle of a stage."""
    report.leave_out(report.stage, "not finished in time; the stages after it were not begun")
    os._exit(1 if report.failed else 3)


def _verdict(report: Report) -> int:
    if report.failed:
        print("exact numerics: NOT the same bits")
        return 1
    if report.left_out:
        print(f"exact numerics: the same bits in what was compared; {len(report.left_out)} stage(s) left out")
        return 3
    print("exact numerics: the same bits")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="exact numerics on the CPU and on a device: bits, then seconds")
    parser.add_argument("--device", default="cuda", help="torch device to compare with the CPU (default cuda)")
    parser.add_argument("--seconds", type=float, default=480.0, help="when no stage is begun any more (default 480)")
    parser.add_argument("--small", action="store_true", help="tiny shapes, for Triton's interpreter on a CPU")
    parser.add_argument("--json", type=Path, help="write everything to this file as well")
    arguments = parser.parse_args()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"error: {', '.join(missing)} not installed; pip install {' '.join(missing)}", file=sys.stderr)
        return 2
    import torch

    name = arguments.device
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        print(f"error: --device {name}: not available ({str(error).splitlines()[0]})", file=sys.stderr)
        return 2
    from experiments.benchmarks.without_numba import stand_in

    if stand_in():
        print("Numba is not installed: a stand-in is taken, kernels for CPUs are not needed here", file=sys.stderr)
    from experiments.benchmarks import device_speed, device_stages
    from experiments.benchmarks.device_bits import SMALL, WHOLE
    from ppo_repro.numerics.device import device_of

    device_of(device.type)  # keeps float32 from TF32
    kernels = device_stages.kernels_for(device)
    report = device_stages.make_report(device, kernels, arguments.json, arguments.seconds)
    if device.type == "cuda" and "triton" not in kernels:
        report.leave_out("Triton's kernels", "Triton is not installed")
    watchdog = threading.Timer(arguments.seconds + GRACE, _give_up, (report,))
    watchdog.daemon = True
    watchdog.start()
    device_stages.run(report, SMALL if arguments.small else WHOLE, device, kernels)
    watchdog.cancel()
    if report.speeds:
        print(f"\n{device_speed.table(report.speeds)}\n")
    return _verdict(report)


if __name__ == "__main__":
    sys.exit(main())
