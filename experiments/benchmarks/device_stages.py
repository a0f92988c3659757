"""The stages of `device`, the most important first, and the report that grows with each."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from experiments.benchmarks import device_speed
from experiments.benchmarks.device_bits import Compute, Work, elementary, parity, proven, trained
from ppo_repro.numerics import backend

# what `ppo-repro run` needs beside what the rest of this needs
OF_RUNS = ("numba", "pydantic", "yaml", "pyarrow", "pandas", "rich")
SHARE_OF_PARITY = 0.2  # of the time that is left, for each backend
Stage = tuple[str, Callable[[], None]]


@dataclass
class Report:
    """What was found so far. A difference in what is promised is a failure; the file is written after every row."""

    about: dict[str, str]
    columns: list[str]
    path: Path | None
    deadline: float  # on the clock of time.perf_counter
    digests: dict[str, list[str]] = field(default_factory=dict)
    speeds: list[device_speed.Speed] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    failed: bool = False
    stage: str = ""  # in progress

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.perf_counter()

    def header(self) -> None:
        print(f"{'stage':<46}{''.join(f'{c:<20}' for c in self.columns)}", flush=True)

    def compare(self, name: str, found: list[str], promised: bool = True) -> None:
        """Say whether all are equal."""
        equal = len(set(found)) == 1
        self.failed |= promised and not equal
        self.digests[name] = found
        verdict = "equal" if equal else "DIFFERENT" if promised else "different, as may be"
        print(
            f"{name:<46}{''.join(f'{d[:18]:<20}' for d in found)}{verdict:<22}{self.seconds_left:.0f} s left",
            flush=True,
        )
        self.save()

    def timed(self, row: device_speed.Speed) -> None:
        self.speeds.append(row)
        print(f"{row.work}, {row.numerics}: {row.seconds:.4f} s", flush=True)
        self.save()

    def leave_out(self, name: str, why: str) -> None:
        self.left_out[name] = why
        print(f"{name}: left out ({why})", flush=True)
        self.save()

    def save(self) -> None:
        """Write the file anew, in one step."""
        if self.path is None:
            return
        value: dict[str, Any] = {**self.about, "columns": self.columns, "digests": self.digests}
        value |= {"equal": not self.failed, "left_out": self.left_out, "seconds": [asdict(row) for row in self.speeds]}
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(value, indent=1))
        partial.replace(self.path)


def kernels_for(device: torch.device) -> list[str]:
    """What computes exact numerics on a device: the eager code, and Triton's kernels where they run."""
    if not backend.has_triton_installed():
        return ["eager"]
    from ppo_repro.numerics.kernels.triton.launch import runs_on

    return ["eager", "triton"] if runs_on(torch.empty(0, device=device)) else ["eager"]


def make_report(device: torch.device, kernels: list[str], path: Path | None, seconds: float) -> Report:
    """An empty one."""
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    about = {"device": card, "torch": torch.__version__}
    about["triton"] = metadata.version("triton") if "triton" in kernels else "none"
    columns = ["cpu eager", *(f"{device.type} {name}" for name in kernels)]
    return Report(about, columns, path, time.perf_counter() + seconds)


def fingerprint(iterations: int, seconds: float, *layout: str) -> str:
    """The fingerprint of the first iterations of the quickstart with a layout; why there is none where it fails."""
    sets = [f"ppo.iterations={iterations}", "model.warm_start_steps=50", "numerics.accuracy_sequences=0", *layout]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ppo_repro", "run", "experiments/quickstart.yaml", "--out", folder, "--json"]
        command += [part for name in sets for part in ("--set", name)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=max(1.0, seconds))
        except subprocess.TimeoutExpired:
            return f"not finished in {seconds:.0f} s"
    if done.returncode:
        return f"failed: {done.stderr.splitlines()[-1] if done.stderr else done.returncode}"
    return str(json.loads(done.stdout)["fingerprint"])


def _on_each(compute: Compute, device: torch.device, kernels: list[str]) -> list[dict[str, str]]:
    """On the CPU by the eager code, then on the device by each of the kernels."""
    found = []
    for place, name in ((torch.device("cpu"), "eager"), *((device, name) for name in kernels)):
        backend.use(name, 1)
        try:
            found.append(compute(place))
        finally:
            backend.use("eager", 1)
    return found


