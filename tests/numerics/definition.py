"""The law of sums, written out slowly in NumPy: one function a rule, and a network that is made of these functions.

Every kernel in C computes the same bits. This file shares no line with the kernels, and is short rather than fast.
Arrays are float32 where nothing else is said; T: positions of one sequence, H: width of the hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal

import numpy as np

from tests.numerics.definition_elementary import Array, D, F, erf32, exp32, fma, sigmoid32, sin_cos64, tanh32
from tests.numerics.definition_rounding import Rounding, rounded

BLOCK, LANES = 128, 16
EVERYWHERE = ...

# ---------------------------------------------------------------------------------------------- sums and products


def chain(x: Array, w: Array) -> Array:
    """acc = fma(x[.., m, k], w[.., n, k], acc) from +0 by rising k; x [.., M, K], w [.., N, K] -> [.., M, N]."""
    acc = np.zeros((*x.shape[:-1], w.shape[-2]), F)
    for k in range(x.shape[-1]):
        acc = fma(x[..., :, None, k], w[..., None, :, k], acc)
    return acc


def product(x: Array, w: Array) -> Array:
    """y[m, n] = sum_k x[m, k] w[n, k]: chains of 128 terms, added in order from +0; shapes as `chain`."""
    y = np.zeros((*x.shape[:-1], w.shape[-2]), F)
    for start in range(0, x.shape[-1], BLOCK):
        k = slice(start, start + BLOCK)
        y = y + chain(x[..., k], w[..., k])
    return y


def row_sum(a: Array, b: Array | None = None) -> Array:
    """sum_i a[.., i] b[.., i] in float64: lane l sums i = l, l + 16, .. in order; halves are joined."""
    terms = a.astype(D) if b is None else a.astype(D) * b.astype(D)
    lanes = np.zeros((*terms.shape[:-1], LANES), D)
    for start in range(0, terms.shape[-1], LANES):
        part = terms[..., start : start + LANES]
        lanes[..., : part.shape[-1]] += part
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def row_mean(a: Array, b: Array | None = None) -> Array:
    """The float64 sum of a row's products over their number, rounded to float32; [.., 1]."""
    return (row_sum(a, b) / a.shape[-1]).astype(F)[..., None]


# ------------------------------------------------------------------------------------------- gradients of weights

# What a sequence adds to a gradient: (where, addend) in order, for total[where] = total[where] + addend.
Addends = list[tuple[object, Array]]
Contributions = dict[str, Addends]


def blocks_of(position: Array) -> list[Array]:
    """The rows of each block of 128 positions, in order; position [rows] rises."""
    block = position // BLOCK
    return [np.flatnonzero(block == b) for b in np.unique(block)]


def weight_addends(dy: Array, x: Array, position: Array) -> Addends:
    """dW[n, k] = sum_t dy[t, n] x[t, k]: one chain by rising position for each block; dy [rows, N], x [rows, K]."""
    return [(EVERYWHERE, chain(dy[rows].T, x[rows].T)) for rows in blocks_of(position)]


def column_addends(dy: Array, x: Array | None, position: Array) -> Addends:
    """db[c] = sum_t dy[t, c], or dw[c] = sum_t dy[t, c] x[t, c]: each block in float64, term by term, rounded once.

    dy and x are [rows, C], or [rows, heads, C]: then the heads of a row follow one another.
    """
    addends: Addends = []
    for rows in blocks_of(position):
        acc = np.zeros(dy.shape[-1:], D)
        for row in rows:
            for index in np.ndindex(dy.shape[1:-1]):
                acc += dy[row][index].astype(D) * (1.0 if x is None else x[row][index].astype(D))
        addends.append((EVERYWHERE, acc.astype(F)))
    return addends


def row_addends(dx: Array, ids: Array) -> Addends:
    """d table[id] = sum of dx[t] over the rows t with this id: row by row, without blocks; dx [rows, H], ids [rows]."""
    return list(zip((int(i) for i in ids), dx, strict=True))


def slot_of(sequence: int, sequences: int, slots: int) -> int:
    """The slot of a sequence of S: slot s has the sequences floor(s S / slots) .. floor((s + 1) S / slots) - 1."""
    return ((sequence + 1) * slots - 1) // sequences


