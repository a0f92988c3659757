"""The functions of `c/interface.h` computed twice, by the CPU's kernels and by a GPU's: every bit must be equal.

A case is a function of one side, with made-up numbers, and gives what that side computed; `differences` calls it for
both sides. Nothing of ppo_repro is imported, so that `kernel_check.py` runs where only NumPy and cffi are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from cffi import FFI

SOURCES = Path(__file__).parents[2] / "ppo_repro" / "numerics" / "c"
BLOCK, SLOTS, LEVELS = 128, 8, 3
F = np.float32

ffi = FFI()
ffi.cdef((SOURCES / "interface.h").read_text() + (SOURCES / "gpu" / "driver.h").read_text())
constants = ffi.dlopen(None)

Results = dict[str, np.ndarray]
Case = Callable[["Side"], Results]


class Array:
    """Memory of a side, by address."""

    def __init__(self, address: int, like: np.ndarray) -> None:
        self.address, self.shape, self.dtype, self.nbytes = address, like.shape, like.dtype, like.nbytes


class Side:
    """One library of kernels on the CPU, and memory for its arrays."""

    def __init__(self, library: Path) -> None:
        self.library, self._alive = ffi.dlopen(str(library)), list[Any]()

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
        """Call a function of the library; arrays are passed as their addresses."""
        return getattr(self.library, name)(*arguments)

    def free(self) -> None:
        """Forget all arrays."""
        self._alive.clear()

    # ---- what every case needs

    def nan(self, *shape: int, dtype: Any = F) -> Array:
        """Return an array for results, that holds no number yet."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.put(np.full(size, 0xFF, np.uint8).view(dtype).reshape(shape))

    def struct(self, kind: str, **members: Any) -> Any:
        """Return a pointer to a C struct; arrays become pointers, and None is NULL. It stays until `free`."""
        struct = ffi.new(f"{kind} *")
        for name, value in members.items():
            setattr(struct, name, self.pointer(value) if value is None or isinstance(value, Array) else value)
        self._alive.append(struct)
        return struct

    def pointer(self, array: Array | None) -> Any:
        """Return an array's address as a pointer of its type."""
        if array is None:
            return ffi.NULL
        names = {"f4": "float *", "f8": "double *", "i4": "int *", "i8": "int64_t *", "u1": "uint8_t *"}
        return ffi.cast(names.get(array.dtype.str[1:], "void *"), array.address)

    def host(self, x: Any) -> Any:
        """Return integers in memory that the library reads on the host."""
        memory = ffi.new("int[]", [int(i) for i in x])
        self._alive.append(memory)
        return memory


class GpuSide(Side):
    """The library that drives a GPU; `driver` is libcuda.so.1, or the stand-in, and has the memory."""

    def __init__(self, library: Path, driver: Path | str, ptx: str) -> None:
        super().__init__(library)
        self.facts = ffi.new("GpuFacts *")
        error = self.library.gpu_open(str(driver).encode(), ptx.encode(), 0, self.facts)
        if error != ffi.NULL:
            raise RuntimeError(ffi.string(error).decode())
        self.name = ffi.string(self.facts.name).decode()
        self.driver = ctypes.CDLL(str(driver))
        self._addresses: list[int] = []

    def _check(self, code: int) -> None:
        if code:
            raise RuntimeError(f"the driver returned {code}")

    def put(self, x: np.ndarray) -> Array:
        x, address = np.ascontiguousarray(x), ctypes.c_uint64()
        self.library.gpu_begin(ffi.NULL)
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
        self.library.gpu_begin(ffi.NULL)
        return super().call(name, *arguments)

    def free(self) -> None:
        for address in self._addresses:
            self._check(self.driver.cuMemFree_v2(ctypes.c_uint64(address)))
        self._addresses.clear()
        super().free()


