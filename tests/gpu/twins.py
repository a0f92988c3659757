"""The functions of `c/interface.h` computed twice, by the CPU's kernels and by a GPU's: every bit must be equal.

A case is a function of one side, with made-up numbers, and gives what that side computed; `differences` calls it for
both sides.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ppo_repro.base.processes import SLOTS
from ppo_repro.numerics.interface import constants, ffi
from ppo_repro.numerics.matrices import PRECISIONS
from ppo_repro.numerics.sequences import slots_of

LEVELS = 3
F = np.float32

Results = dict[str, np.ndarray]
Case = Callable[["Side"], Results]


class Array:
    """Memory of a side, by address, as a pointer of its type."""

    def __init__(self, address: int, like: np.ndarray) -> None:
        self.address, self.shape, self.dtype, self.nbytes = address, like.shape, like.dtype, like.nbytes
        names = {"f4": "float *", "f8": "double *", "i4": "int *", "i8": "int64_t *", "u1": "uint8_t *"}
        self.pointer = ffi.cast(names.get(like.dtype.str[1:], "Softmax *"), address)


SOFTMAX = np.dtype([(name, np.float64) for name in ("top", "total", "log_total", "mean")])


def pointers(value: Any) -> Any:
    """Return members of a struct with pointers in place of arrays, and NULL in place of None."""
    if isinstance(value, Mapping):
        return {name: pointers(member) for name, member in value.items()}
    if isinstance(value, list):
        return [pointers(member) for member in value]
    if value is None:
        return ffi.NULL
    return value.pointer if isinstance(value, Array) else value


HIGHEST, HIGH = map(PRECISIONS.index, ("highest", "high"))


class Side:
    """The functions of a library of kernels on the CPU, and memory for its arrays."""

    def __init__(self, functions: Any) -> None:
        self.functions, self._alive = functions, list[Any]()
        self.precision = HIGHEST  # of the matrices that are made

    def put(self, x: np.ndarray) -> Array:
        """Return a copy of an array in the side's memory, until `free`."""
        memory = np.array(x, order="C")
        self._alive.append(memory)
        return Array(memory.ctypes.data, memory)

    def get(self, array: Array) -> np.ndarray:
        """Return what an array holds now."""
        out = np.empty(array.shape, array.dtype)
        ctypes.memmove(out.ctypes.data, array.address, array.nbytes)
        return out

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the library; arrays are passed as pointers."""
        return getattr(self.functions, name)(*map(pointers, arguments))

    def free(self) -> None:
        """Forget all arrays."""
        self._alive.clear()

    # ---- what every case needs

    def nan(self, *shape: int, dtype: Any = F) -> Array:
        """Return an array for results, that holds no number yet."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.put(np.full(size, 0xFF, np.uint8).view(dtype).reshape(shape))

    def struct(self, kind: str, members: Any) -> Any:
        """Return a pointer to a C struct, or an array of structs from a list. It stays until `free`."""
        memory = ffi.new(f"{kind}[]" if isinstance(members, list) else f"{kind} *", pointers(members))
        self._alive.append(memory)
        return memory

    def host(self, x: Any) -> Any:
        """Return integers in memory that the library reads on the host."""
        return self.struct("int", [int(i) for i in x])


class GpuSide(Side):
    """The functions of the library that drives a GPU; `driver` is libcuda.so.1, or the stand-in, and has the memory."""

    def __init__(self, functions: Any, driver: Path | str) -> None:
        super().__init__(functions)
        self.driver = ctypes.CDLL(str(driver))
        self._addresses: list[int] = []

    def _check(self, code: int) -> None:
        if code:
            raise RuntimeError(f"the driver returned {code}")

    def put(self, x: np.ndarray) -> Array:
        x, address = np.ascontiguousarray(x), ctypes.c_uint64()
        self.functions.begin_call(ffi.NULL)
        size = ctypes.c_size_t(x.nbytes)
        self._check(self.driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(max(x.nbytes, 1))))
        self._check(self.driver.cuMemcpyHtoDAsync_v2(address, ctypes.c_void_p(x.ctypes.data), size, None))
        self._check(self.driver.cuStreamSynchronize(None))
        self._addresses.append(address.value)
        return Array(address.value, x)

    def get(self, array: Array) -> np.ndarray:
        out = np.empty(array.shape, array.dtype)
        to, size = ctypes.c_void_p(out.ctypes.data), ctypes.c_size_t(array.nbytes)
        self._check(self.driver.cuMemcpyDtoHAsync_v2(to, ctypes.c_uint64(array.address), size, None))
        self._check(self.driver.cuStreamSynchronize(None))
        return out

    def call(self, name: str, *arguments: Any) -> Any:
        self.functions.begin_call(ffi.NULL)
        return super().call(name, *arguments)

    def free(self) -> None:
        for address in self._addresses:
            self._check(self.driver.cuMemFree_v2(ctypes.c_uint64(address)))
        self._addresses.clear()
        super().free()


