"""`make test-gpu`: what deterministic numerics promise of an NVIDIA GPU, then how fast the GPU is.

    python -m tests.gpu.device_check [--out FOLDER] [--seconds N] [STEP ..]

The steps stand in the order of their worth and are sized for half a minute each. Each step prints a line, and
OUT/device_check.json has its results as soon as it is over; a step that fails does not end the others. A step that
compares has a number `differ`, which is to be 0. No compiler and no network are needed: the libraries and the PTX that
an installation built lie beside their sources. With `--stand-in LIBRARY` an emulated GPU computes small sizes: the way
in which the steps themselves are tested.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.gpu import bits, speed
from tests.gpu.check import Check, Results

STEPS = {
    step.__name__: step
    for step in (
        bits.card,
        bits.kernels,
        bits.quickstart,
        bits.runs_go_on,
        speed.large,
        speed.iteration,
        bits.library_calls,
        bits.loops,
        bits.recipes,
        bits.dpo,
        bits.families,
        speed.training,
        speed.scoring,
        speed.sampling,
        speed.products,
        bits.native,
    )
}
NOT_EMULATED = ("quickstart",)  # hours
STEP_SECONDS = 90.0  # a step of a GPU that takes more is ended


def _out_of_time(*_: object) -> None:
    raise TimeoutError("no time was left")


def main() -> int:
    """Run the steps; exit 1 if one failed or found a difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of {', '.join(STEPS)}; all by default")
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--seconds", type=float, default=600.0, help="of all steps together")
    parser.add_argument("--stand-in", type=Path)
    options = parser.parse_args()
    if unknown := sorted(set(options.steps) - STEPS.keys()):
        parser.error(f"there is no step {unknown[0]}")
    options.out.mkdir(parents=True, exist_ok=True)
    begin, wrong, results = time.perf_counter(), 0, dict[str, Results]()
    signal.signal(signal.SIGALRM, _out_of_time)
    with tempfile.TemporaryDirectory() as folder:
        check = Check(options.stand_in, Path(folder))
        steps = options.steps or [name for name in STEPS if not check.emulated or name not in NOT_EMULATED]
        for name in steps:
            started = time.perf_counter()
            left = begin + options.seconds - started
            limit = left if check.emulated else min(left, STEP_SECONDS)
            signal.setitimer(signal.ITIMER_REAL, max(0.01, limit))
            try:
                results[name] = STEPS[name](check)
            except Exception as error:  # the others still run: a GPU is rare
                results[name] = {"failed": f"{type(error).__name__}: {error}", "at": traceback.format_exc()[-3000:]}
            signal.setitimer(signal.ITIMER_REAL, 0)
            check.free()
            results[name]["seconds"] = time.perf_counter() - started
            wrong += "failed" in results[name] or results[name].get("differ", 0) > 0
            (options.out / "device_check.json").write_text(json.dumps(results, indent=1))
            print(f"{name}: {json.dumps(results[name])[:1500]}", flush=True)
    print(f"{len(results)} steps in {time.perf_counter() - begin:.0f} s, {wrong} wrong", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