def different(theirs: np.ndarray, ours: np.ndarray) -> int:
    """Return how many numbers differ in their bits; NaN is NaN, whatever its payload."""
    unsigned = {1: np.uint8, 4: np.uint32, 8: np.uint64}[theirs.dtype.itemsize]
    a, b = (np.ascontiguousarray(x).reshape(-1) for x in (theirs, ours))
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
    side: Side, w: np.ndarray, bias: np.ndarray | None, transposed: bool = False, grad: int = -1
) -> dict[str, Any]:
    """Return the members of a Matrix with weight w [n, k], which is packed later."""
    n, k = w.shape
    panels = side.put(np.zeros(max(side.library.panel_floats(n, k), 1), F))
    weight = side.put(np.ascontiguousarray(w.T if transposed else w))
    kept = None if bias is None else side.put(bias)
    return dict(n=n, k=k, w=weight, bias=kept, panels=panels, transposed=transposed, grad=grad, bias_grad=-1)


def packed(side: Side, **members: Any) -> Any:
    """Return a Matrix whose weight is packed."""
    struct = side.struct("Matrix", **members)
    side.call("pack", struct)
    return struct


# ---------------------------------------------------------------------------------------------------------- products


def product(rows: int, cols: int, terms: int, transposed: bool = False, wild: bool = False, more: bool = True) -> Case:
    """y = x w^T, with bias and residual where there is `more`."""

    def case(side: Side) -> Results:
        rng = np.random.default_rng((rows, cols, terms))
        x, w = numbers(rng, rows, terms, wild=wild), numbers(rng, cols, terms, wild=wild)
        bias, residual = numbers(rng, cols), numbers(rng, rows, cols)
        layer = packed(side, **matrix(side, w, bias if more else None, transposed))
        y = side.nan(rows, cols)
        added = side.pointer(side.put(residual) if more else None)
        side.call("linear", layer, side.pointer(side.put(x)), rows, added, side.pointer(y))
        return {"y": side.get(y)}

    return case