def different(theirs: np.ndarray, ours: np.ndarray) -> int:
    """Return how many numbers differ in their bits; NaN is NaN, whatever its payload."""
    a, b = (np.ascontiguousarray(x).reshape(-1) for x in (theirs, ours))
    if a.dtype == SOFTMAX:
        a, b = a.view(np.float64), b.view(np.float64)
    unsigned = {1: np.uint8, 4: np.uint32, 8: np.uint64}[a.dtype.itemsize]
    unequal = a.view(unsigned) != b.view(unsigned)
    if a.dtype.kind == "f":
        unequal &= ~(np.isnan(a) & np.isnan(b))
    return int(unequal.sum())


def differences(case: Case, cpu: Side, gpu: Side) -> tuple[int, list[str]]:
    """Return how many numbers a case compared, and what differs."""
    theirs, ours = case(cpu), case(gpu)
    cpu.free()
    gpu.free()
    assert theirs.keys() == ours.keys()
    counts = {name: different(theirs[name], ours[name]) for name in theirs}
    wrong = [f"{name}: {count} of {theirs[name].size} differ" for name, count in counts.items() if count]
    return sum(x.size for x in theirs.values()), wrong


# -------------------------------------------------------------------------------------------------- made-up numbers


def numbers(rng: np.random.Generator, *shape: int, wild: bool = False) -> np.ndarray:
    """Return normal numbers; `wild`: of many sizes, with outliers, zeros of both signs and denormal numbers."""
    x = rng.standard_normal(shape).astype(F)
    if wild:
        x *= np.exp2(rng.integers(-40, 10, shape)).astype(F)
        for share, value in ((0.05, 0.0), (0.05, -0.0), (0.02, 1e-40), (0.02, -3e-42), (0.01, 3e4)):
            x[rng.random(shape) < share] = value
    return x


def matrix(
    side: Side, w: np.ndarray, bias: np.ndarray | None, transposed: bool = False, grad: int = -1, bias_grad: int = -1
) -> dict[str, Any]:
    """Return the members of a Matrix with weight w [n, k] and bias [n], which is packed later."""
    n, k = w.shape
    panels = side.put(np.zeros(max(side.functions.panel_floats(n, k, side.precision), 1), F))
    weight = side.put(np.ascontiguousarray(w.T if transposed else w))
    members = dict(n=n, k=k, w=weight, bias=None if bias is None else side.put(bias), panels=panels)
    return members | dict(transposed=transposed, precision=side.precision, grad=grad, bias_grad=bias_grad)


def packed(side: Side, members: dict[str, Any]) -> Any:
    """Return a Matrix whose weight is packed."""
    struct = side.struct("Matrix", members)
    side.call("pack", struct)
    return struct


def in_high(case: Case) -> Case:
    """The same, with products of integers."""

    def high(side: Side) -> Results:
        side.precision = HIGH
        try:
            return case(side)
        finally:
            side.precision = HIGHEST

    return high


# ---------------------------------------------------------------------------------------------------------- products


def product(rows: int, cols: int, terms: int, transposed: bool = False, wild: bool = False, more: bool = True) -> Case:
    """y = x w^T, with bias and residual where there is `more`."""

    def case(side: Side) -> Results:
        rng = np.random.default_rng((rows, cols, terms))
        x, w = numbers(rng, rows, terms, wild=wild), numbers(rng, cols, terms, wild=wild)
        bias, residual = numbers(rng, cols), numbers(rng, rows, cols)
        layer = packed(side, matrix(side, w, bias if more else None, transposed))
        y = side.nan(rows, cols)
        side.call("linear", layer, side.put(x), rows, side.put(residual) if more else None, y)
        return {"y": side.get(y)}

    return case


def sized_product(rows: int, cols: int, terms: int) -> Case:
    """y = x w^T of blocks of every size, with ties, numbers without a scale, infinity and NaN."""

    def case(side: Side) -> Results:
        rng = np.random.default_rng((rows, cols, terms))
        x, w = (numbers(rng, n, terms) * np.exp2(rng.integers(-149, 100, (n, 1))).astype(F) for n in (rows, cols))
        x[0], w[0] = rng.integers(-8190, 8190, terms) / 2, rng.integers(-8190, 8190, terms) / 2  # halves are ties
        x[0, 0], w[0, 0] = 4095.75, -4095.75  # rounded to 4,096, and cut
        x[1], w[1] = 2.0**60 - 2.0**36, 4095.0  # the largest sums
        x[2, ::3], w[2, 7], x[3, 5] = 2.0**60, np.inf, np.nan
        y = side.nan(rows, cols)
        side.call("linear", packed(side, matrix(side, w, None)), side.put(x), rows, None, y)
        return {"y": side.get(y)}

    return case


def outlier_product(rows: int, cols: int, terms: int) -> Case:
    """y = x w^T and dx = dy w, where blocks of some rows of x, of rows or columns of w, and of dy are mostly small."""

    def case(side: Side) -> Results:
        rng = np.random.default_rng((rows, cols, terms))
        x, w, dy = numbers(rng, rows, terms), numbers(rng, cols, terms), numbers(rng, rows, cols)
        x[1::20, 5::128] *= 1e4
        w[2::30, 7::128] *= 1e4
        w[7::128, 1::30] *= 1e4
        dy[::5, 3::128] *= 1e4
        x[-1], x[-1, ::128] = 31.25, 2048.0  # just small
        layer, y, dx = packed(side, matrix(side, w, None)), side.nan(rows, cols), side.nan(rows, terms)
        side.call("linear", layer, side.put(x), rows, None, y)
        integers = (side.host([0] * rows), side.host(range(rows)), side.host([0, SLOTS]))
        sums = Sums(side, 1).of_pass(SLOTS, False)
        side.call("linear_backward", layer, side.put(dy), side.put(x), rows, *integers, sums, dx)
        return {"y": side.get(y), "dx": side.get(dx)}

    return case