def join_slots(sums: Sequence[Array]) -> Array:
    """((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))."""
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def slot_sums(shape: tuple[int, ...], sequences: Sequence[Addends], slots: int) -> list[Array]:
    """Each slot's sum of its sequences' addends, one after the other from +0."""
    sums = [np.zeros(shape, F) for _ in range(slots)]
    for index, addends in enumerate(sequences):
        total = sums[slot_of(index, len(sequences), slots)]
        for where, addend in addends:
            total[where] = total[where] + addend
    return sums


# -------------------------------------------------------------------------------------------------------- a model


@dataclass(frozen=True)
class NormWeights:
    """w [C], and b [C] of a LayerNorm."""

    w: Array
    b: Array | None = None


@dataclass(frozen=True)
class Matrix:
    """A linear layer y = x w^T + bias; w [N, K], bias [N]."""

    w: Array
    bias: Array | None = None


@dataclass(frozen=True)
class Layer:
    """The weights of a decoder layer: an MLP (`up`, `down`) or a mixture of experts (`router`, ..) after attention.

    `up` is [2 I, H], the rows of gates first, where the MLP is gated, else [I, H].
    """

    norm1: NormWeights
    norm2: NormWeights
    qkv: Matrix
    out: Matrix
    q_norm: NormWeights | None = None
    k_norm: NormWeights | None = None
    up: Matrix | None = None
    down: Matrix | None = None
    router: Matrix | None = None
    expert_up: tuple[Matrix, ...] = ()
    expert_down: tuple[Matrix, ...] = ()
    window: int = 0  # keys that a query sees, its own included; 0: all
    scale: float = 1.0  # of attention scores


@dataclass(frozen=True)
class Model:
    """A transformer below its head. Head h of queries is columns q_at + h q_step .. + head_dim - 1 of a row of qkv."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    embedding: Array  # [V, H]
    layers: tuple[Layer, ...]
    last_norm: NormWeights
    q_at: int
    q_step: int
    k_at: int
    k_step: int
    v_at: int
    v_step: int
    embedding_scale: float = 1.0
    norm: Literal["rms", "rms_offset", "layer"] = "rms"
    qk_norm: Literal["none", "head", "whole"] = "none"
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    gated: bool = True
    parallel: bool = False
    cosine: Array = field(default_factory=lambda: np.zeros((0, 0), F))  # [positions, rotary / 2]; empty: no rotation
    sine: Array = field(default_factory=lambda: np.zeros((0, 0), F))
    positions: Array | None = None  # learned, [positions, H]
    chosen: int = 0  # experts of a token
    normalised: bool = False  # routing weights are a softmax over the chosen experts, not over all
    padding: int = -1  # a token whose embedding takes no gradient
    rounding: Rounding = field(default_factory=Rounding)


def parameters(model: Model) -> dict[str, Array]:
    """Every trained array of a model by its path, such as `layers.0.qkv.bias` or `layers.1.expert_up.3.w`."""
    found: dict[str, Array] = {}

    def walk(part: object, path: str) -> None:
        if isinstance(part, np.ndarray):
            found[path] = part
        elif isinstance(part, tuple):
            for index, item in enumerate(part):
                walk(item, f"{path}.{index}")
        elif isinstance(part, (Layer, Matrix, NormWeights)):
            for each in fields(part):
                walk(getattr(part, each.name), f"{path}.{each.name}")

    for name in ("embedding", "positions", "layers", "last_norm"):
        walk(getattr(model, name), name)
    return found


# ------------------------------------------------------------------------------------------------------- the parts


def linear(x: Array, matrix: Matrix) -> Array:
    """x w^T, then + bias."""
    y = product(x, matrix.w)
    return y if matrix.bias is None else y + matrix.bias


def linear_backward(grads: Contributions, name: str, matrix: Matrix, dy: Array, x: Array, position: Array) -> Array:
    """dx[t, k] = sum_n dy[t, n] w[n, k]: the product's rule over n. Adds the gradients of w and bias to `grads`."""
    grads[f"{name}.w"] = weight_addends(dy, x, position)
    if matrix.bias is not None:
        grads[f"{name}.bias"] = column_addends(dy, None, position)
    return product(dy, matrix.w.T)


