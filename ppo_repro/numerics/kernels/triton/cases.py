"""Every kernel as it is started, for `instructions`."""

from __future__ import annotations

from typing import Any

from ppo_repro.numerics.kernels.triton import (
    activations,
    attention,
    attention_backward,
    attention_forward,
    attention_tiles,
    gradient,
    norms,
    operands,
    optimizer,
    product,
    token_statistics,
)
from ppo_repro.numerics.kernels.triton.instructions import CAPABILITIES, Case

F32, F64, I8, I32, I64, U8 = "*fp32", "*fp64", "*i8", "*i32", "*i64", "*u8"


def _types(**kinds: str) -> dict[str, str]:
    """Types by argument from names by type."""
    letters = {
        "f32": F32,
        "f64": F64,
        "i8": I8,
        "i32": I32,
        "i64": I64,
        "u8": U8,
        "n": "i32",
        "x": "fp32",
        "long": "i64",
    }
    return {name: letters[kind] for kind, names in kinds.items() for name in names.split()}


def _case(
    name: str,
    function: Any,
    kinds: dict[str, str],
    product: str = "",
    warps: int = 4,
    only: tuple[int, ...] = CAPABILITIES,
    **constants: Any,
) -> Case:
    return Case(name, function, kinds, constants, product, warps, only)


_ROWS = _types(
    f32="x", i8="digits", i32="integers exponents outliers counts", x="room",
    n="row_stride column_stride columns padded rows gap most",
)  # fmt: skip
_PRODUCT = _types(i32="a_exponents b_exponents", f32="bias y", n="a_rows b_rows padded bits")
_INT8, _FLOAT64 = ".s32.s8.s8", ".f64.f64.f64.f64"
_TILES = ((64, (90,)), (32, (80, 100)))  # rows, and the cards that take so many
_WHOLE: dict[str, Any] = {"MASKED": False, "BLOCK": 512}
_NORM: dict[str, Any] = {"R": 2, "BLOCK": 1024}
_COUNTS = "rows length kv_heads keys"
_QUERIES = _types(i32="q q_exponents begin end", f32="k k_scales v_scales", i64="places", n=f"{_COUNTS} key_size dim")
_BACKWARD = _types(
    i32="q q_exponents grad grad_exponents begin end exponents", f32="q_scales k k_scales v v_scales grad_scales tops",
    f64="totals dots", n=_COUNTS,
)  # fmt: skip
_SUMS: dict[str, Any] = {"LONG": False, "CHUNK": attention_tiles.CHUNK, "BD": attention.MOST_COLUMNS}


def _tile(width: int) -> dict[str, Any]:
    return {"WIDTH": width, "BM": attention.BLOCK, "BN": attention.KEYS, "BK": attention.DEPTH}


def _forward(name: str, panel: int, width: int) -> tuple[Case, Case]:
    constants = {"PANEL": panel, **_tile(width)}
    sums = {**_QUERIES, **_types(f32="tops", f64="totals", i32="exponents largest")}
    values = {**_QUERIES, **_types(f32="tops v out", f64="totals", i32="exponents", n="value_size v_row")}
    return (
        _case(f"attention{name}: weights", attention_forward.softmax_sums, sums, _FLOAT64, **constants),
        _case(f"attention{name}: values", attention_forward.weighted_values, values, _FLOAT64, **_SUMS, **constants),
    )


def _backward(name: str, width: int) -> tuple[Case, ...]:
    queries = {**_BACKWARD, **_types(f64="scaling", f32="dq", n="dim")}
    keys = {**_BACKWARD, **_types(f32="right gradient", n="dim")}
    return (
        _case(f"attention{name}: dq, grids", attention_backward.query_grids, _BACKWARD, _FLOAT64, **_tile(width)),
        _case(f"attention{name}: dq", attention_backward.query_gradients, queries, _FLOAT64, **_SUMS, **_tile(width)),
        *(_case(f"attention{name}: {result}, grids", attention_backward.key_grids, _BACKWARD, _FLOAT64, KIND=kind,
                **_tile(width)) for kind, result in ((1, "dk"), (2, "dv"))),
        *(_case(f"attention{name}: {result}", attention_backward.key_gradients, keys, _FLOAT64, KIND=kind, **_SUMS,
                **_tile(width)) for kind, result in ((1, "dk"), (2, "dv"))),
    )  # fmt: skip


_ATTENTION: tuple[Case, ...] = (
    *(_case(f"attention: {name}", attention_tiles.put_rows,
            _types(f32="x narrow scales", i32="exponents wide", n="rows dim"),
            AS_LEFT=left, AS_RIGHT=not left, R=32, WIDTH=64)
      for name, left in (("queries", True), ("keys", False))),
    *_forward("", 0, 64),
    *_forward(", 128", 0, 128),
    *_forward(", cache", 32, 64),
    _case("attention: deltas", attention_tiles.row_dots, _types(f32="grad out", f64="dots", n="rows dim"),
          R=32, WIDTH=64),
    *_backward("", 64),
)  # fmt: skip