class Sums:
    """Partial sums of gradients of a minibatch, through its backward passes."""

    def __init__(self, side: Side, size: int) -> None:
        self.side, self.slot, self.is_open = side, 0, False
        self.levels = [side.nan(size) for _ in range(LEVELS + 1)]

    def of_pass(self, last: int, stays_open: bool) -> Any:
        """Return the Sums of the next pass."""
        slots = dict(first=self.slot, open=self.is_open, last=last, stays_open=stays_open)
        struct = self.side.struct("Sums", dict(level=self.levels, levels=LEVELS) | slots)
        self.slot, self.is_open = last, stays_open
        return struct

    def found(self) -> Results:
        """Return the arrays that hold numbers now."""
        held = [self.is_open or self.slot == SLOTS, *(self.slot < SLOTS and self.slot >> i & 1 for i in range(LEVELS))]
        return {f"level {i}": self.side.get(self.levels[i]) for i in range(LEVELS + 1) if held[i]}


def gradients(
    n: int, k: int, lengths: Sequence[int], cuts: Sequence[int], transposed: bool = False, wild: bool = False
) -> Case:
    """Gradients of weight, bias and input of a layer, of sequences cut into several backward passes."""

    def case(side: Side) -> Results:
        rng = np.random.default_rng((n, k, len(lengths)))
        w, count, found = numbers(rng, n, k, wild=wild), len(lengths), {}
        layer = packed(side, matrix(side, w, numbers(rng, n), transposed, grad=0, bias_grad=n * k))
        slots, sums = slots_of(range(count), count, SLOTS), Sums(side, n * k + n)
        for first, after in pairwise(cuts):
            rows = sum(lengths[first:after])
            sequence = np.repeat(np.arange(after - first), lengths[first:after])
            position = np.concatenate([np.arange(length) for length in lengths[first:after]])
            own = [*slots[first:after], slots[after]]
            dy, x = numbers(rng, rows, n, wild=wild), numbers(rng, rows, k, wild=wild)
            dx = side.nan(rows, k)
            of_pass = sums.of_pass(own[-1], after < count and own[-2] == own[-1])
            integers = (side.host(sequence), side.host(position), side.host(own))
            side.call("linear_backward", layer, side.put(dy), side.put(x), rows, *integers, of_pass, dx)
            found[f"dx from {first}"] = side.get(dx)
            found |= {f"{key} from {first}": x for key, x in sums.found().items()}
        return found

    return case


# ------------------------------------------------------------------------------------------------------------ models

VOCABULARY, CHOSEN = 61, 2  # tokens; experts of a token


@dataclass(frozen=True)
class Shape:
    """A model of layers with these windows."""

    hidden: int = 24
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 12
    inner: int = 40
    windows: tuple[int, ...] = (0,)
    norm: str = "NORM_RMS"
    qk_norm: str = "QK_NORM_NONE"
    activation: str = "ACT_SILU"
    experts: int = 0  # of the last layer
    rotary: bool = True  # with tables of its own in each layer
    residual_scale: float = 1.0
    score_cap: float = 0.0
    unrotated: int = 0  # layers before the first one with rotary positions
    parallel: bool = False
    norms_before: bool = True
    norms_after: bool = False
    transposed: bool = False
    rounded: str = "FORMAT_FLOAT32"  # format of activations, inputs and cache

    @property
    def gated(self) -> bool:
        return self.norm != "NORM_LAYER"


