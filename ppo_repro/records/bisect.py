"""The tables of `ppo-repro bisect`: where two paths through one model differ, and what each condition changes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppo_repro.errors import UserError
from ppo_repro.files import atomic_write
from ppo_repro.records import arrow
from ppo_repro.records.schema import Column, Table

_MODE = Column("mode", "string", "", "Numerics: deterministic or native.")
_EXPLAINED = (
    "Share of mean |delta| of the log-probs that goes away when the training forward is given the decoded output of "
    "this operation; null where no log-prob differs, and before the head in deterministic numerics."
)
OPS = Table(
    "mismatch_op",
    "one row per operation of the policy and mode, in the order of execution",
    ("mode", "order"),
    (
        _MODE,
        Column("order", "int32", "index", "Position in the order of execution, from 0."),
        Column("layer", "int32", "index", "Decoder layer, -1 outside of them."),
        Column(
            "op",
            "string",
            "",
            "Native: module within the layer. Deterministic: embeddings, layer, last_norm, head. Then log_probs.",
        ),
        Column("tokens", "int32", "tokens", "Positions compared."),
        Column("max_abs", "float64", "", "Largest |cached decode - training forward| of its output."),
        Column("mean_abs", "float64", "", "Mean of the same."),
        Column("rel_l2", "float64", "", "Norm of the difference over the norm of the training forward's output."),
        Column("cos", "float64", "", "Cosine of the two outputs."),
        Column("ulp_p99", "float64", "ulp", "99th percentile of the distance in float32 units in the last place."),
        Column("frac_bitwise_equal", "float64", "", "Share of the output's numbers with the same bits."),
        Column("inputs_equal", "bool", "", "Both paths gave the operation the same bits."),
        Column("outputs_equal", "bool", "", "The operation gave the same bits."),
        Column("amplification", "float64", "", "rel_l2 of output over input; null for equal inputs.", nullable=True),
        Column("explained", "float64", "", _EXPLAINED, nullable=True),
    ),
)
LADDER = Table(
    "mismatch_ladder",
    "one row per condition, way of changing it and mode",
    ("mode", "way", "toggle"),
    (
        _MODE,
        Column("way", "string", "", "one: the condition alone is changed; but_one: all others are."),
        Column("toggle", "string", "", "The condition; `all` where every one is changed."),
        Column("tokens", "int32", "tokens", "Response tokens compared with the plain training forward."),
        Column("frac_unequal", "float64", "", "Share whose log-prob differs in any bit."),
        Column("mean_abs", "float64", "nats", "Mean |delta|, token mean."),
        Column("max_abs", "float64", "nats", "Largest |delta|."),
        Column("k3", "float64", "nats", "expm1(delta) - delta, token mean: KL(plain || changed)."),
        Column("change", "float64", "nats", "What the condition adds to mean_abs: alone, or to all others."),
    ),
)
TABLES = (OPS, LADDER)


def write(folder: Path, columns: Mapping[str, Mapping[str, Any]]) -> None:
    """Write both tables into `folder`, each atomically; ValueError on columns that do not belong there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made ({error.strerror}); choose another --out") from error
    for table in TABLES:
        data = arrow.to_arrow(table, columns[table.name])
        atomic_write(folder / f"{table.name}.parquet", arrow.to_parquet(data))
