"""A model of the definition, computed by the kernels: the same arrays behind the structs of kernels.h.

Memory that a kernel has to write before it reads is NaN at first.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from ppo_repro.numerics.gradient_sums import Sums
from ppo_repro.numerics.precision import number
from ppo_repro.numerics.structs import BatchStruct, LayerStruct, MatrixStruct, ModelStruct, NormStruct, address, ints
from tests.numerics.definition import Array, Layer, Matrix, Model, NormWeights, parameters, slot_of

NORMS = ("rms", "rms_offset", "layer")
QK_NORMS = ("none", "head", "whole")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "gelu_quick")
KEEP_NOTHING, KEEP_INPUTS, KEEP_ALL = range(3)


def unwritten(*shape: int) -> Array:
    return np.full(shape, np.nan, np.float32)


def up_to_16(n: int) -> int:
    return -(-n // 16) * 16


@dataclass
class Cache:
    """Keys and values of some sequences, `room` positions each; `lengths` of them are computed."""

    room: int
    keys: Array
    values: Array
    lengths: list[int]


@dataclass
class GradientMemory:
    """The arrays of partial sums of a minibatch of S sequences, and which slot comes next."""

    sequences: int
    slots: int
    levels: list[Array]
    done: int = 0  # sequences
    slot: int = 0
    is_open: bool = False

    def next(self, count: int) -> tuple[Sums, Array]:
        """Where the next `count` sequences add, and their slots with the one that follows."""
        after = self.done + count
        own = [slot_of(i, self.sequences, self.slots) for i in range(self.done, after)]
        last = slot_of(after, self.sequences, self.slots) if after < self.sequences else self.slots
        sums = self._sums(self.slot, self.is_open, last, own[-1] == last)
        self.done, self.slot, self.is_open = after, last, own[-1] == last
        return sums, ints([*own, last])

    def _sums(self, first: int, is_open: bool, last: int, stays_open: bool) -> Sums:
        levels = self.slots.bit_length() - 1
        sums = Sums(levels=levels, first=first, open=is_open, last=last, stays_open=stays_open)
        for index, array in enumerate(self.levels):
            sums.level[index] = array.ctypes.data
        return sums


@dataclass
class KernelModel:
    """The structs of a model. `transposed`: matrices outside mixtures lie in memory as [K, N], as GPT-2's do."""

    library: ctypes.CDLL
    model: Model
    transposed: bool = False
    _alive: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.offsets, self.size = {}, 0
        for name, w in parameters(self.model).items():
            self.offsets[name] = self.size
            self.size += up_to_16(w.size)
        self.struct = self._model()

    def _at(self, array: Array | None) -> int | None:
        if array is None:
            return None
        array = np.ascontiguousarray(array, np.float32)
        self._alive.append(array)
        return address(array)

    def _norm(self, name: str, of: NormWeights | None) -> NormStruct:
        if of is None:
            return NormStruct(grad=-1, b_grad=-1)
        b_grad = self.offsets.get(f"{name}.b", -1)
        return NormStruct(w=self._at(of.w), b=self._at(of.b), grad=self.offsets[f"{name}.w"], b_grad=b_grad)

    def _matrix(self, name: str, of: Matrix | None, transposed: bool = False) -> MatrixStruct:
        if of is None:
            return MatrixStruct(grad=-1, bias_grad=-1)
        n, k = of.w.shape
        panels = unwritten(self.library.panel_floats(n, k))
        struct = MatrixStruct(
            w=self._at(of.w.T if transposed else of.w),
            bias=self._at(of.bias),
            panels=self._at(panels),
            grad=self.offsets[f"{name}.w"],
            bias_grad=self.offsets.get(f"{name}.bias", -1),
            n=n,
            k=k,
            transposed=transposed,
        )
        self.library.pack(ctypes.byref(struct))
        return struct

    def _matrices(self, name: str, of: tuple[Matrix, ...]) -> ctypes.Array[MatrixStruct] | None:
        if not of:
            return None
        array = (MatrixStruct * len(of))(*(self._matrix(f"{name}.{i}", m) for i, m in enumerate(of)))
        self._alive.append(array)
        return array

    def _layer(self, name: str, of: Layer) -> LayerStruct:
        return LayerStruct(
            **{n: self._norm(f"{name}.{n}", getattr(of, n)) for n in ("norm1", "norm2", "q_norm", "k_norm")},
            **{
                n: self._matrix(f"{name}.{n}", getattr(of, n), self.transposed and n != "router")
                for n in ("qkv", "out", "up", "down", "router")
            },
            expert_up=self._matrices(f"{name}.expert_up", of.expert_up),
            expert_down=self._matrices(f"{name}.expert_down", of.expert_down),
            window=of.window,
            scale=of.scale,
        )

    def _model(self) -> ModelStruct:
        m = self.model
        layers = (LayerStruct * len(m.layers))(*(self._layer(f"layers.{i}", of) for i, of in enumerate(m.layers)))
        same = ("heads", "kv_heads", "head_dim", "gated", "parallel", "chosen", "normalised", "padding")
        numbers = ("eps", "embedding_scale")
        places = ("q_at", "q_step", "k_at", "k_step", "v_at", "v_step")
        return ModelStruct(
            **{name: getattr(m, name) for name in (*same, *numbers, *places)},
            **{f"round_{of.name}": number(getattr(m.rounding, of.name)) for of in fields(m.rounding)},
            layers=len(m.layers),
            hidden=m.embedding.shape[1],
            vocabulary=len(m.embedding),
            norm=NORMS.index(m.norm),
            qk_norm=QK_NORMS.index(m.qk_norm),
            rotary=2 * m.cosine.shape[1],
            activation=ACTIVATIONS.index(m.activation),
            experts=max(len(of.expert_up) for of in m.layers),
            mixtures=sum(of.router is not None for of in m.layers),
            position_entries=0 if m.positions is None else len(m.positions),
            cosine=self._at(m.cosine),
            sine=self._at(m.sine),
            embedding=self._at(m.embedding),
            positions=self._at(m.positions),
            embedding_grad=self.offsets["embedding"],
            positions_grad=self.offsets.get("positions", -1),
            last_norm=self._norm("last_norm", m.last_norm),
            layer=layers,
        )

    def cache(self, sequences: int, room: int) -> Cache:
        room, d = up_to_16(room), self.model.head_dim
        floats = len(self.model.layers) * self.model.kv_heads * sequences * room * d
        return Cache(room, unwritten(floats), unwritten(floats), [0] * sequences)

    def gradient_memory(self, sequences: int, slots: int) -> GradientMemory:
        return GradientMemory(sequences, slots, [unwritten(self.size) for _ in range(slots.bit_length())])

    def forward(
        self, cache: Cache, chunks: Sequence[Array], keep: int = KEEP_NOTHING, routes: Array | None = None
    ) -> tuple[list[Array], tuple[BatchStruct, Array, list[object]]]:
        """Hidden states of the next tokens of each sequence of a cache; and what `backward` needs.

        `routes` [tokens, mixtures, chosen] gives the experts.
        """
        lengths = [len(chunk) for chunk in chunks]
        start, total = np.concatenate([[0], np.cumsum(lengths)]), sum(lengths)
        arrays = {
            "ids": ints(np.concatenate(chunks)),
            "position": ints(np.concatenate([np.arange(n) + p for n, p in zip(lengths, cache.lengths, strict=True)])),
            "sequence": ints(np.repeat(np.arange(len(chunks)), lengths)),
            "start": ints(start),
            "base": ints(np.arange(len(chunks)) * cache.room),
            "routes": None if routes is None else ints(routes),
        }
        batch = BatchStruct(
            tokens=total,
            sequences=len(chunks),
            keys=address(cache.keys),
            values=address(cache.values),
            capacity=len(chunks) * cache.room,
            **{name: address(array) for name, array in arrays.items()},
        )
        kept = unwritten(self.library.kept_floats(ctypes.byref(self.struct), ctypes.c_long(total), keep) + 16)
        kept = kept[-(kept.ctypes.data // 4) % 16 :]  # its floats lie in lines of 64 bytes, as torch's
        hidden = unwritten(total, self.struct.hidden)
        memory = None if keep == KEEP_NOTHING else address(kept)
        arguments = (ctypes.byref(self.struct), ctypes.byref(batch), memory, keep)
        assert self.library.model_forward(*arguments, address(hidden)) == 0
        cache.lengths = [p + n for p, n in zip(cache.lengths, lengths, strict=True)]
        return [hidden[a:b] for a, b in itertools.pairwise(start)], (batch, kept, [arrays, cache])

    def backward(
        self,
        passed: tuple[BatchStruct, Array, list[object]],
        keep: int,
        d_hidden: Sequence[Array],
        memory: GradientMemory,
    ) -> None:
        """Add the gradients of the next sequences of a minibatch to `memory`."""
        batch, kept, _ = passed
        sums, slots = memory.next(batch.sequences)
        batch.slots = address(slots)
        rows = np.ascontiguousarray(np.concatenate(d_hidden))
        self.library.model_backward(
            *(ctypes.byref(self.struct), ctypes.byref(batch), address(kept), keep),
            *(address(rows), ctypes.byref(sums)),
        )

    def gradients(self, memory: GradientMemory) -> dict[str, Array]:
        """The sums over all slots, by the definition's names, once all sequences were added."""
        found = {}
        for name, w in parameters(self.model).items():
            flat = memory.levels[0][self.offsets[name] : self.offsets[name] + w.size]
            turned = self.transposed and name.endswith((".qkv.w", ".out.w", ".up.w", ".down.w"))
            found[name] = flat.reshape(w.shape[::-1]).T if turned else flat.reshape(w.shape)
        return found
