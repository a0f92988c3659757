"""Compute the known answer by the definition: the digest of `c/checks.c`, with the same made-up numbers.

`python -m tests.numerics.known_answer` prints it for `KNOWN_ANSWER` and `KNOWN_ANSWER_HIGH` of `library.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ppo_repro.numerics.definition import sampling, tokens
from ppo_repro.numerics.definition.elementary import Array, D, F, fma
from ppo_repro.numerics.definition.experts import Mixture
from ppo_repro.numerics.definition.gradients import Contributions, join_slots, slot_sums
from ppo_repro.numerics.definition.linear import linear, linear_backward
from ppo_repro.numerics.definition.model import Layer, Matrix, Model, NormWeights, Rotary
from ppo_repro.numerics.definition.network import Activations, backward, forward
from ppo_repro.numerics.definition.optimizer import Moments, Settings, adamw, sum_of_squares
from ppo_repro.numerics.definition.product import Precision
from ppo_repro.numerics.definition.rounding import Rounding, rounded

HIDDEN, HEADS, HEAD_DIM, ROTARY, INNER = 24, 2, 12, 8, 136
LAYERS, VOCABULARY, EXPERTS, CHOSEN = 2, 67, 3, 2
START = (0, 135, 139, 156, 159)
SEQUENCES, POSITIONS = range(4), 135
# slots 0, 0, 2 and 3 of 4: those of the first, second, fifth and seventh of 8 sequences
SLOTS, OF_EIGHT = 4, (0, 1, 4, 6)
ROWS, NOISE_COLUMNS, TOP_K, TOP_P = 16, 8, 40, 0.9


@dataclass(frozen=True)
class Kind:
    """What a model is made of."""

    norm: Literal["rms", "rms_offset", "layer"]
    qk_norm: Literal["none", "head", "whole"]
    activation: str
    temperature: float
    rotary: bool = True
    unrotated: int = 0
    gated: bool = True
    parallel: bool = False
    experts: bool = True
    normalised: bool = True
    transposed: bool = False
    window: int = 0
    padding: int = -1
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    score_cap: float = 0.0
    logit_divisor: float = 1.0
    logit_cap: float = 0.0
    head_norm: Literal["rms", "rms_offset"] = "rms"
    norms_before: tuple[bool, bool] = (True, True)  # of each layer
    norms_after: tuple[bool, bool] = (False, False)


KINDS = (
    Kind("rms", "head", "silu", 0.8),
    Kind("layer", "none", "gelu_tanh", 0.8, rotary=False, gated=False, parallel=True, experts=False, window=40),
    Kind("rms_offset", "whole", "gelu", 1.0, normalised=False, transposed=True, padding=3, embedding_scale=1.5),
    Kind("rms", "none", "silu", 0.8, unrotated=1, residual_scale=0.6, score_cap=0.5, logit_divisor=0.75, logit_cap=2.5),
    Kind(
        "rms_offset",
        "head",
        "silu",
        0.8,
        normalised=False,
        residual_scale=0.6,
        head_norm="rms_offset",
        norms_before=(False, True),
        norms_after=(True, True),
    ),
)


def numbered(first: int, n: int) -> Array:
    """Return n numbers of a fixed sequence in [-1, 1), float32."""
    i = np.arange(first, first + n, dtype=np.uint32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        i = (i ^ (i >> np.uint32(shift))) * np.uint32(factor)
    return (i ^ (i >> np.uint32(16))).view(np.int32).astype(F) * F(2.0**-31)


class Digest:
    """FNV-1a over the bytes of arrays."""

    def __init__(self) -> None:
        self.hash = 0xCBF29CE484222325

    def add(self, *arrays: Any) -> None:
        """Continue over the bytes of arrays."""
        for array in arrays:
            for byte in np.ascontiguousarray(array).tobytes():
                self.hash = (self.hash ^ byte) * 0x100000001B3 % 2**64


class Weights:
    """The parameters of a model one after the other, and for each path in the definition where the parameter lies."""

    def __init__(self, kind: Kind, precision: Precision) -> None:
        self.precision: Precision = precision
        self.kind, self.flat, self.places = kind, np.zeros(0, F), dict[str, tuple[int, tuple[int, ...], bool]]()

    def some(self, path: str, *shape: int, center: float = 0.0, size: float = 0.3, transposed: bool = False) -> Array:
        """Return numbers center + size x [-1, 1); a transposed matrix lies in memory the other way round."""
        at, n = len(self.flat), int(np.prod(shape))
        numbers = fma(F(size), numbered(at, n), F(center))
        self.flat = np.concatenate([self.flat, numbers])
        self.places[path] = at, shape, transposed
        return numbers.reshape(shape[::-1]).T if transposed else numbers.reshape(shape)

    def norm(self, path: str, n: int, biased: bool = False) -> NormWeights:
        w = self.some(f"{path}.w", n, center=1.0)
        return NormWeights(w, self.some(f"{path}.b", n) if biased else None)

    def matrix(self, path: str, n: int, k: int) -> Matrix:
        w = self.some(f"{path}.w", n, k, transposed=self.kind.transposed)
        return Matrix(w, self.some(f"{path}.bias", n), self.precision)

    def layer(self, index: int, rotary: Rotary | None) -> Layer:
        kind, path, is_last = self.kind, f"layers.{index}", index == LAYERS - 1
        up = 2 * INNER if kind.gated else INNER
        norms = [("norm1", "norm2")] if kind.norms_before[index] else []
        norms += [("norm1_after", "norm2_after")] if kind.norms_after[index] else []
        members: dict[str, Any] = {
            name: self.norm(f"{path}.{name}", HIDDEN, kind.norm == "layer") for pair in norms for name in pair
        }
        if kind.qk_norm != "none":
            for name, heads in (("q_norm", HEADS), ("k_norm", 1)):
                width = HEAD_DIM * (heads if kind.qk_norm == "whole" else 1)
                members[name] = self.norm(f"{path}.{name}", width)
        members["qkv"] = self.matrix(f"{path}.qkv", (HEADS + 2) * HEAD_DIM, HIDDEN)
        members["out"] = self.matrix(f"{path}.out", HIDDEN, HEADS * HEAD_DIM)
        if is_last and kind.experts:
            experts = [
                (
                    self.matrix(f"{path}.expert_up.{e}", up, HIDDEN),
                    self.matrix(f"{path}.expert_down.{e}", HIDDEN, INNER),
                )
                for e in range(EXPERTS)
            ]
            members["expert_up"], members["expert_down"] = zip(*experts, strict=True)
            members["router"] = self.matrix(f"{path}.router", EXPERTS, HIDDEN)
        else:
            members["up"] = self.matrix(f"{path}.up", up, HIDDEN)
            members["down"] = self.matrix(f"{path}.down", HIDDEN, INNER)
        members |= {"window": kind.window if is_last else 0, "rotary": rotary if index >= kind.unrotated else None}
        return Layer(**members, scale=0.25, score_cap=kind.score_cap)

    def model(self) -> tuple[Model, Matrix]:
        """Return the model and its head."""
        kind = self.kind
        embedding = self.some("embedding", VOCABULARY, HIDDEN, size=1.0)
        rotary = positions = None
        if kind.rotary:
            rotary = Rotary(*(self.some(name, POSITIONS, ROTARY // 2, size=1.0) for name in ("cosine", "sine")))
        else:
            positions = self.some("positions", POSITIONS, HIDDEN, size=1.0)
        layers = tuple(self.layer(index, rotary) for index in range(LAYERS))
        last_norm = self.norm("last_norm", HIDDEN, kind.norm == "layer")
        model = Model(
            heads=HEADS, kv_heads=1, head_dim=HEAD_DIM, eps=1e-5, embedding=embedding, layers=layers,
            last_norm=last_norm, q_at=0, q_step=HEAD_DIM, k_at=HEADS * HEAD_DIM, k_step=HEAD_DIM,
            v_at=(HEADS + 1) * HEAD_DIM, v_step=HEAD_DIM, embedding_scale=kind.embedding_scale, norm=kind.norm,
            residual_scale=kind.residual_scale,
            qk_norm=kind.qk_norm, head_norm=kind.head_norm, activation=kind.activation, gated=kind.gated,
            parallel=kind.parallel, chosen=CHOSEN, normalised=kind.normalised, padding=kind.padding,
            positions=positions,
        )  # fmt: skip
        return model, self.matrix("head", VOCABULARY, HIDDEN)

    def gradient(self, parts: Sequence[Contributions]) -> Array:
        """Return the gradients of the minibatch, in the order of the parameters; zeros for what is not trained."""
        flat = np.zeros_like(self.flat)
        of_eight: list[Contributions] = [{} for _ in range(8)]
        for i, part in zip(OF_EIGHT, parts, strict=True):
            of_eight[i] = part
        for path, (at, shape, transposed) in self.places.items():
            sums = slot_sums(shape, [part.get(path, []) for part in of_eight], SLOTS)
            gradient = join_slots(sums)
            flat[at : at + gradient.size] = (gradient.T if transposed else gradient).ravel()
        return flat


def experts_of(of: Activations) -> Array:
    """Return the experts [T, k] of the last layer."""
    mixture = of.layers[-1].mlp
    assert isinstance(mixture, Mixture)
    return mixture.experts.astype(np.int32)


def softmax_rows(z: Array, temperature: float) -> Array:
    """Return the members of the C struct `Softmax` of each row of logits, float64 [n, 4]; row sums are not rounded."""
    s = tokens.softmax(z, temperature, None)
    return np.concatenate([s.top, s.total, s.log_total, tokens.expectation(s, s.shifted.astype(D))], 1)


def add_training(digest: Digest, weights: Weights, model: Model, head: Matrix, targets: Array) -> Array:
    """Add log-probs, entropies, gradients and two steps of AdamW; return the logits of all sequences."""
    kind, parts, logits = weights.kind, list[Contributions](), list[Array]()
    passed = [forward(model, ids_of(s)) for s in SEQUENCES]
    for first, after in ((0, 1), (1, 4)):
        rows = slice(START[first], START[after])
        hidden = [passed[s].hidden for s in range(first, after)]
        z = tokens.scale_logits(linear(np.concatenate(hidden), head), kind.logit_divisor, kind.logit_cap)
        digest.add(z, *tokens.statistics(z, targets[rows], kind.temperature, None), softmax_rows(z, kind.temperature))
        n = len(z)
        d_logprob, d_entropy = numbered(rows.start, n), np.full(n, F(0.01))
        d = tokens.statistics_gradient(z, targets[rows], kind.temperature, None, d_logprob, d_entropy)
        d = tokens.scale_logits_gradient(z, d, kind.logit_divisor, kind.logit_cap)
        for s in range(first, after):
            own = slice(START[s] - rows.start, START[s + 1] - rows.start)
            grads: Contributions = {}
            d_hidden = linear_backward(grads, "head", head, d[own], passed[s].hidden, np.arange(len(d[own])))
            parts.append(grads | backward(model, passed[s], d_hidden))
        logits.append(z)
    if kind.experts:
        digest.add(*(experts_of(of) for of in passed))
    gradient = weights.gradient(parts)
    square = sum_of_squares(gradient)
    norm = float(np.sqrt(square))
    clipped = 0.5 * (float(F(norm)) + 1e-6)
    settings = Settings(learning_rate=0.001, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=1.0, max_grad_norm=clipped)
    moments = Moments(weights.flat, np.zeros_like(gradient), np.zeros_like(gradient))
    for _ in range(2):
        moments = adamw(moments, gradient, settings, norm, 1)
    digest.add(gradient, np.float64(square), moments.p)
    return np.concatenate(logits)


def ids_of(s: int) -> Array:
    """Return the tokens of sequence s."""
    return 7 * np.arange(START[s], START[s + 1]) % VOCABULARY


def add_decoding(digest: Digest, kind: Kind, model: Model) -> None:
    """Add the hidden states of the last tokens, which go to given experts."""
    t = 0
    for s, first in zip(SEQUENCES, (128, 3, 16, 2), strict=True):
        ids, routes = ids_of(s), None
        n = len(ids) - first
        if kind.experts:
            routes = experts_of(forward(model, ids)).copy()
            routes[first:] = np.stack([np.arange(t, t + n) % (EXPERTS - 1), np.full(n, EXPERTS - 1)], -1)
        digest.add(forward(model, ids, None if routes is None else routes[None]).hidden[first:])
        t += n


def add_samples(
    digest: Digest, kind: Kind, z: Array, targets: Array, kept: Sequence[tuple[Array, Array] | None]
) -> None:
    """Add sampled tokens, then their log-probs."""
    positions = np.concatenate([np.arange(START[s + 1] - START[s]) for s in SEQUENCES])
    sampled = [
        sampling.sample(z[i], int(targets[i]), int(positions[i]), kind.temperature, kept[i]) for i in range(len(kept))
    ]
    digest.add(np.array([token for token, _ in sampled], np.int64), np.array([p for _, p in sampled], F))


def add_cut_rows(digest: Digest, kind: Kind, z: Array, targets: Array) -> None:
    """Add cuts of the first rows of logits; samples, statistics and divergences over the tokens that are left."""
    cuts = [sampling.cut(row, TOP_K, TOP_P) for row in z[:ROWS] / F(kind.temperature)]
    eligible, rank, log_kept = (np.stack(x) for x in zip(*cuts, strict=True))
    digest.add(eligible, rank, log_kept)
    add_samples(digest, kind, z, targets, list(zip(eligible, rank, strict=True)))
    p, q, some = z[:ROWS], z[ROWS : 2 * ROWS], z.ravel()
    digest.add(*tokens.statistics(p, targets[:ROWS], kind.temperature, eligible))
    d = some[:ROWS], some[ROWS : 2 * ROWS]
    digest.add(tokens.statistics_gradient(p, targets[:ROWS], kind.temperature, eligible, *d))
    digest.add(tokens.divergence(p, q, kind.temperature, eligible))
    digest.add(tokens.divergence_gradient(p, q, kind.temperature, eligible, some[:ROWS]))


def known_answer(precision: Precision) -> int:
    """Return the digest of all models in one precision."""
    digest = Digest()
    targets = 11 * np.arange(START[-1]) % VOCABULARY
    for kind in KINDS:
        weights = Weights(kind, precision)
        model, head = weights.model()
        z = add_training(digest, weights, model, head, targets)
        add_decoding(digest, kind, model)
        formats = replace(model, rounding=Rounding("bfloat16", "float8_e4m3", "int8"))
        digest.add(*(forward(formats, ids_of(s)).hidden for s in SEQUENCES[1:]))
        add_samples(digest, kind, z, targets, [None] * len(z))
        add_cut_rows(digest, kind, z, targets)
        columns = np.arange(NOISE_COLUMNS)
        digest.add(*(sampling.normal_noise(int(targets[i]), i, columns) for i in range(ROWS)))
        for form in ("bfloat16", "float16", "float8_e4m3", "float8_e5m2", "int8"):
            digest.add(rounded(form, z[:ROWS]))
    return digest.hash


if __name__ == "__main__":
    print(f"{known_answer('highest'):#x}, {known_answer('high'):#x}")
