"""Routes as a server returns them: read into those of a completion, and refused where they cannot be."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ppo_repro.errors import UserError
from ppo_repro.numerics.families import mixture_layers
from ppo_repro.rollout.engine import Request, Sampling
from ppo_repro.rollout.sglang.messages import RoutedLayers, generate_body, read_completions, read_routes, routed_layers
from tests.support.models import MIXTURES, source_model

# three layers of which the second is dense, 2 of 4 experts, two tokens
SHAPE = RoutedLayers(3, (0, 2), 4, 2)
ROWS = np.array([[[0, 3], [0, 0], [1, 2]], [[2, 3], [0, 0], [0, 1]]], dtype=np.int32)


def text(rows: np.ndarray) -> str:
    return base64.b64encode(rows.astype("<i4").tobytes()).decode()


def test_routes_by_hand() -> None:
    found = read_routes(text(ROWS), 2, SHAPE)
    assert found.dtype == torch.int32 and found.tolist() == [[0, 3, 1, 2], [2, 3, 0, 1]]
    assert read_routes("", 0, SHAPE).shape == (0, 4)


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (None, "returned no routed_experts; start the server with --enable-return-routed-experts"),
        ("%", "no base64 of int32"),
        (base64.b64encode(b"abc").decode(), "no base64 of int32"),
        (text(ROWS[:1]), "returned 6 routed_experts for 2 tokens, 3 layers"),
        (text(ROWS + 2), "not 2 of 4 by rising index"),
        (text(ROWS - 1), "not 2 of 4 by rising index"),
        (text(ROWS[..., ::-1]), "not 2 of 4 by rising index"),
    ],
)
def test_what_is_no_route_is_refused(sent: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_routes(sent, 2, SHAPE)


@pytest.mark.parametrize("family", MIXTURES)
def test_the_shape_of_a_models_routes(family: str) -> None:
    model = source_model(family)
    found = routed_layers(model)
    assert found.mixtures == tuple(mixture_layers(model)) and 0 < len(found.mixtures) <= found.layers
    assert 0 < found.per_token <= found.experts
    assert mixture_layers(source_model("qwen3")) == []


def test_routes_are_asked_for_and_read_with_their_completion() -> None:
    requests, sampling = [Request((2, 3), 1)], Sampling(1.0, 0, 1.0, 1, routes=True)
    assert generate_body(requests, sampling, frozenset({1}), 20, 32, True)["return_routed_experts"] is True
    assert "return_routed_experts" not in generate_body(requests, sampling, frozenset({1}), 20, 32)
    meta = {
        **{"prompt_tokens": 2, "finish_reason": {"type": "length"}, "weight_version": "v", "e2e_latency": 0.5},
        **{"output_token_logprobs": [[-1.0, 4, None]], "routed_experts": text(ROWS)},
    }
    about = requests, sampling, frozenset({1}), 20, "v", "http://127.0.0.1:1"
    (found,) = read_completions([{"output_ids": [4], "meta_info": meta}], *about, SHAPE)
    assert found.routes is not None and found.routes.tolist() == [[0, 3, 1, 2], [2, 3, 0, 1]]
    (without,) = read_completions([{"output_ids": [4], "meta_info": meta}], *about)
    assert without.routes is None
    with pytest.raises(UserError, match=r"^http://127\.0\.0\.1:1: returned 12 routed_experts for 2 tokens, 5 layers"):
        read_completions([{"output_ids": [4], "meta_info": meta}], *about, replace(SHAPE, layers=5))
