"""The table of `ppo-repro bisect`: where two paths through one model differ."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppo_repro.errors import UserError
from ppo_repro.files import atomic_write
from ppo_repro.records import arrow
from ppo_repro.records.schema import Column, Table

_EXPLAINED = (
    "Share of mean |delta| of the log-probs that goes away when the training forward is given the decoded output of "
    "this operation; null where no log-prob differs, and before the head in deterministic numerics."
)
OPS = Table(
    "mismatch_op",
    "one row per operation of the policy and mode, in the order of execution",
    ("mode", "order"),
    (
        Column("mode", "string", "", "Numerics: deterministic or native."),
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


def write(folder: Path, columns: Mapping[str, Any]) -> None:
    """Write the table into `folder`, atomically; ValueError on columns that do not belong there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made ({error.strerror}); choose another --out") from error
    atomic_write(folder / f"{OPS.name}.parquet", arrow.to_parquet(arrow.to_arrow(OPS, columns)))