class Sums:
    """Partial sums of gradients of a minibatch, through its backward passes."""

    def __init__(self, side: Side, size: int) -> None:
        self.side, self.slot, self.is_open = side, 0, False
        self.levels = [side.nan(size) for _ in range(LEVELS + 1)]

    def of_pass(self, last: int, stays_open: bool) -> Any:
        """Return the Sums of the next pass."""
        slots = dict(first=self.slot, open=self.is_open, last=last, stays_open=stays_open)
        struct = self.side.struct("Sums", levels=LEVELS, **slots)
        for i, level in enumerate(self.levels):
            struct.level[i] = self.side.pointer(level)
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
        layer = packed(side, **matrix(side, w, numbers(rng, n), transposed, grad=0) | {"bias_grad": n * k})
        slots, sums = [((i + 1) * SLOTS - 1) // count for i in range(count)] + [SLOTS], Sums(side, n * k + n)
        for first, after in pairwise(cuts):
            rows = sum(lengths[first:after])
            sequence = np.repeat(np.arange(after - first), lengths[first:after])
            position = np.concatenate([np.arange(length) for length in lengths[first:after]])
            own = [*slots[first:after], slots[after]]
            dy, x = numbers(rng, rows, n, wild=wild), numbers(rng, rows, k, wild=wild)
            dx = side.nan(rows, k)
            of_pass = sums.of_pass(own[-1], after < count and own[-2] == own[-1])
            arrays = (side.pointer(side.put(dy)), side.pointer(side.put(x)), rows)
            integers = (side.host(sequence), side.host(position), side.host(own))
            side.call("linear_backward", layer, *arrays, *integers, of_pass, side.pointer(dx))
            found[f"dx from {first}"] = side.get(dx)
            found |= {f"{key} from {first}": x for key, x in sums.found().items()}
        return found

    return case


# ------------------------------------------------------------------------------------------------------------ models


def model(
    lengths: Sequence[int],
    chunks: Sequence[int] = (),
    passes: Sequence[int] = (),
    recompute: bool = False,
    hidden: int = 24,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 12,
    inner: int = 40,
    windows: Sequence[int] = (0,),
    norm: str = "NORM_RMS",
    qk_norm: str = "QK_NORM_NONE",
    activation: str = "ACT_SILU",
    experts: int = 0,
    rotary: bool = True,
    parallel: bool = False,
    transposed: bool = False,
    formats: Sequence[str] = ("FORMAT_FLOAT32",) * 3,
) -> Case:
    """A whole model: hidden states over a cache in `chunks`, or of whole sequences with all gradients.

    `passes` cuts the sequences into backward passes; empty: one. `experts` of the last layer; `formats` of activations,
    inputs and cache.
    """
    vocabulary, gated, chosen = 61, norm != "NORM_LAYER", 2
    longest = max(lengths)

    def case(side: Side) -> Results:
        rng, parts = np.random.default_rng(7), list[np.ndarray]()

        def some(*shape: int, center: float = 0.0, size: float = 0.3) -> tuple[Array, int]:
            values = (center + size * rng.uniform(-1, 1, shape)).astype(F)
            at = sum(part.size for part in parts)
            parts.append(values)
            return side.put(values), at

        def some_norm(n: int) -> dict[str, Any]:
            w, grad = some(n, center=1.0)
            b, b_grad = some(n) if norm == "NORM_LAYER" else (None, -1)
            return dict(w=w, b=b, grad=grad, b_grad=b_grad)

        def some_matrix(n: int, k: int) -> dict[str, Any]:
            values = (0.3 * rng.uniform(-1, 1, (n, k))).astype(F)
            at = sum(part.size for part in parts)
            parts.append(values)
            bias, bias_grad = some(n)
            return matrix(side, values, None, transposed, at) | dict(bias=bias, bias_grad=bias_grad)

        def fill(struct: Any, members: dict[str, Any]) -> None:
            for name, value in members.items():
                setattr(struct, name, side.pointer(value) if value is None or isinstance(value, Array) else value)

        def fill_matrix(struct: Any, n: int, k: int) -> None:
            fill(struct, some_matrix(n, k))
            side.call("pack", ffi.addressof(struct))

        layers = ffi.new("Layer[]", len(windows))
        side._alive.append(layers)
        embedding, embedding_grad = some(vocabulary, hidden, size=1.0)
        for index, window in enumerate(windows):
            layer = layers[index]
            layer.window, layer.scale, layer.mixture = window, head_dim**-0.5, 0
            fill(layer.norm1, some_norm(hidden))
            fill(layer.norm2, some_norm(hidden))
            if qk_norm != "QK_NORM_NONE":
                whole = qk_norm == "QK_NORM_WHOLE"
                for name, count in (("q_norm", heads), ("k_norm", kv_heads)):
                    w, grad = some(head_dim * (count if whole else 1), center=1.0)
                    fill(getattr(layer, name), dict(w=w, b=None, grad=grad, b_grad=-1))
            fill_matrix(layer.qkv, (heads + 2 * kv_heads) * head_dim, hidden)
            fill_matrix(layer.out, hidden, heads * head_dim)
            if experts and index == len(windows) - 1:
                up, down = ffi.new("Matrix[]", experts), ffi.new("Matrix[]", experts)
                side._alive.extend((up, down))
                for e in range(experts):
                    fill_matrix(up[e], (2 if gated else 1) * inner, hidden)
                    fill_matrix(down[e], hidden, inner)
                fill_matrix(layer.router, experts, hidden)
                layer.expert_up, layer.expert_down = up, down
            else:
                fill_matrix(layer.up, (2 if gated else 1) * inner, hidden)
                fill_matrix(layer.down, hidden, inner)
        last = some_norm(hidden)
        half = (head_dim // 4 * 2 or 2) // 2  # a part of a head rotates
        angles = rng.uniform(0, 7, (longest, half))
        positions, positions_grad = (None, -1) if rotary else some(longest, hidden)
        m = side.struct(
            "Model",
            layers=len(windows),
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocabulary=vocabulary,
            norm=getattr(constants, norm),
            qk_norm=getattr(constants, qk_norm),
            rotary=2 * half if rotary else 0,
            activation=getattr(constants, activation),
            gated=gated,
            parallel=parallel,
            experts=experts or 1,
            chosen=min(chosen, experts or 1),
            normalised=1,
            mixtures=bool(experts),
            q_step=head_dim,
            k_at=heads * head_dim,
            k_step=head_dim,
            v_at=(heads + kv_heads) * head_dim,
            v_step=head_dim,
            position_entries=0 if rotary else longest,
            padding=3,
            eps=1e-5,
            embedding_scale=1.5,
            cosine=side.put(np.cos(angles).astype(F)),
            sine=side.put(np.sin(angles).astype(F)),
            embedding=embedding,
            positions=positions,
            embedding_grad=embedding_grad,
            positions_grad=positions_grad,
            layer=layers,
        )
        fill(m.last_norm, last)
        m.round_activations, m.round_inputs, m.round_cache = (getattr(constants, name) for name in formats)
        fault = side.library.model_fault(m)
        assert fault == ffi.NULL, ffi.string(fault)
        each = [-(-length // 16) * 16 for length in lengths]
        bases = np.cumsum([0, *each])
        capacity = int(bases[-1])
        keys, values = (side.nan(len(windows) * kv_heads * capacity * head_dim) for _ in range(2))
        ids = [rng.integers(0, vocabulary, length) for length in lengths]
        count = len(lengths)
        slots = [((i + 1) * SLOTS - 1) // count for i in range(count)] + [SLOTS]

        def batch(of: Sequence[int], past: Sequence[int], now: Sequence[int]) -> Any:
            b = side.struct("Batch", tokens=sum(now), sequences=len(of), keys=keys, values=values, capacity=capacity)
            b.ids = side.host(np.concatenate([ids[i][p : p + n] for i, p, n in zip(of, past, now, strict=True)]))
            b.position = side.host(np.concatenate([np.arange(p, p + n) for p, n in zip(past, now, strict=True)]))
            b.sequence = side.host(np.repeat(np.arange(len(of)), now))
            b.start, b.base = side.host([0, *np.cumsum(now)]), side.host([bases[i] for i in of])
            b.slots = side.host([*(slots[i] for i in of), slots[of[-1] + 1]])
            return b

        found: Results = {}
        if chunks:
            past, turn = [0] * count, 0
            while going := [i for i in range(count) if past[i] < lengths[i]]:
                now = [min(chunks[turn % len(chunks)], lengths[i] - past[i]) for i in going]
                out = side.nan(sum(now), hidden)
                b = batch(going, [past[i] for i in going], now)
                found[f"fault {turn}"] = np.array(
                    [side.call("model_forward", m, b, ffi.NULL, constants.KEEP_NOTHING, side.pointer(out))], np.int32
                )
                found[f"chunk {turn}"] = side.get(out)
                for i, n in zip(going, now, strict=True):
                    past[i] += n
                turn += 1
            return found
        keep = constants.KEEP_INPUTS if recompute else constants.KEEP_ALL
        sums, cuts = Sums(side, sum(part.size for part in parts)), list(passes) or [0, count]
        for first, after in pairwise(cuts):
            of, now = list(range(first, after)), list(lengths[first:after])
            b, tokens = batch(of, [0] * len(of), now), sum(now)
            kept = side.nan(side.library.kept_floats(m, tokens, keep))
            out, d_hidden = side.nan(tokens, hidden), side.put(numbers(rng, tokens, hidden))
            side.call("model_forward", m, b, side.pointer(kept), keep, side.pointer(out))
            of_pass = sums.of_pass(slots[after], after < count and slots[after - 1] == slots[after])
            side.call("model_backward", m, b, side.pointer(kept), keep, side.pointer(d_hidden), of_pass)
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


def statistics(n: int, v: int, masked: bool = False, bad: bool = False, temperature: float = 0.7) -> Case:
    """Log-probs, entropies and sums of squares, and their gradient. `bad`: a row has an infinity."""

    def case(side: Side) -> Results:
        rng = np.random.default_rng((n, v))
        z, targets = _logits(rng, n, v), rng.integers(0, v, n)
        if bad:
            z[-1, v // 2] = np.inf
        eligible = rng.random((n, v)) < 0.5
        eligible[np.arange(n), targets] = True
        d_logprobs = numbers(rng, n)
        d_logprobs[: n // 3] = 0.0
        d_entropies = np.where(d_logprobs == 0, 0, 0.01).astype(F)
        results = {name: side.nan(n) for name in ("logprobs", "entropies", "squares")}
        more = {"rows": side.nan(n, 4, dtype=np.float64), "gradient": side.nan(n, v)}
        pointers = {name: side.pointer(array) for name, array in results.items()}
        s = side.struct(
            "Statistics",
            logits=side.put(z),
            ld=v,
            n=n,
            v=v,
            temperature=temperature,
            eligible=side.put(eligible.astype(np.uint8)) if masked else None,
            targets=side.put(targets.astype(np.int64)),
            rows=ffi.cast("Softmax *", more["rows"].address),
            d_logprobs=side.put(d_logprobs),
            d_entropies=side.put(d_entropies),
            gradient=more["gradient"],
            **pointers,
        )
        fine = side.call("token_statistics", s)
        side.call("token_statistics_gradient", s)
        return {"fine": np.array([fine])} | {name: side.get(array) for name, array in (results | more).items()}

    return case


def divergence(n: int, v: int, masked: bool = False) -> Case:
    """The KL divergence of two rows of logits, and its gradient."""

    def case(side: Side) -> Results:
        rng = np.random.default_rng((n, v, 1))
        eligible = (rng.random((n, v)) < 0.5).astype(np.uint8)
        eligible[:, 0] = 1
        results = {"out": side.nan(n), "gradient": side.nan(n, v)}
        rows = {name: side.nan(n, 4, dtype=np.float64) for name in "pq"}
        d = side.struct(
            "Divergence",
            p_logits=side.put(_logits(rng, n, v)),
            q_logits=side.put(_logits(rng, n, v)),
            p_ld=v,
            q_ld=v,
            n=n,
            v=v,
            temperature=0.9,
            eligible=side.put(eligible) if masked else None,
            seed=side.put(numbers(rng, n)),
            p=ffi.cast("Softmax *", rows["p"].address),
            q=ffi.cast("Softmax *", rows["q"].address),
            **results,
        )
        fine = side.call("kl_divergence", d)
        side.call("kl_divergence_gradient", d)
        return {"fine": np.array([fine])} | {name: side.get(array) for name, array in results.items()}

    return case


def cut(n: int, v: int, top_k: int, top_p: float) -> Case:
    """Top-k and top-p."""

    def case(side: Side) -> Results:
        scaled = _logits(np.random.default_rng((n, v, 2)), n, v)
        order = np.argsort(-scaled, axis=1, kind="stable").astype(np.int64)
        results = {
            "eligible": side.nan(n, v, dtype=np.uint8),
            "rank": side.nan(n, v, dtype=np.int32),
            "log_kept": side.nan(n),
        }
        numbers_of = dict(n=n, v=v, top_k=top_k, top_p=top_p)
        c = side.struct("Cut", scaled=side.put(scaled), order=side.put(order), **numbers_of, **results)
        fine = side.call("cut_tokens", c)
        return {"fine": np.array([fine])} | {name: side.get(array) for name, array in results.items()}

    return case


def sampling(n: int, v: int, masked: bool = False, temperature: float = 0.8) -> Case:
    """Sampled tokens and their log-probs; `masked`: over eligible tokens, whose noise has other columns."""

    def case(side: Side) -> Results:
        rng = np.random.default_rng((n, v, 3))
        eligible = (rng.random((n, v)) < 0.3).astype(np.uint8)
        eligible[:, -1] = 1
        columns = np.argsort(rng.random((n, v)), axis=1).astype(np.int32)
        results = {"tokens": side.nan(n, dtype=np.int64), "logprobs": side.nan(n)}
        rows = side.nan(n, 4, dtype=np.float64)
        s = side.struct(
            "Sampling",
            logits=side.put(_logits(rng, n, v) / F(20)),
            ld=v,
            n=n,
            v=v,
            temperature=temperature,
            seeds=side.put(rng.integers(0, 2**62, n)),
            positions=side.put(rng.integers(0, 2**20, n)),
            eligible=side.put(eligible) if masked else None,
            columns=side.put(columns) if masked else None,
            rows=ffi.cast("Softmax *", rows.address),
            **results,
        )
        fine = side.call("sample_tokens", s)
        return {"fine": np.array([fine])} | {name: side.get(array) for name, array in results.items()}

    return case


def noise(n: int, columns: int) -> Case:
    """Normal noise, which takes the hash, a logarithm, a root and a cosine."""

    def case(side: Side) -> Results:
        rng, out = np.random.default_rng(n), side.nan(n, columns, dtype=np.float64)
        seeds, positions = (side.put(rng.integers(0, 2**62, n)) for _ in range(2))
        side.call("normal_noise", side.struct("Noise", seeds=seeds, positions=positions, n=n, columns=columns, out=out))
        return {"out": side.get(out)}

    return case


# ------------------------------------------------------------------------------------------- optimizer and rounding


def optimizer(sizes: Sequence[int]) -> Case:
    """The join of slots, the norm of gradients, and two steps of AdamW."""

    def case(side: Side) -> Results:
        rng, found = np.random.default_rng(tuple(sizes)), {}
        tensors = ffi.new("Trained[]", len(sizes))
        side._alive.append(tensors)
        arrays: dict[str, Array] = {}
        for i, n in enumerate(sizes):
            levels = [numbers(rng, n, wild=True) for _ in range(LEVELS + 1)]
            sums = Sums(side, n)
            sums.levels = [side.put(level) for level in levels]
            sums.slot, sums.is_open = 5, i % 2 == 0
            joined = sums.of_pass(5, False)
            joined.open = i % 2 == 0
            side.call("join_sums", joined, n)
            arrays |= {f"g {i}": sums.levels[0], f"p {i}": side.put(numbers(rng, n))}
            arrays |= {f"m {i}": side.put(numbers(rng, n)), f"v {i}": side.put(np.abs(numbers(rng, n, wild=True)))}
            for name in "pgmv":
                setattr(tensors[i], name, side.pointer(arrays[f"{name} {i}"]))
            tensors[i].n = n
        found["norm"] = np.array([side.call("gradient_squares", tensors, len(sizes)), *(t.square for t in tensors)])
        betas = dict(beta1=0.9, rest1=0.1, beta2=0.999, rest2=0.001)
        step = side.struct("Step", clip=0.37, keep=0.99, rate=3e-4, unroot=1.7, eps=1e-8, **betas)
        for _ in range(2):
            side.call("adamw", tensors, len(sizes), step)
        return found | {name: side.get(array) for name, array in arrays.items()}

    return case


def rounding(form: str, scaled: bool, rows: int, n: int) -> Case:
    """Rounding on purpose, with rows of zeros, and with infinities and NaN."""

    def case(side: Side) -> Results:
        x = numbers(np.random.default_rng((rows, n)), rows, n, wild=True)
        x[0] = 0.0
        if rows > 2:
            x[1, 0], x[2, -1] = np.inf, np.nan
        array = side.put(x)
        side.call("round_tensor", getattr(constants, form), scaled, side.pointer(array), rows, n)
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
    yield "model", model(LENGTHS, windows=(0, 40), qk_norm="QK_NORM_HEAD", passes=(0, 2, 5))
    yield "model with experts", model((135, 4, 17), windows=(0, 0), experts=3, recompute=True)
    other: dict[str, Any] = dict(norm="NORM_LAYER", activation="ACT_GELU_TANH", rotary=False, parallel=True)
    yield "model of another kind", model((135, 3), **other)
    yield "model of a third kind", model((40, 3), norm="NORM_RMS_OFFSET", activation="ACT_GELU")
    yield "model over a cache", model(LENGTHS, chunks=(7, 130, 1), windows=(0, 40))
    yield "statistics", statistics(5, 1003)
    yield "statistics at temperature 1", statistics(3, 300, temperature=1.0)
    yield "statistics masked", statistics(3, 77, masked=True, bad=True)
    yield "divergence", divergence(3, 500, masked=True)
    yield "cut", cut(3, 300, 40, 0.9)
    yield "sampling", sampling(5, 700)
    yield "sampling at temperature 1", sampling(5, 700, temperature=1.0)
    yield "sampling masked", sampling(3, 90, masked=True)
    yield "sampling of few tokens", sampling(17, 16, masked=True)
    yield "noise", noise(5, 33)
    yield "optimizer", optimizer((5000, 3, 4096))
    for form in ("FORMAT_BFLOAT16", "FORMAT_FLOAT8_E4M3", "FORMAT_INT8"):
        yield f"rounding {form}", rounding(form, True, 5, 37)


def large_cases() -> Iterator[tuple[str, Case]]:
    """Sizes for a card; the emulator would take minutes."""
    yield "large product", product(1000, 2050, 1027)
    yield "large product, transposed", product(1000, 1027, 2050, transposed=True)
    yield "large gradients", gradients(512, 1030, (700, 513, 40, 1, 300), (0, 2, 5), wild=True)
    shape: dict[str, Any] = dict(hidden=256, heads=16, kv_heads=8, head_dim=128, inner=300, qk_norm="QK_NORM_HEAD")
    yield "large model", model((900, 130, 513), windows=(0, 300), **shape)
    yield "large model over a cache", model((900, 130, 1500), chunks=(800, 1, 300), windows=(0, 300), **shape)
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
    many = [30 + 9 * i for i in range(11)]
    for n, k in ((1, 1), (3, 130), (129, 5), (128, 128)):
        for cuts in ((0, 11), (0, 4, 5, 11), (0, 1, 2, 3, 11)):
            yield f"gradients {n}x{k} {cuts}", gradients(n, k, many, cuts, wild=k % 2 == 1)
    yield "gradients, empty slots", gradients(20, 30, (300, 129), (0, 1, 2))
    for heads, kv_heads, head_dim in ((1, 1, 2), (6, 1, 136), (9, 1, 6), (16, 8, 64), (3, 3, 12), (20, 2, 16)):
        shape: dict[str, Any] = dict(heads=heads, kv_heads=kv_heads, head_dim=head_dim, hidden=16, inner=16)
        name = f"attention {heads}/{kv_heads} of {head_dim}"
        yield name, model((129, 1, 300), windows=(0, 100), **shape)
        yield f"{name} over a cache", model((129, 257), chunks=(1, 128, 60), **shape)
    for window in (1, 16, 128, 129, 200):
        yield f"window {window}", model((400, 130), windows=(window,))
        yield f"window {window} over a cache", model((400, 130), windows=(window,), chunks=(150, 1))
    for activation in ffi.typeof("ActivationKind").relements:
        for norm in ffi.typeof("NormKind").relements:
            more: dict[str, Any] = dict(activation=activation, norm=norm, qk_norm="QK_NORM_WHOLE")
            yield f"{activation} {norm}", model((40, 3), transposed=norm == "NORM_LAYER", **more)
    for form in ("FORMAT_BFLOAT16", "FORMAT_FLOAT16", "FORMAT_FLOAT8_E4M3", "FORMAT_FLOAT8_E5M2", "FORMAT_INT8"):
        for scaled in (False, True):
            yield f"rounding {form} {scaled}", rounding(form, scaled, 19, 129)
        yield f"model in {form}", model((40, 3), chunks=(17, 1), formats=(form, form, form), experts=3)
    for n, v in ((1, 1), (1, 5), (17, 16), (40, 33), (3, 50257), (2, 151936)):
        for masked in (False, True):
            yield f"statistics {n}x{v} {masked}", statistics(n, v, masked)
            yield f"divergence {n}x{v} {masked}", divergence(n, v, masked)
            yield f"sampling {n}x{v} {masked}", sampling(n, v, masked)
        yield f"cut {n}x{v}", cut(n, v, 0, 0.9)
        yield f"cut of {v // 2 + 1} of {n}x{v}", cut(n, v, v // 2 + 1, 1.0)
    yield "noise", noise(300, 17)
    yield "optimizer", optimizer((1, 4095, 4097, 20000))