class _Weights:
    """Made-up weights of a model on one side, and where the gradient of each one lies."""

    def __init__(self, side: Side, shape: Shape, rng: np.random.Generator) -> None:
        self.side, self.shape, self.rng, self.size = side, shape, rng, 0

    def some(self, *shape: int, center: float = 0.0, size: float = 0.3) -> tuple[np.ndarray, int]:
        """Return numbers, and the place of their gradient."""
        place, self.size = self.size, self.size + int(np.prod(shape))
        return (center + size * self.rng.uniform(-1, 1, shape)).astype(F), place

    def norm(self, n: int) -> dict[str, Any]:
        w, grad = self.some(n, center=1.0)
        b, b_grad = self.some(n) if self.shape.norm == "NORM_LAYER" else (None, -1)
        return dict(w=self.side.put(w), b=None if b is None else self.side.put(b), grad=grad, b_grad=b_grad)

    def matrix(self, n: int, k: int) -> dict[str, Any]:
        (w, grad), (bias, bias_grad) = self.some(n, k), self.some(n)
        return matrix(self.side, w, bias, self.shape.transposed, grad, bias_grad)

    def rotary(self, positions: int) -> dict[str, Any]:
        """Return the members of a Rotary, in which a part of a head rotates."""
        half = (self.shape.head_dim // 4 * 2 or 2) // 2
        angles = self.rng.uniform(0, 7, (positions, half))
        cosine, sine = (self.side.put(table.astype(F)) for table in (np.cos(angles), np.sin(angles)))
        return dict(elements=2 * half, cosine=cosine, sine=sine)

    def layer(self, window: int, rotary: bool, experts: int, positions: int) -> dict[str, Any]:
        """Return the members of a Layer; with `experts` they stand in place of the MLP."""
        side, s = self.side, self.shape
        members = dict(window=window, scale=s.head_dim**-0.5, score_cap=s.score_cap)
        members |= dict(rotary=self.rotary(positions) if rotary else {})
        members |= dict(norms_before=s.norms_before, norms_after=s.norms_after)
        norms = ("norm1", "norm2") * s.norms_before + ("norm1_after", "norm2_after") * s.norms_after
        members |= {name: self.norm(s.hidden) for name in norms}
        if s.qk_norm != "QK_NORM_NONE":
            for name, heads in (("q_norm", s.heads), ("k_norm", s.kv_heads)):
                w, grad = self.some(s.head_dim * (heads if s.qk_norm == "QK_NORM_WHOLE" else 1), center=1.0)
                members[name] = dict(w=side.put(w), grad=grad, b_grad=-1)
        members["qkv"] = self.matrix((s.heads + 2 * s.kv_heads) * s.head_dim, s.hidden)
        members["out"] = self.matrix(s.hidden, s.heads * s.head_dim)
        inner = (2 if s.gated else 1) * s.inner
        if not experts:
            return members | dict(up=self.matrix(inner, s.hidden), down=self.matrix(s.hidden, s.inner))
        members["router"] = self.matrix(experts, s.hidden)
        up = side.struct("Matrix", [self.matrix(inner, s.hidden) for _ in range(experts)])
        down = side.struct("Matrix", [self.matrix(s.hidden, s.inner) for _ in range(experts)])
        return members | dict(expert_up=up, expert_down=down)


def _pack(side: Side, layer: Any, experts: int) -> None:
    alone = ("qkv", "out") + (() if experts else ("up", "down")) + (("router",) if experts else ())
    for name in alone:
        side.call("pack", ffi.addressof(layer, name))
    for expert in range(experts):
        for matrices in (layer.expert_up, layer.expert_down):
            side.call("pack", matrices + expert)


def _model(side: Side, shape: Shape, rng: np.random.Generator, longest: int) -> tuple[Any, int]:
    """Return a Model with positions up to `longest`, and how many weights it has."""
    weights, s = _Weights(side, shape, rng), shape
    embedding, embedding_grad = weights.some(VOCABULARY, s.hidden, size=1.0)
    count = len(s.windows)
    experts = [s.experts if index == count - 1 else 0 for index in range(count)]
    rotary = [s.rotary and index >= s.unrotated for index in range(count)]
    each = zip(s.windows, rotary, experts, [longest] * count, strict=True)
    layers = side.struct("Layer", [weights.layer(*layer) for layer in each])
    for index, number in enumerate(experts):
        _pack(side, layers + index, number)
    last_norm = weights.norm(s.hidden)
    learned, positions_grad = (None, -1) if s.rotary else weights.some(longest, s.hidden)
    kinds = {name: getattr(constants, getattr(s, name)) for name in ("norm", "qk_norm", "activation")}
    kinds["head_norm"] = constants.NORM_RMS if s.norm == "NORM_LAYER" else kinds["norm"]
    rounded = getattr(constants, s.rounded)
    members = dict(
        layers=count, hidden=s.hidden, heads=s.heads, kv_heads=s.kv_heads, head_dim=s.head_dim,
        vocabulary=VOCABULARY, gated=s.gated, parallel=s.parallel,
        experts=s.experts or 1, chosen=min(CHOSEN, s.experts or 1), normalised=1, mixtures=bool(s.experts),
        q_step=s.head_dim, k_at=s.heads * s.head_dim, k_step=s.head_dim, v_at=(s.heads + s.kv_heads) * s.head_dim,
        v_step=s.head_dim, round_activations=rounded, round_inputs=rounded, round_cache=rounded,
        position_entries=0 if s.rotary else longest, padding=3, eps=1e-5, embedding_scale=1.5,
        residual_scale=s.residual_scale,
        embedding=side.put(embedding), embedding_grad=embedding_grad, positions_grad=positions_grad,
        positions=None if learned is None else side.put(learned), last_norm=last_norm, layer=layers,
    )  # fmt: skip
    struct = side.struct("Model", members | kinds)
    fault = side.functions.model_fault(struct)
    assert fault == ffi.NULL, ffi.string(fault)
    return struct, weights.size


class _Sequences:
    """Made-up tokens, with memory for their keys and values."""

    def __init__(self, side: Side, shape: Shape, rng: np.random.Generator, lengths: Sequence[int]) -> None:
        self.side, self.lengths, count = side, lengths, len(lengths)
        self.ids = [rng.integers(0, VOCABULARY, length) for length in lengths]
        self.slots = slots_of(range(count), count, SLOTS)
        self.bases = np.cumsum([0, *(-(-length // 16) * 16 for length in lengths)])
        floats = len(shape.windows) * shape.kv_heads * int(self.bases[-1]) * shape.head_dim
        self.cache = dict(keys=side.nan(floats), values=side.nan(floats), capacity=int(self.bases[-1]))

    def batch(self, of: Sequence[int], past: Sequence[int], now: Sequence[int]) -> Any:
        """Return a Batch of some sequences: `now` tokens of each, from position `past` on."""
        ids = np.concatenate([self.ids[i][p : p + n] for i, p, n in zip(of, past, now, strict=True)])
        integers = dict(
            ids=ids,
            position=np.concatenate([np.arange(p, p + n) for p, n in zip(past, now, strict=True)]),
            sequence=np.repeat(np.arange(len(of)), now),
            start=np.cumsum([0, *now]),
            base=[self.bases[i] for i in of],
            slots=[*(self.slots[i] for i in of), self.slots[of[-1] + 1]],
        )
        host = {name: self.side.host(values) for name, values in integers.items()}
        return self.side.struct("Batch", dict(tokens=sum(now), sequences=len(of)) | host | self.cache)


def cached(lengths: Sequence[int], chunks: Sequence[int], shape: Shape) -> Case:
    """Hidden states of a model over a cache: of each sequence the next tokens, in chunks."""

    def case(side: Side) -> Results:
        rng = np.random.default_rng(7)
        struct, _ = _model(side, shape, rng, max(lengths))
        sequences, past, found = _Sequences(side, shape, rng, lengths), [0] * len(lengths), Results()
        turn = 0
        while going := [i for i, length in enumerate(lengths) if past[i] < length]:
            now = [min(chunks[turn % len(chunks)], lengths[i] - past[i]) for i in going]
            out, batch = side.nan(sum(now), shape.hidden), sequences.batch(going, [past[i] for i in going], now)
            fault = side.call("model_forward", struct, batch, None, constants.KEEP_NOTHING, out)
            found |= {f"fault {turn}": np.array([fault], np.int32), f"chunk {turn}": side.get(out)}
            for i, n in zip(going, now, strict=True):
                past[i] += n
            turn += 1
        return found

    return case


def model(lengths: Sequence[int], shape: Shape, passes: Sequence[int] = (), recompute: bool = False) -> Case:
    """Hidden states and all gradients of a model; `passes` cuts the sequences into backward passes; empty: one."""
    count = len(lengths)

    def case(side: Side) -> Results:
        rng = np.random.default_rng(7)
        struct, size = _model(side, shape, rng, max(lengths))
        sequences, sums, found = _Sequences(side, shape, rng, lengths), Sums(side, size), Results()
        keep, slots = constants.KEEP_INPUTS if recompute else constants.KEEP_ALL, sequences.slots
        for first, after in pairwise(passes or (0, count)):
            now = lengths[first:after]
            batch, tokens = sequences.batch(range(first, after), [0] * len(now), now), sum(now)
            kept = side.nan(side.functions.kept_floats(struct, tokens, keep))
            out, d_hidden = side.nan(tokens, shape.hidden), side.put(numbers(rng, tokens, shape.hidden))
            side.call("model_forward", struct, batch, kept, keep, out)
            of_pass = sums.of_pass(slots[after], after < count and slots[after - 1] == slots[after])
            side.call("model_backward", struct, batch, kept, keep, d_hidden, of_pass)
            found[f"hidden from {first}"] = side.get(out)
            found |= {f"{key} from {first}": x for key, x in sums.found().items()}
        return found

    return case


# ------------------------------------------------------------------------------------------------------------ tokens


def _logits(rng: np.random.Generator, n: int, v: int) -> np.ndarray:
    z = 3.0 * numbers(rng, n, v)
    z[:, 1::3] *= 20.0
    z[:, ::7] = np.maximum(z[:, ::7], z.max())  # several largest tokens
    return z.astype(F)


def _eligible(side: Side, rng: np.random.Generator, n: int, v: int, always: Any, share: float = 0.5) -> Array:
    """Return which tokens may be drawn: some, and in each row the one in column `always`."""
    eligible = rng.random((n, v)) < share
    eligible[np.arange(n), always] = True
    return side.put(eligible.astype(np.uint8))


def written(side: Side, fine: int, results: Mapping[str, Array]) -> Results:
    """Return what a function returned, and what it wrote."""
    return {"fine": np.array([fine])} | {name: side.get(array) for name, array in results.items()}


def statistics(n: int, v: int, masked: bool = False, bad: bool = False, temperature: float = 0.7) -> Case:
    """Statistics with cumulative probabilities, and their gradient. `bad`: a row has an infinity."""

    def case(side: Side) -> Results:
        rng = np.random.default_rng((n, v))
        z, targets, d_logprobs = _logits(rng, n, v), rng.integers(0, v, n), numbers(rng, n)
        if bad:
            z[-1, v // 2] = np.inf
        d_logprobs[: n // 3] = 0.0
        d_entropies = np.where(d_logprobs == 0, 0, 0.01).astype(F)
        results = {name: side.nan(n) for name in ("logprobs", "entropies", "squares", "cumulative")}
        results |= dict(rows=side.nan(n, dtype=SOFTMAX), gradient=side.nan(n, v))
        given = dict(
            logits=side.put(z), ld=v, n=n, v=v, temperature=temperature, targets=side.put(targets),
            eligible=_eligible(side, rng, n, v, targets) if masked else None,
            d_logprobs=side.put(d_logprobs), d_entropies=side.put(d_entropies),
        )  # fmt: skip
        s = side.struct("Statistics", given | results)
        fine = side.call("token_statistics", s)
        side.call("token_statistics_gradient", s)
        return written(side, fine, results)

    return case


def scaled_logits(n: int, v: int, cap: float) -> Case:
    """What follows the head, and its gradient."""

    def case(side: Side) -> Results:
        rng = np.random.default_rng((n, v, 4))
        results = dict(logits=side.put(_logits(rng, n, v)), gradient=side.nan(n, v))
        given = dict(n=n, v=v, divisor=0.7, cap=cap, d_logits=side.put(numbers(rng, n, v)))
        struct = side.struct("LogitScale", given | results)
        side.call("scale_logits", struct)
        side.call("scale_logits_gradient", struct)
        return {name: side.get(array) for name, array in results.items()}

    return case


def divergence(n: int, v: int, masked: bool = False) -> Case:
    """The KL divergence of two rows of logits, and its gradient."""

    def case(side: Side) -> Results:
        rng = np.random.default_rng((n, v, 1))
        results = {"out": side.nan(n), "gradient": side.nan(n, v)}
        given = dict(
            p_logits=side.put(_logits(rng, n, v)), q_logits=side.put(_logits(rng, n, v)), p_ld=v, q_ld=v, n=n, v=v,
            temperature=0.9, eligible=_eligible(side, rng, n, v, 0) if masked else None,
            seed=side.put(numbers(rng, n)), p=side.nan(n, dtype=SOFTMAX), q=side.nan(n, dtype=SOFTMAX),
        )  # fmt: skip
        d = side.struct("Divergence", given | results)
        fine = side.call("kl_divergence", d)
        side.call("kl_divergence_gradient", d)
        return written(side, fine, results)

    return case


def cut(n: int, v: int, top_k: int, top_p: float) -> Case:
    """Top-k and top-p."""

    def case(side: Side) -> Results:
        scaled = _logits(np.random.default_rng((n, v, 2)), n, v)
        order = np.argsort(-scaled, axis=1, kind="stable").astype(np.int64)
        results = dict(eligible=side.nan(n, v, dtype=np.uint8), rank=side.nan(n, v, dtype=np.int32))
        results["log_kept"] = side.nan(n)
        given = dict(scaled=side.put(scaled), order=side.put(order), n=n, v=v, top_k=top_k, top_p=top_p)
        return written(side, side.call("cut_tokens", side.struct("Cut", given | results)), results)

    return case


def sampling(n: int, v: int, masked: bool = False, temperature: float = 0.8) -> Case:
    """Sampled tokens and their log-probs; `masked`: over eligible tokens, whose noise has other columns."""

    def case(side: Side) -> Results:
        rng = np.random.default_rng((n, v, 3))
        results = {"tokens": side.nan(n, dtype=np.int64), "logprobs": side.nan(n)}
        given = dict(
            logits=side.put(_logits(rng, n, v) / F(20)), ld=v, n=n, v=v, temperature=temperature,
            seeds=side.put(rng.integers(0, 2**62, n)), positions=side.put(rng.integers(0, 2**20, n)),
            rows=side.nan(n, dtype=SOFTMAX),
        )  # fmt: skip
        if masked:
            columns = np.argsort(rng.random((n, v)), axis=1).astype(np.int32)
            given |= dict(eligible=_eligible(side, rng, n, v, -1, share=0.3), columns=side.put(columns))
        return written(side, side.call("sample_tokens", side.struct("Sampling", given | results)), results)

    return case


def noise(n: int, columns: int) -> Case:
    """Normal noise, which takes the hash, a logarithm, a root and a cosine."""

    def case(side: Side) -> Results:
        rng, out = np.random.default_rng(n), side.nan(n, columns, dtype=np.float64)
        seeds, positions = (side.put(rng.integers(0, 2**62, n)) for _ in range(2))
        side.call(
            "normal_noise",
            side.struct("Noise", dict(seeds=seeds, positions=positions, n=n, columns=columns, out=out)),
        )
        return {"out": side.get(out)}

    return case


# ------------------------------------------------------------------------------------------- optimizer and rounding


def optimizer(sizes: Sequence[int]) -> Case:
    """The join of slots, the norm of gradients, and two steps of AdamW."""

    def case(side: Side) -> Results:
        rng, arrays = np.random.default_rng(tuple(sizes)), list[dict[str, Array]]()
        for i, n in enumerate(sizes):
            sums = Sums(side, n)
            sums.levels = [side.put(numbers(rng, n, wild=True)) for _ in range(LEVELS + 1)]
            sums.slot, sums.is_open = 5, i % 2 == 0
            side.call("join_sums", sums.of_pass(5, False), n)
            squares = np.abs(numbers(rng, n, wild=True))
            weights = dict(p=side.put(numbers(rng, n)), m=side.put(numbers(rng, n)), v=side.put(squares))
            arrays.append(dict(g=sums.levels[0]) | weights)
        tensors = side.struct("Trained", [of | dict(n=n) for of, n in zip(arrays, sizes, strict=True)])
        norm = side.call("gradient_squares", tensors, len(sizes), ffi.NULL)
        betas = dict(beta1=0.9, rest1=0.1, beta2=0.999, rest2=0.001)
        step = side.struct("Step", dict(clip=0.37, keep=0.99, rate=3e-4, unroot=1.7, eps=1e-8) | betas)
        for _ in range(2):
            side.call("adamw", tensors, len(sizes), step)
        after = {f"{name} {i}": side.get(array) for i, of in enumerate(arrays) for name, array in of.items()}
        return {"norm": np.array([norm, *(t.square for t in tensors)])} | after

    return case


def rounding(form: str, scaled: bool, rows: int, n: int) -> Case:
    """Rounding on purpose, with rows of zeros, and with infinities and NaN."""

    def case(side: Side) -> Results:
        x = numbers(np.random.default_rng((rows, n)), rows, n, wild=True)
        x[0] = 0.0
        if rows > 2:
            x[1, 0], x[2, -1] = np.inf, np.nan
        array = side.put(x)
        side.call("round_tensor", getattr(constants, form), scaled, array, rows, n)
        return {"x": side.get(array)}

    return case


# --------------------------------------------------------------------------------------------------------- selections

LENGTHS = (135, 4, 17, 1, 260)


def quick_cases() -> Iterator[tuple[str, Case]]:
    """Small cases of every kernel."""
    for shape in ((1, 1, 1), (5, 7, 3), (33, 70, 131), (130, 200, 300), (257, 129, 64)):
        yield f"product {shape}", product(*shape, wild=shape[2] % 2 == 1)
    yield "product transposed", product(19, 37, 140, transposed=True)
    yield "gradients", gradients(132, 68, (200, 2, 130, 1, 45), (0, 1, 3, 5), wild=True)
    yield "gradients transposed", gradients(37, 131, (30, 41, 128), (0, 3), transposed=True)
    for shape in ((1, 1, 1), (5, 7, 3), (33, 70, 131), (130, 200, 300)):
        yield f"product in high {shape}", in_high(product(*shape, wild=shape[2] % 2 == 1))
    yield "product in high of ties", in_high(sized_product(5, 7, 130))
    yield "product in high beside outliers", in_high(outlier_product(50, 70, 300))
    yield "product in high, transposed", in_high(product(19, 37, 140, transposed=True))
    yield "gradients in high", in_high(gradients(132, 68, (200, 2, 130, 1, 45), (0, 1, 3, 5), wild=True))
    yield "gradients in high, transposed", in_high(gradients(37, 131, (30, 41, 128), (0, 3), transposed=True))
    yield "model with experts in high", in_high(model((135, 4, 17), Shape(windows=(0, 0), experts=3), recompute=True))
    yield "model", model(LENGTHS, Shape(windows=(0, 40), qk_norm="QK_NORM_HEAD"), passes=(0, 2, 5))
    yield "model with experts", model((135, 4, 17), Shape(windows=(0, 0), experts=3), recompute=True)
    other = Shape(norm="NORM_LAYER", activation="ACT_GELU_TANH", rotary=False, parallel=True)
    yield "model of another kind", model((135, 3), other)
    yield "model of a third kind", model((40, 3), Shape(norm="NORM_RMS_OFFSET", activation="ACT_GELU"))
    yield (
        "model of a fourth kind",
        model((40, 3), Shape(windows=(0, 0), unrotated=1, residual_scale=0.6, score_cap=0.4)),
    )
    yield "scaled experts", model((17, 4), Shape(experts=3, residual_scale=0.6), recompute=True)
    after = Shape(norm="NORM_RMS_OFFSET", qk_norm="QK_NORM_HEAD", norms_after=True)
    yield "model with norms after", model((40, 3), replace(after, norms_before=False), recompute=True)
    yield "model with norms before and after", model((40, 3), replace(after, windows=(0, 0), experts=3))
    yield "model over a cache", cached(LENGTHS, (7, 130, 1), Shape(windows=(0, 40)))
    yield "capped scores over a cache", cached((135, 4), (7, 130, 1), Shape(score_cap=0.4))
    yield "scaled logits", scaled_logits(5, 1003, cap=2.0)
    yield "statistics", statistics(5, 1003)
    yield "statistics at temperature 1", statistics(3, 300, temperature=1.0)
    yield "statistics masked", statistics(3, 77, masked=True, bad=True)
    yield "divergence", divergence(3, 500, masked=True)
    yield "cut", cut(3, 300, 40, 0.9)
    yield "sampling", sampling(5, 700)
    yield "sampling at temperature 1", sampling(5, 700, temperature=1.0)
    yield "sampling masked", sampling(3, 300, masked=True)
    yield "sampling of few tokens", sampling(17, 16, masked=True)
    yield "noise", noise(5, 33)
    yield "optimizer", optimizer((5000, 3, 4096))
    for form in ("FORMAT_BFLOAT16", "FORMAT_FLOAT8_E4M3", "FORMAT_INT8"):
        yield f"rounding {form}", rounding(form, True, 5, 37)


def large_cases() -> Iterator[tuple[str, Case]]:
    """Sizes for a GPU; the emulator would take minutes."""
    yield "large product", product(1000, 2050, 1027)
    yield "large product, transposed", product(1000, 1027, 2050, transposed=True)
    yield "large gradients", gradients(512, 1030, (700, 513, 40, 1, 300), (0, 2, 5), wild=True)
    yield "large product in high", in_high(product(1000, 2050, 1027))
    yield "large product in high, transposed", in_high(product(1000, 1027, 2050, transposed=True))
    yield "large product in high beside outliers", in_high(outlier_product(700, 1030, 1027))
    yield "large gradients in high", in_high(gradients(512, 1030, (700, 513, 40, 1, 300), (0, 2, 5), wild=True))
    wide = Shape(256, heads=16, kv_heads=8, head_dim=128, inner=300, windows=(0, 300), qk_norm="QK_NORM_HEAD")
    yield "large model", model((900, 130, 513), wide)
    yield "large model in high", in_high(model((900, 130, 513), wide))
    yield "large model over a cache", cached((900, 130, 1500), (800, 1, 300), wide)
    yield "many statistics", statistics(300, 151936)
    yield "many samples", sampling(130, 151936)
    yield "large optimizer", optimizer((3_000_000, 77))


def all_cases() -> Iterator[tuple[str, Case]]:
    """Every kernel in hard shapes."""
    yield from quick_cases()
    for rows in (1, 2, 15, 16, 17, 31, 33, 64, 65, 127, 128, 129, 200, 255, 256, 257):
        yield f"product of {rows} rows", product(rows, 130, 300, wild=rows % 2 == 1, more=rows % 3 > 0)
        yield f"product of {rows} rows, transposed", product(rows, 67, 257, transposed=True, more=rows % 3 > 0)
    for terms in (1, 2, 3, 4, 5, 15, 16, 17, 127, 128, 129, 1024):
        yield f"product of {terms} terms", product(70, 136, terms, wild=terms % 2 == 1)
    for rows, terms in ((1, 300), (15, 129), (16, 128), (17, 257), (64, 2), (127, 1), (129, 384), (257, 131)):
        for transposed in (False, True):
            case = product(rows, 130, terms, transposed, wild=rows % 2 == 1, more=rows % 3 > 0)
            yield f"product in high of {rows} rows, {terms} terms, {transposed}", in_high(case)
    for shape in ((1, 130, 129), (16, 128, 140), (17, 40, 1), (130, 131, 257), (270, 200, 128)):
        yield f"product in high beside outliers {shape}", in_high(outlier_product(*shape))
    yield "product in high of large and small numbers", in_high(sized_product(17, 70, 500))
    many = [30 + 9 * i for i in range(11)]
    for n, k in ((1, 1), (3, 130), (129, 5), (128, 128)):
        for cuts in ((0, 11), (0, 4, 5, 11), (0, 1, 2, 3, 11)):
            yield f"gradients {n}x{k} {cuts}", gradients(n, k, many, cuts, wild=k % 2 == 1)
            yield f"gradients in high {n}x{k} {cuts}", in_high(gradients(n, k, many, cuts, wild=k % 2 == 1))
    yield "gradients, empty slots", gradients(20, 30, (300, 129), (0, 1, 2))
    for heads, kv_heads, head_dim in ((1, 1, 2), (6, 1, 136), (9, 1, 6), (16, 8, 64), (3, 3, 12), (20, 2, 16)):
        shape = Shape(16, heads, kv_heads, head_dim, inner=16)
        name = f"attention {heads}/{kv_heads} of {head_dim}"
        yield name, model((129, 1, 300), replace(shape, windows=(0, 100)))
        yield f"{name} over a cache", cached((129, 257), (1, 128, 60), shape)
    for window in (1, 16, 128, 129, 200):
        yield f"window {window}", model((400, 130), Shape(windows=(window,)))
        yield f"window {window} over a cache", cached((400, 130), (150, 1), Shape(windows=(window,)))
    for activation in ffi.typeof("ActivationKind").relements:
        for norm in ffi.typeof("NormKind").relements:
            shape = Shape(norm=norm, qk_norm="QK_NORM_WHOLE", activation=activation, transposed=norm == "NORM_LAYER")
            yield f"{activation} {norm}", model((40, 3), shape)
    for form in ("FORMAT_BFLOAT16", "FORMAT_FLOAT16", "FORMAT_FLOAT8_E4M3", "FORMAT_FLOAT8_E5M2", "FORMAT_INT8"):
        for scaled in (False, True):
            yield f"rounding {form} {scaled}", rounding(form, scaled, 19, 129)
        yield f"model in {form}", cached((40, 3), (17, 1), Shape(rounded=form, experts=3))
    for n, v in ((1, 1), (1, 5), (17, 16), (40, 33), (3, 50257), (2, 151936)):
        for masked in (False, True):
            yield f"statistics {n}x{v} {masked}", statistics(n, v, masked)
            yield f"scaled logits {n}x{v} {masked}", scaled_logits(n, v, cap=2.0 if masked else 0.0)
            yield f"divergence {n}x{v} {masked}", divergence(n, v, masked)
            yield f"sampling {n}x{v} {masked}", sampling(n, v, masked)
        yield f"cut {n}x{v}", cut(n, v, 0, 0.9)
        yield f"cut of {v // 2 + 1} of {n}x{v}", cut(n, v, v // 2 + 1, 1.0)
    yield "noise", noise(300, 17)
    yield "optimizer", optimizer((1, 4095, 4097, 20000))