def _bits(
    report: Report, device: torch.device, kernels: list[str], prefix: str, compute: Compute, promised: bool
) -> None:
    found = _on_each(compute, device, kernels)
    for name in found[0]:
        report.compare(f"{prefix}{name}", [f[name] for f in found], promised and name != "torch.exp")


def _micro_batches(report: Report, work: Work, device: torch.device, kernels: list[str], family: str) -> None:
    """Weights in micro-batches on the device, beside those of whole minibatches on the CPU."""
    whole = trained(family, work, torch.device("cpu"))
    found = _on_each(lambda place: trained(family, work, place, parts=3), device, kernels)
    for name in found[0]:
        report.compare(f"{family}, micro-batches: {name}", [whole[name], *(f[name] for f in found[1:])])


def _parity(report: Report, work: Work, device: torch.device, kernels: list[str], family: str) -> None:
    for name in reversed(kernels):
        backend.use(name, 1)
        try:
            until = time.perf_counter() + SHARE_OF_PARITY * report.seconds_left
            unequal, tokens = parity(family, work, device, until)
        finally:
            backend.use("eager", 1)
        row = ["0" if column == f"{device.type} {name}" else "-" for column in report.columns]
        row = [str(unequal) if cell == "0" else cell for cell in row]
        said = f"{tokens} tokens, decoded and in one pass, {name}: unequal"
        report.failed |= unequal > 0
        report.digests[said] = row
        print(f"{said:<66}{unequal}", flush=True)
        report.save()


def _quickstart(report: Report, work: Work, device: torch.device, kernels: list[str]) -> None:
    name = "quickstart, first iterations"
    missing = [package for package in OF_RUNS if importlib.util.find_spec(package) is None]
    if missing:
        report.leave_out(name, f"{', '.join(missing)} not installed")
        return
    layouts = [("layout.device=cpu",), *((f"layout.device={device.type}", f"layout.backend={k}") for k in kernels)]
    share = 0.4 * report.seconds_left / len(layouts)
    report.compare(name, [fingerprint(work.iterations, share, *layout) for layout in layouts])


def stages(report: Report, work: Work, device: torch.device, kernels: list[str], with_speed: bool) -> Iterator[Stage]:
    """Everything there is to do, the most important first."""

    def bits(prefix: str, compute: Compute, promised: bool = True) -> Callable[[], None]:
        return lambda: _bits(report, device, kernels, prefix, compute, promised)

    def speed(numerics: str) -> Callable[[], None]:
        def measure() -> None:
            for row in device_speed.speeds(work.speed, device, numerics):
                report.timed(row)

        return measure

    first = work.families[0]
    yield "elementary functions", bits("", lambda place: elementary(work, place))
    for case in work.proofs:
        yield f"proof: {case}", bits("", lambda place, case=case: proven(case, place))  # type: ignore[misc]
    yield first, bits(f"{first}: ", lambda place: trained(first, work, place))
    yield "LoRA", bits(f"{first}, LoRA: ", lambda place: trained(first, work, place, rank=2))
    yield "micro-batches", lambda: _micro_batches(report, work, device, kernels, first)
    if with_speed:
        for numerics in (kernels[-1], "float32", "bfloat16"):
            yield f"speed, {numerics}", speed(numerics)
    if work.iterations:
        yield "quickstart, first iterations", lambda: _quickstart(report, work, device, kernels)
    yield "tokens decoded and in one pass", lambda: _parity(report, work, device, kernels, first)
    for family in work.families[1:]:
        yield family, bits(f"{family}: ", lambda place, family=family: trained(family, work, place))  # type: ignore[misc]
    yield "native numerics", bits(f"{first}, native: ", lambda place: trained(first, work, place, "native"), False)
    if with_speed and kernels[-1] != "eager":
        yield "speed, eager", speed("eager")


def run(report: Report, work: Work, device: torch.device, kernels: list[str]) -> None:
    """Every stage for which time is left."""
    report.header()
    report.save()
    with_speed = device.type == "cuda" or work.iterations == 0
    for name, stage in stages(report, work, device, kernels, with_speed):
        report.stage = name
        if report.seconds_left <= 0:
            report.leave_out(name, "no time was left")
            continue
        try:
            stage()
        except Exception as error:  # the others say more; this one is no agreement
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            report.failed = True
            report.leave_out(name, f"failed: {said}")