def layer_linear(model: Model, x: Array, matrix: Matrix) -> Array:
    """`linear`, rounded where the model rounds activations."""
    return rounded(model.rounding.activations, linear(x, matrix))


@dataclass(frozen=True)
class Normed:
    """y, and what the backward pass needs: x_hat as y but without weights, and r the factor of x; [.., C], [.., 1]."""

    y: Array
    x_hat: Array
    r: Array


def norm_factor(kind: str, weights: NormWeights) -> Array:
    """The factor of x_hat; 1 + w is rounded first."""
    return weights.w + F(1) if kind == "rms_offset" else weights.w


def norm(kind: str, x: Array, weights: NormWeights, eps: float) -> Normed:
    """r = float32(1 / sqrt(mean x^2 + eps)) with the mean and the root in float64, x_hat = x r, y = x_hat w.

    LayerNorm: x - float32(mean x) in place of x, y = fma(x_hat, w, b).
    """
    if kind == "layer":
        x = x - row_mean(x)
    r = (1.0 / np.sqrt(row_sum(x, x) / x.shape[-1] + D(F(eps)))).astype(F)[..., None]
    x_hat = x * r
    if kind == "layer":
        return Normed(fma(x_hat, weights.w, weights.b), x_hat, r)
    return Normed(x_hat * norm_factor(kind, weights), x_hat, r)


def norm_backward(
    grads: Contributions, name: str, kind: str, weights: NormWeights, dy: Array, of: Normed, position: Array
) -> Array:
    """dx = r fma(-x_hat, mean(g x_hat), g), g = dy w; LayerNorm: r (fma(..) - mean(g)). Adds the weights' gradients."""
    grads[f"{name}.w"] = column_addends(dy, of.x_hat, position)
    if weights.b is not None:
        grads[f"{name}.b"] = column_addends(dy, None, position)
    g = dy * norm_factor(kind, weights)
    centred = fma(-of.x_hat, row_mean(g, of.x_hat), g)
    return of.r * (centred - row_mean(g) if kind == "layer" else centred)


def layer_norm(model: Model, x: Array, weights: NormWeights) -> Normed:
    """The model's norm of rows of the residual stream; y rounded where the model rounds activations."""
    of = norm(model.norm, x, weights, model.eps)
    return replace(of, y=rounded(model.rounding.activations, of.y))


def rotate(x: Array, cosine: Array, sine: Array) -> Array:
    """(a, b) -> (a c - b s, b c + a s) for the first two halves of the rotating columns; x [T, heads, D], c [T, R / 2].

    Products and sums are rounded one by one. Columns from R on stay. With -sine: the backward pass.
    """
    half = cosine.shape[1]
    c, s = cosine[:, None], sine[:, None]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * c - b * s, b * c + a * s, rest], -1)


def activate(kind: str, x: Array) -> tuple[Array, Array]:
    """An activation and its derivative.

    SiLU: x sigma(x), and sigma fma(x, 1 - sigma, 1).
    GELU: (x / 2) (1 + erf(x / sqrt(2))). Its tanh form: (x / 2) (1 + t), t = tanh(sqrt(2 / pi) (x + 0.044715 x^3)).
    """
    half = F(0.5) * x
    if kind == "gelu":
        cdf = F(1) + erf32(x * F(0.707106781))
        return half * cdf, fma(x * F(0.398942280), exp32((F(-0.5) * x) * x), F(0.5) * cdf)
    if kind == "gelu_tanh":
        root, cubic = F(0.797884561), F(0.044715)
        t = tanh32(root * fma((cubic * x) * x, x, x))
        slope = root * fma((F(3) * cubic) * x, x, F(1))
        return half * (F(1) + t), fma(half * (F(1) - t * t), slope, F(0.5) * (F(1) + t))
    sigma = sigmoid32(x)
    return x * sigma, sigma * fma(x, F(1) - sigma, F(1))


# ------------------------------------------------------------------------------------------------------ attention


@dataclass(frozen=True)
class Attention:
    """Rotated queries [heads, T, D], keys and values [kv_heads, T, D]; each query's output, largest score and sum."""

    q: Array
    k: Array
    v: Array
    out: Array  # [heads, T, D]
    top: Array  # [heads, T, 1]
    total: Array  # [heads, T, 1]


