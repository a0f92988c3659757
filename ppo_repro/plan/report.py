"""A memory plan as a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ppo_repro.plan.memory import PROCESS, Plan


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan in bytes, with totals."""
    return {
        "models": [{**asdict(r), "total": r.total, "mixed_precision": r.mixed_precision} for r in plan.residents],
        "phases": plan.phases,
        "resident": plan.resident,
        "certain": plan.certain,
        "process": PROCESS,
        "peak": plan.peak,
        "mixed_precision": sum(r.mixed_precision for r in plan.residents),
        "processes": plan.work.processes,
    }


def size(count: int) -> str:
    """A number of bytes in decimal units."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} B"


def lines(plan: Plan) -> list[str]:
    """The plan as a table."""
    models, work = plan.residents, plan.work
    rows: list[tuple[str, list[int]]] = [
        ("weights", [r.weights for r in models]),
        ("AdamW moments, float32", [r.moments for r in models]),
        ("resident", [r.total for r in models]),
        ("in the update: integer sums", [r.gradient_sums for r in models]),
        ("in the update: gradients, float32", [r.gradients for r in models]),
        (f"at work: operands ({work.kernels})", [r.operands for r in models]),
        ("mixed-precision Adam on a GPU", [r.mixed_precision for r in models]),
    ]
    out = [_line("", [*(r.name for r in models), "together"])]
    trained, frozen = ([getattr(r, f"{kind}_parameters") for r in models] for kind in ("trained", "frozen"))
    for label, counts in (("parameters trained", trained), ("parameters frozen", frozen)):
        out.append(_line(label, [f"{n:,}" for n in (*counts, sum(counts))]))
    out += [_line(label, [size(n) for n in (*counts, sum(counts))]) for label, counts in rows if any(counts)]
    out.append("")
    for phase, amounts in plan.phases.items():
        purposes = ", ".join(f"{name} {size(count)}" for name, count in amounts.items() if count)
        out.append(f"{phase + ', up to about':<34}{size(sum(amounts.values())):>16}  {purposes}")
    out.append(f"{'process, about':<34}{size(PROCESS):>16}  interpreter, torch, compiled kernels")
    out.append(f"{'peak, up to about':<34}{size(plan.peak):>16}  process, resident, the largest of these")
    if work.processes > 1:
        out.append(f"All of this is of each of the {work.processes} processes, the one with the largest share.")
    out.append(
        "Mixed-precision Adam: 16 bytes per trained parameter, 2 per frozen one; activations and caches come on top."
    )
    return out


def _line(label: str, cells: list[str]) -> str:
    return f"{label:<34}" + "".join(f"{cell:>16}" for cell in cells)