CASES: tuple[Case, ...] = (
    *_ATTENTION,
    _case("operands: inputs", operands.put_on_grid, _ROWS, BITS=26, DIGITS=4, AS_DIGITS=True, R=2, BLOCK=1024),
    _case("operands: weights", operands.put_on_grid, _ROWS, BITS=23, DIGITS=3, AS_DIGITS=True, R=2, BLOCK=1024),
    _case("operands: long rows", operands.put_on_grid, _ROWS, BITS=26, DIGITS=4, AS_DIGITS=False, R=2, BLOCK=1024),
    *(_case(f"product: {rows} rows", product.product, {**_types(i8="a b"), **_PRODUCT}, _INT8, 8, only,
            AS_DIGITS=True, HAS_BIAS=True, BM=rows, BN=64, BK=64) for rows, only in _TILES),
    _case(
        "product: 16 rows", product.product, {**_types(i8="a b"), **_PRODUCT}, _INT8,
        AS_DIGITS=True, HAS_BIAS=False, BM=16, BN=64, BK=64,
    ),
    _case(
        "product: float64", product.product, {**_types(i32="a b"), **_PRODUCT}, _FLOAT64,
        AS_DIGITS=False, HAS_BIAS=True, BM=32, BN=32, BK=16,
    ),
    _case(
        "product: outliers", product.add_outliers,
        _types(
            f32="x w y", i32="x_exponents x_outliers w_outliers x_counts w_counts",
            n="x_row x_column w_row w_column x_width w_width most_x most_w x_rows w_rows",
        ),
        BM=32, BN=32,
    ),
    _case("gradient: digits", gradient.put_columns, _types(f32="x", f64="up", i8="digits", n="tokens columns padded"),
          DIGITS=4, BT=32, BC=32),
    *(_case(f"gradient: sums of {rows} rows", gradient.add_gradient,
            _types(i8="grad x", i64="out", n="n_rows k_rows padded"), _INT8, 8, only,
            FRESH=False, BM=rows, BN=64, BK=64) for rows, only in _TILES),
    _case("gradient: exponents", gradient.largest_exponents, _types(f32="x", i64="exponents", n="rows columns"),
          R=2, BLOCK=1024),
    _case("RMS norm", norms.rms_norm,
          _types(f32="x factor y", f64="inverse eps size", i32="exponents", n="rows columns"), **_NORM),
    *(_case(f"gradient: {name}", gradient.add_rows,
            _types(**{kind: "x"}, i64="exponents ids out", n="rows columns limit shift"), BY_ID=by_id, BT=32, BC=64)
      for name, kind, by_id in (("rows", "f64", False), ("rows by id", "f32", True))),
    _case("gradient: norm", gradient.add_squares, _types(f32="x", i64="sums", n="count shift"), BLOCK=1024),
    *(_case(f"{name}, backward", norms.norm_backward,
            _types(f32="grad x factor dx", f64="means inverse size", i32="exponents", n="rows columns mean_bits"),
            CENTRED=centred, **_NORM) for name, centred in (("RMS norm", False), ("layer norm", True))),
    _case("layer norm", norms.layer_norm,
          _types(f32="x weight bias y", f64="means inverse eps size", i32="exponents", n="rows columns mean_bits"),
          **_NORM),
    _case("SiLU", activations.silu, _types(f32="x y", n="count"), BLOCK=1024),
    _case("SiLU, backward", activations.silu_backward, _types(f32="grad x dx", n="count"), BLOCK=1024),
    *(_case(f"gate: {kind.__name__}", activations.gated, _types(f32="x y", n="count"), KIND=number, BLOCK=1024)
      for kind, number in activations.KINDS.items()),
    *(_case(f"gate, backward: {kind.__name__}", activations.gated_backward, _types(f32="grad x dx", n="count"),
            KIND=number, BLOCK=1024) for kind, number in activations.KINDS.items()),
    _case("log-probs", token_statistics.statistics,
          _types(f32="scaled eligible logprobs entropies tops", i64="targets", i32="finite",
                 f64="totals log_totals wide_entropies", n="size bits"), **_WHOLE),
    _case("log-probs, backward", token_statistics.statistics_backward,
          _types(f32="scaled eligible tops d_logprobs d_entropies gradient", i64="targets",
                 f64="totals log_totals wide_entropies", n="size"), **_WHOLE),
    _case("sampler", token_statistics.sample,
          _types(f32="scaled", i64="seeds positions tokens", i32="finite", n="size"), BLOCK=512),
    _case("AdamW", optimizer.adamw,
          _types(f32="parameter gradient first second", n="count",
                 x="clip beta1 rest1 beta2 rest2 second_scale eps decay step_size"), BLOCK=1024),
)  # fmt: skip
