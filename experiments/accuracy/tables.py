"""The tables of the experiment: one row for each kind of model, a mean over random models where there are several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ppo_repro.accuracy.distances import Comparison, Error, Errors, GradientComparison, typical

Row = dict[str, str | int | float]


@dataclass(frozen=True)
class Subject:
    """What was measured on the models of one kind; no gradients where they were left out."""

    model: str
    case: str
    comparisons: Sequence[Comparison]
    gradients: Sequence[GradientComparison]

    def row(self) -> Row:
        return {"model": self.model, "case": self.case}


def _means(name: str, found: Sequence[Error]) -> Row:
    """The largest error of all models, and means over models of the others."""
    return {
        f"{name} max": max(e.largest for e in found),
        f"{name} rms": sum(e.rms for e in found) / len(found),
        f"{name} mean": sum(e.mean for e in found) / len(found),
    }


def _sides(found: Sequence[Errors]) -> Row:
    row = _means("deterministic", [e.deterministic for e in found]) | _means("stock", [e.stock for e in found])
    for name, kind in (("max", "largest"), ("rms", "rms"), ("mean", "mean")):
        row[f"ratio {name}"] = typical([e.ratio(kind) for e in found])
    return row


def logprobs(subject: Subject) -> Row:
    """Errors of the tokens' log-probs, nats."""
    half = [c.bfloat16 for c in subject.comparisons if c.bfloat16 is not None]
    return subject.row() | _sides([c.logprobs for c in subject.comparisons]) | _means("bfloat16", half)


def logits(subject: Subject) -> Row:
    """Errors of the logits."""
    return subject.row() | _sides([c.logits for c in subject.comparisons])


def greedy(subject: Subject) -> Row:
    """How many best tokens are not those of float64; `wrong`: those where float32 does resolve the two best logits."""
    found = [c.greedy for c in subject.comparisons]
    return subject.row() | {
        "tokens": sum(g.tokens for g in found),
        "deterministic differs": sum(g.deterministic_differs for g in found),
        "stock differs": sum(g.stock_differs for g in found),
        "unresolved": sum(g.unresolved for g in found),
        "deterministic wrong": sum(g.wrong for g in found),
    }


def gradients(subject: Subject) -> Row:
    """max |g - g64| / max |g64| of the worst parameter of all models, and its name."""
    worst: Row = {}
    for side in ("deterministic", "stock"):
        errors = {n: max(getattr(g, side)[n] for g in subject.gradients) for n in getattr(subject.gradients[0], side)}
        name = max(errors, key=errors.__getitem__)
        worst |= {f"{side} worst": errors[name], f"{side} worst parameter": name}
        worst[f"{side} median"] = float(pd.Series(errors).median())
    return subject.row() | worst | {"ratio": typical([g.ratio() for g in subject.gradients])}


def parameters(subject: Subject) -> list[Row]:
    """The gradient errors of each parameter, the largest of all models."""
    names = subject.gradients[0].deterministic
    return [
        subject.row()
        | {"parameter": n}
        | {side: max(getattr(g, side)[n] for g in subject.gradients) for side in ("deterministic", "stock")}
        for n in names
    ]


def summary(tables: dict[str, pd.DataFrame]) -> pd.DataFrame:
    """Of each case: the smallest and largest deterministic / stock of any model, and best tokens that are wrong."""
    chosen = {"log-probs rms": ("logprobs", "ratio rms"), "log-probs max": ("logprobs", "ratio max")}
    chosen |= {"logits rms": ("logits", "ratio rms"), "gradients": ("gradients", "ratio")}
    columns: dict[str, pd.Series] = {}
    for name, (table, column) in chosen.items():
        if table in tables:
            ranges = tables[table].groupby("case", sort=False)[column].agg(["min", "max"])
            columns[name] = ranges.apply(lambda r: f"{_cell(r['min'])} to {_cell(r['max'])}", axis=1)
    counts = tables["greedy"].groupby("case", sort=False)[["deterministic wrong", "tokens"]].sum()
    columns["best token wrong"] = counts.apply(lambda r: f"{r['deterministic wrong']} of {r['tokens']}", axis=1)
    return pd.DataFrame(columns).reset_index()


def tables_of(subjects: Sequence[Subject]) -> dict[str, pd.DataFrame]:
    """Every table by its name; those of gradients only where some were computed."""
    tables = {
        "logprobs": [logprobs(s) for s in subjects],
        "logits": [logits(s) for s in subjects],
        "greedy": [greedy(s) for s in subjects],
    }
    trained = [s for s in subjects if s.gradients]
    if trained:
        tables["gradients"] = [gradients(s) for s in trained]
        tables["parameters"] = [row for s in trained for row in parameters(s)]
    frames = {name: pd.DataFrame(rows) for name, rows in tables.items()}
    return frames | {"summary": summary(frames)}


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if 0.01 <= value < 1000 else f"{value:.1e}"


def markdown(table: pd.DataFrame) -> str:
    """A table in Markdown, three digits of each number."""
    lines = [list(table.columns), ["---"] * len(table.columns)]
    lines += [[_cell(value) for value in row] for row in table.itertuples(index=False)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def show(tables: dict[str, pd.DataFrame]) -> None:
    """Print one table of each kind; gradients parameter by parameter are only written."""
    for name, table in tables.items():
        if name != "parameters":
            print(f"\n{name}\n\n{markdown(table)}")


def write(tables: dict[str, pd.DataFrame], folder: Path) -> None:
    """Every table as a Parquet file in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        table.to_parquet(folder / f"{name}.parquet", index=False)