def visible(positions: int, window: int) -> Array:
    """Whether query t sees key j, bool [T, T]: the past and itself, or the last `window` of these."""
    t, j = np.arange(positions)[:, None], np.arange(positions)
    return (j <= t) & ((j > t - window) | (window == 0))


def each_head(x: Array, like: Array) -> Array:
    """Heads of keys or values, repeated for the queries that share them."""
    return np.repeat(x, len(like) // len(x), 0)


def attend(q: Array, k: Array, v: Array, scale: float, window: int) -> Attention:
    """p = exp(scale q.k - largest), 0 for keys that are not seen; out = (sum_j p v) / float32(sum_j p).

    All sums run over key positions from 0 on: products in blocks of 128, the sum of p in 16 lanes.
    """
    k_each, v_each = each_head(k, q), each_head(v, q)
    scores, seen = product(q, k_each) * F(scale), visible(q.shape[1], window)
    top = np.where(seen, scores, -np.inf).max(-1, keepdims=True).astype(F)
    p = np.where(seen, exp32(scores - top), F(0))
    total = row_sum(p).astype(F)[..., None]
    return Attention(q, k, v, product(p, v_each.swapaxes(-1, -2)) / total, top, total)


def attend_backward(of: Attention, d_out: Array, scale: float, window: int) -> tuple[Array, Array, Array]:
    """dq, dk, dv: p = exp(..) (1 / total), ds = p (d_out.v - delta), delta = float32(out . d_out).

    dq = (sum_j ds k) scale over blocks of key positions. dk = (sum_t ds q) scale and dv = sum_t p d_out over blocks of
    query positions, block after block and head after head of those that share a key.
    """
    k, v, seen = each_head(of.k, of.q), each_head(of.v, of.q), visible(of.q.shape[1], window)
    scores = product(of.q, k) * F(scale)
    p = np.where(seen, exp32(scores - of.top) * (F(1) / of.total), F(0))
    delta = row_sum(of.out, d_out).astype(F)[..., None]
    ds = np.where(seen, p * (product(d_out, v) - delta), F(0))
    dq = product(ds, k.swapaxes(-1, -2)) * F(scale)
    return dq, _over_queries(ds, of.q, len(of.k)) * F(scale), _over_queries(p, d_out, len(of.k))


def _over_queries(x: Array, y: Array, kv_heads: int) -> Array:
    """sum of x[h, t, j] y[h, t, d] over the heads h of each group and the queries t; [kv_heads, T, D]."""
    x, y = (a.reshape(kv_heads, -1, *a.shape[1:]) for a in (x, y))
    total = np.zeros((kv_heads, x.shape[3], y.shape[3]), F)
    for head in range(x.shape[1]):
        for rows in blocks_of(np.arange(x.shape[2])):
            total = total + chain(x[:, head, rows].swapaxes(-1, -2), y[:, head, rows].swapaxes(-1, -2))
    return total


def columns_of_heads(at: int, step: int, heads: int, head_dim: int) -> Array:
    """The columns of each head in a row of qkv, [heads, head_dim]."""
    return at + np.arange(heads)[:, None] * step + np.arange(head_dim)


@dataclass(frozen=True)
class AttentionBlock:
    """x [T, H] of the qkv layer, norms of queries and keys if the model has them, attention, its rows [T, heads D]."""

    x: Array
    q_normed: Normed | None
    k_normed: Normed | None
    attention: Attention
    mixed: Array


def _head_columns(model: Model) -> tuple[Array, Array, Array]:
    d = model.head_dim
    return (
        columns_of_heads(model.q_at, model.q_step, model.heads, d),
        columns_of_heads(model.k_at, model.k_step, model.kv_heads, d),
        columns_of_heads(model.v_at, model.v_step, model.kv_heads, d),
    )


def _norm_heads(model: Model, x: Array, weights: NormWeights | None) -> tuple[Array, Normed | None]:
    """Queries or keys [T, heads, D] after their norm: of each head, or of all heads as one row."""
    if weights is None:
        return x, None
    normed = norm("rms", x.reshape(len(x), -1, len(weights.w)), weights, model.eps)
    return normed.y.reshape(x.shape), normed


def attention_block(model: Model, layer: Layer, x: Array) -> tuple[Array, AttentionBlock]:
    """Attention of normed rows x [T, H], after its output layer; and what the backward pass needs."""
    r = model.rounding
    x = rounded(r.inputs, x)
    raw, (q_columns, k_columns, v_columns) = layer_linear(model, x, layer.qkv), _head_columns(model)
    cosine, sine = model.cosine[: len(x)], model.sine[: len(x)]
    q, q_normed = _norm_heads(model, raw[:, q_columns], layer.q_norm)
    k, k_normed = _norm_heads(model, raw[:, k_columns], layer.k_norm)
    if cosine.size:
        q, k = rotate(q, cosine, sine), rotate(k, cosine, sine)
    q, k = (rounded(r.activations, a, scaled=False) for a in (q, k))
    k, v = (rounded(r.cache, a, scaled=False) for a in (k, raw[:, v_columns]))
    attention = attend(*(a.swapaxes(0, 1) for a in (q, k, v)), layer.scale, layer.window)
    mixed = rounded(r.inputs, rounded(r.activations, attention.out.swapaxes(0, 1).reshape(len(x), -1)))
    return layer_linear(model, mixed, layer.out), AttentionBlock(x, q_normed, k_normed, attention, mixed)


def attention_block_backward(
    grads: Contributions, name: str, model: Model, layer: Layer, dy: Array, of: AttentionBlock, position: Array
) -> Array:
    """The gradient of `attention_block`'s x."""
    d_mixed = linear_backward(grads, f"{name}.out", layer.out, dy, of.mixed, position)
    d_out = d_mixed.reshape(len(dy), model.heads, model.head_dim).swapaxes(0, 1)
    d_heads = attend_backward(of.attention, d_out, layer.scale, layer.window)
    dq, dk, dv = (a.swapaxes(0, 1) for a in d_heads)
    cosine, sine = model.cosine[: len(dy)], model.sine[: len(dy)]
    if cosine.size:
        dq, dk = rotate(dq, cosine, -sine), rotate(dk, cosine, -sine)
    if of.q_normed is not None and of.k_normed is not None:
        dq = _norm_heads_backward(grads, f"{name}.q_norm", layer.q_norm, dq, of.q_normed, position)
        dk = _norm_heads_backward(grads, f"{name}.k_norm", layer.k_norm, dk, of.k_normed, position)
    d_raw = np.zeros((len(dy), len(layer.qkv.w)), F)
    for columns, d in zip(_head_columns(model), (dq, dk, dv), strict=True):
        d_raw[:, columns] = d
    return linear_backward(grads, f"{name}.qkv", layer.qkv, d_raw, of.x, position)


def _norm_heads_backward(
    grads: Contributions, name: str, weights: NormWeights | None, dy: Array, of: Normed, position: Array
) -> Array:
    assert weights is not None
    return norm_backward(grads, name, "rms", weights, dy.reshape(of.y.shape), of, position).reshape(dy.shape)


# ------------------------------------------------------------------------------------------------ MLP and experts


@dataclass(frozen=True)
class Mlp:
    """Rows x [rows, H], before the activation [rows, I or 2 I], and after [rows, I]."""

    x: Array
    up: Array
    act: Array


def mlp(model: Model, up: Matrix, down: Matrix, x: Array) -> tuple[Array, Mlp]:
    """down(act(up x)), or down(act(gate x) (up x)); and what the backward pass needs."""
    r = model.rounding
    x = rounded(r.inputs, x)
    raised = layer_linear(model, x, up)
    gate, factor = np.split(raised, 2, -1) if model.gated else (raised, None)
    act = activate(model.activation, gate)[0]
    if factor is not None:
        act = act * factor
    act = rounded(r.inputs, rounded(r.activations, act))
    return layer_linear(model, act, down), Mlp(x, raised, act)


def mlp_backward(
    grads: Contributions,
    names: tuple[str, str],
    model: Model,
    up: Matrix,
    down: Matrix,
    dy: Array,
    of: Mlp,
    position: Array,
) -> Array:
    """The gradient of x. Gated: d up = d act(gate), d gate = (d up) act'(gate), with d the gradient of the product."""
    d = linear_backward(grads, names[1], down, dy, of.act, position)
    if model.gated:
        gate, factor = np.split(of.up, 2, -1)
        value, slope = activate(model.activation, gate)
        d = np.concatenate([(d * factor) * slope, d * value], -1)
    else:
        d = d * activate(model.activation, of.up)[1]
    return linear_backward(grads, names[0], up, d, of.x, position)


@dataclass(frozen=True)
class Mixture:
    """Rows x [T, H], their experts [T, k] by rising index, softmax p of the router and routing weights [T, k].

    p is [T, k] over the chosen experts where the model normalises, else [T, E]. For each expert its rows' indices,
    rank (its column in `experts`), outputs and MLP.
    """

    x: Array
    experts: Array
    p: Array
    weights: Array
    parts: tuple[tuple[Array, Array, Array, Mlp], ...]


def choose(logits: Array, count: int) -> Array:
    """The `count` largest of each row, by rising index [T, k]; of equal logits the lower index wins."""
    return np.sort(np.argsort(-logits, -1, kind="stable")[:, :count], -1)


def softmax(logits: Array) -> Array:
    """exp(z - largest) / float32(sum)."""
    e = exp32(logits - logits.max(-1, keepdims=True))
    return e / row_sum(e).astype(F)[..., None]


def mixture(model: Model, layer: Layer, x: Array, given: Array | None) -> tuple[Array, Mixture]:
    """out = sum of w[e] expert_e(x) by rising e, a chain of fma(w, y, acc) from +0; `given` [T, k]: no choice here."""
    assert layer.router is not None
    logits = layer_linear(model, x, layer.router)
    experts = choose(logits, model.chosen) if given is None else given
    p = softmax(np.take_along_axis(logits, experts, -1) if model.normalised else logits)
    weights = rounded(model.rounding.activations, p if model.normalised else np.take_along_axis(p, experts, -1))
    out, parts = np.zeros_like(x), []
    for e, (up, down) in enumerate(zip(layer.expert_up, layer.expert_down, strict=True)):
        rows, rank = np.nonzero(experts == e)
        y, inside = mlp(model, up, down, x[rows])
        out[rows] = fma(weights[rows, rank][:, None], y, out[rows])
        parts.append((rows, rank, y, inside))
    return rounded(model.rounding.activations, out), Mixture(x, experts, p, weights, tuple(parts))


def mixture_backward(
    grads: Contributions, name: str, model: Model, layer: Layer, dy: Array, of: Mixture, position: Array
) -> Array:
    """The gradient of x: the router's, then + each chosen expert's, by rising index.

    d y_e = w dy; g = d w_e = float32(y_e . dy); d logits = p (g - float32(sum p g)), g = 0 where not chosen.
    """
    assert layer.router is not None
    g = np.zeros_like(of.weights)
    for rows, rank, y, _ in of.parts:
        g[rows, rank] = row_sum(y, dy[rows]).astype(F)
    mean = row_sum(of.weights, g).astype(F)[:, None]
    d_logits = np.zeros((len(dy), len(layer.router.w)), F)
    np.put_along_axis(d_logits, of.experts, of.p * (g - mean) if model.normalised else g, -1)
    if not model.normalised:
        d_logits = of.p * (d_logits - mean)
    dx = linear_backward(grads, f"{name}.router", layer.router, d_logits, of.x, position)
    for e, (rows, rank, _, inside) in enumerate(of.parts):
        d = of.weights[rows, rank][:, None] * dy[rows]
        names = (f"{name}.expert_up.{e}", f"{name}.expert_down.{e}")
        up, down = layer.expert_up[e], layer.expert_down[e]
        dx[rows] = dx[rows] + mlp_backward(grads, names, model, up, down, d, inside, position[rows])
    return dx


# ---------------------------------------------------------------------------------------------------- the network


@dataclass(frozen=True)
class LayerActivations:
    """What one layer computed."""

    normed1: Normed
    attention: AttentionBlock
    normed2: Normed
    mlp: Mlp | Mixture


@dataclass(frozen=True)
class Activations:
    """What a sequence's forward pass computed; `hidden` [T, H] are the hidden states after the last norm."""

    ids: Array
    layers: tuple[LayerActivations, ...]
    last: Normed

    @property
    def hidden(self) -> Array:
        return self.last.y


def embed(model: Model, ids: Array) -> Array:
    """Rows of the embedding times its scale, then + rows of learned positions."""
    x = model.embedding[ids] * F(model.embedding_scale)
    if model.positions is not None:
        x = x + model.positions[: len(ids)]
    return rounded(model.rounding.activations, x, scaled=False)


def forward(model: Model, ids: Sequence[int], routes: Array | None = None) -> Activations:
    """The network for one sequence: x + attention(norm1 x), then + mlp(norm2 of this sum, or of x where parallel).

    `routes` [layers with experts, T, k] gives the experts of each token, by rising index; None: routers choose.
    """
    x, layers, given = embed(model, np.asarray(ids)), [], iter(() if routes is None else routes)
    form = model.rounding.activations
    for layer in model.layers:
        normed1 = layer_norm(model, x, layer.norm1)
        attended, attention = attention_block(model, layer, normed1.y)
        after = rounded(form, x + attended)
        normed2 = layer_norm(model, x if model.parallel else after, layer.norm2)
        inside: Mlp | Mixture
        if layer.router is not None:
            raised, inside = mixture(model, layer, normed2.y, next(given, None))
        else:
            assert layer.up is not None and layer.down is not None
            raised, inside = mlp(model, layer.up, layer.down, normed2.y)
        x = rounded(form, after + raised)
        layers.append(LayerActivations(normed1, attention, normed2, inside))
    return Activations(np.asarray(ids), tuple(layers), layer_norm(model, x, model.last_norm))


def backward(model: Model, of: Activations, d_hidden: Array) -> Contributions:
    """What one sequence adds to the gradient of every parameter, from the gradient [T, H] of its hidden states.

    With d the gradient of a layer's output: d2 = d + norm2's; attention gets d2, or d where parallel; d2 + norm1's is
    the gradient of its input.
    """
    grads: Contributions = {}
    position = np.arange(len(of.ids))
    d = norm_backward(grads, "last_norm", model.norm, model.last_norm, d_hidden, of.last, position)
    for index in reversed(range(len(model.layers))):
        name, layer, seen = f"layers.{index}", model.layers[index], of.layers[index]
        if isinstance(seen.mlp, Mixture):
            dh = mixture_backward(grads, name, model, layer, d, seen.mlp, position)
        else:
            assert layer.up is not None and layer.down is not None
            names = (f"{name}.up", f"{name}.down")
            dh = mlp_backward(grads, names, model, layer.up, layer.down, d, seen.mlp, position)
        dh = norm_backward(grads, f"{name}.norm2", model.norm, layer.norm2, dh, seen.normed2, position)
        d2 = d + dh
        dh = attention_block_backward(grads, name, model, layer, d if model.parallel else d2, seen.attention, position)
        dh = norm_backward(grads, f"{name}.norm1", model.norm, layer.norm1, dh, seen.normed1, position)
        d = d2 + dh
    if model.positions is not None:
        grads["positions"] = row_addends(d, position)
    trained = np.flatnonzero(of.ids != model.padding)
    grads["embedding"] = row_addends(d[trained] * F(model.embedding_scale), of.ids[trained])
    return grads


def gradients(
    model: Model, sequences: Sequence[Activations], d_hidden: Sequence[Array], slots: int = 8
) -> dict[str, Array]:
    """The gradient of every parameter for a minibatch of sequences: sums of slots, joined."""
    parts = [backward(model, of, d) for of, d in zip(sequences, d_hidden, strict=True)]
    return {
        name: join_slots(slot_sums(w.shape, [part[name] for part in parts], slots))
        for name, w in parameters(model).items()
    }


def rotary_tables(frequencies: Array, positions: int) -> tuple[Array, Array]:
    """cos and sin of position x frequency in float64, rounded once; float32 [positions, R / 2]."""
    sine, cosine = sin_cos64(np.arange(positions)[:, None] * np.asarray(frequencies, D))
    return cosine.astype(F), sine.astype(F)
