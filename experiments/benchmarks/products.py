"""How fast are matrix products alone: `python -m experiments.benchmarks.products`, beside torch's float32.

Rates are of one thread, in GMAC/s, medians over rounds in which all take turns. Operands are on their grids before;
putting the inputs there is a column of its own, in numbers a nanosecond.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from experiments.benchmarks.timing import cost_of
from ppo_repro.numerics import backend
from ppo_repro.numerics.kernels.amx import operands as amx_operands
from ppo_repro.numerics.kernels.amx import product as amx_product
from ppo_repro.numerics.kernels.float64 import digits, inputs, operands, product
from ppo_repro.seeding import bell

SHAPES = (  # rows, terms, columns
    (640, 128, 512),
    (640, 512, 128),
    (640, 896, 4864),
    (640, 4864, 896),
    (32, 896, 4864),
)
NO_BIAS = np.empty(0, np.float32)
INPUT_UP, GRADIENT_UP = 2.0**18, 2.0**22
SECONDS = 0.05  # that one measurement takes at least


@dataclass(frozen=True)
class Product:
    """One column of the table."""

    name: str
    compute: Callable[[], object]
    work: int  # multiply-accumulates, or numbers put on a grid
    result: np.ndarray | None = None  # what a product is written to


def numbers(rows: int, columns: int, name: str) -> np.ndarray:
    """Float32 numbers of about a normal distribution, the same at every call."""
    return bell(rows * columns, name).astype(np.float32).reshape(rows, columns)


def by_float64(x: np.ndarray, weight: np.ndarray, in_digits: bool) -> list[Product]:
    """Product and gradient, in float64 or by 16-bit digits."""
    (rows, terms), columns = x.shape, len(weight)
    packed, on_grid = operands.pack_weight(weight), inputs.quantised(x, in_digits)
    y, sums = np.empty((rows, columns), np.float32), np.empty(weight.shape, np.int64)
    grad, up = numbers(rows, columns, "gradient"), np.full(rows, GRADIENT_UP)
    tokens = product.packed_inputs(x, np.full(rows, INPUT_UP), in_digits)
    name, work = "digits" if in_digits else "float64", rows * terms * columns
    return [
        Product(name, lambda: product.contract(on_grid, packed, weight, NO_BIAS, y), work, y),
        Product(f"{name}, gradient", lambda: product.accumulate(grad, up, tokens, sums, True), work, sums),
        Product(f"{name}, inputs", lambda: inputs.quantised(x, in_digits), rows * terms),
    ]


def by_amx(x: np.ndarray, weight: np.ndarray) -> list[Product]:
    """The product by 8-bit digits in tiles."""
    (rows, terms), columns = x.shape, len(weight)
    packed, y = amx_operands.pack(weight, along_rows=True), np.empty((rows, columns), np.float32)
    on_grid = amx_operands.quantise_rows(x)
    return [
        Product("AMX", lambda: amx_product.contract(on_grid, packed, NO_BIAS, y), rows * terms * columns, y),
        Product("AMX, inputs", lambda: amx_operands.quantise_rows(x), rows * terms),
    ]


def products(rows: int, terms: int, columns: int) -> list[Product]:
    """All that this machine computes of one shape, torch's first."""
    x, weight = numbers(rows, terms, "inputs"), numbers(columns, terms, "weight") * np.float32(0.05)
    stock_x, stock_weight = torch.from_numpy(x), torch.from_numpy(weight)
    stock = Product("torch", lambda: torch.nn.functional.linear(stock_x, stock_weight), rows * terms * columns)
    found = [stock, *by_float64(x, weight, False)]
    if digits.IN_USE:
        found += by_float64(x, weight, True)
    if backend.has_amx():
        found += by_amx(x, weight)
    return found


def rate(item: Product) -> float:
    """Work a nanosecond, of as many calls as take SECONDS."""
    calls, seconds = 0, 0.0
    while seconds < SECONDS:
        seconds += cost_of(item.compute).wall
        calls += 1
    return item.work * calls / seconds * 1e-9


def main(given: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="matrix products alone, exact beside torch")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds (default 7)")
    rounds = parser.parse_args(given).rounds
    backend.use("amx" if backend.has_amx() else "float64", 1)
    torch.set_num_threads(1)
    for number, shape in enumerate(SHAPES):
        items = products(*shape)
        if number == 0:
            print("one thread; GMAC/s, and for inputs numbers a nanosecond")
            print(f"| rows, terms, columns | {' | '.join(item.name for item in items)} |")
            print("|---" * (len(items) + 1) + "|")
        for item in items:
            item.compute()
        rates = [[rate(item) for item in items] for _ in range(rounds)]
        medians = [f"{median(column):.2f}" for column in zip(*rates, strict=True)]
        print(f"| {' x '.join(map(str, shape))} | {' | '.join(medians)} |", flush=True)


if __name__ == "__main__":
    main()
