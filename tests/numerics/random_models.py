"""Models of the definition of any shape, drawn by Hypothesis: odd widths, every kind of norm, activation and layer."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from tests.numerics.definition import Array, Layer, Matrix, Model, NormWeights, rotary_tables

WIDTHS = (1, 7, 16, 17, 33, 48, 130)
POSITIONS = 160


class Weights:
    """Random arrays of a seed: matrices by fan-in, factors of norms near 1, some elements zero."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Array:
        x = self._rng.standard_normal(shape) * scale
        return np.where(self._rng.random(shape) < 0.02, 0, x).astype(np.float32)

    def matrix(self, n: int, k: int, bias: bool) -> Matrix:
        return Matrix(self.normal(n, k, scale=1.5 / k**0.5), self.normal(n, scale=0.2) if bias else None)

    def norm(self, kind: str, n: int) -> NormWeights:
        w = self.normal(n, scale=0.2) + np.float32(kind != "rms_offset")
        return NormWeights(w, self.normal(n, scale=0.2) if kind == "layer" else None)


@st.composite
def models(draw: st.DrawFn) -> Model:
    """A model of one or two layers."""
    weights = Weights(draw(st.integers(0, 2**32)))
    hidden, width = draw(st.sampled_from(WIDTHS)), draw(st.sampled_from(WIDTHS))
    kv_heads, each = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    d, heads = draw(st.sampled_from((2, 5, 8, 16, 18, 64, 136, 256))), kv_heads * each
    norm = draw(st.sampled_from(("rms", "rms_offset", "layer")))
    interleaved = each == 1 and draw(st.booleans())
    qk_norm = "none" if interleaved else draw(st.sampled_from(("none", "head", "whole")))
    rotary = 2 * draw(st.integers(0, d // 2))
    gated, bias = draw(st.booleans()), draw(st.booleans())
    experts, vocabulary = draw(st.sampled_from((0, 0, 1, 5))), draw(st.sampled_from((1, 3, 97)))
    chosen = draw(st.integers(1, experts)) if experts else 0

    def layer(index: int) -> Layer:
        mixture = experts and (index or draw(st.booleans()))
        up = (2 * width if gated else width, hidden)
        return Layer(
            norm1=weights.norm(norm, hidden),
            norm2=weights.norm(norm, hidden),
            qkv=weights.matrix((heads + 2 * kv_heads) * d, hidden, bias),
            out=weights.matrix(hidden, heads * d, bias),
            q_norm=None if qk_norm == "none" else weights.norm("rms", d if qk_norm == "head" else heads * d),
            k_norm=None if qk_norm == "none" else weights.norm("rms", d if qk_norm == "head" else kv_heads * d),
            up=None if mixture else weights.matrix(*up, bias),
            down=None if mixture else weights.matrix(hidden, width, bias),
            router=weights.matrix(experts, hidden, False) if mixture else None,
            expert_up=tuple(weights.matrix(*up, False) for _ in range(experts)) if mixture else (),
            expert_down=tuple(weights.matrix(hidden, width, False) for _ in range(experts)) if mixture else (),
            window=draw(st.sampled_from((0, 0, 1, 5, 131))),
            scale=draw(st.sampled_from((d**-0.5, 1.0, 0.3))),
        )

    cosine, sine = rotary_tables(1e4 ** -(np.arange(rotary // 2) / max(rotary // 2, 1)), POSITIONS)
    step = 3 * d if interleaved else d
    return Model(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=d,
        eps=draw(st.sampled_from((1e-6, 1e-5))),
        embedding=weights.normal(vocabulary, hidden, scale=0.5),
        layers=tuple(layer(index) for index in range(draw(st.integers(1, 2)))),
        last_norm=weights.norm(norm, hidden),
        q_at=0,
        q_step=step,
        k_at=d if interleaved else heads * d,
        k_step=step,
        v_at=2 * d if interleaved else (heads + kv_heads) * d,
        v_step=step,
        embedding_scale=draw(st.sampled_from((1.0, 1.3))),
        norm=norm,
        qk_norm=qk_norm,
        activation=draw(st.sampled_from(("silu", "gelu", "gelu_tanh", "gelu_quick"))),
        gated=gated,
        parallel=draw(st.booleans()),
        cosine=cosine,
        sine=sine,
        positions=weights.normal(POSITIONS, hidden, scale=0.3) if draw(st.booleans()) else None,
        chosen=chosen,
        normalised=draw(st.booleans()),
        padding=draw(st.integers(-1, vocabulary - 1)),
    )
