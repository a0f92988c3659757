"""What is sent to `/generate`, and what of its answer is believed."""

from __future__ import annotations

import base64
import copy
from typing import Any

import numpy as np
import pytest
import torch

from ppo_repro.base.errors import UserError
from ppo_repro.sampler import Completion, Request, Sampling
from ppo_repro.sampling.responses import UncutSampling
from ppo_repro.sampling.sglang.messages import Batch, RoutedLayers, generate_body, read_completions, read_routes

CONTEXT, PLAIN = 32, Sampling(0.7, 0, 1.0, 4)
WANTED = UncutSampling(temperature=0.7, max_response_tokens=4, end_ids=(1, 7), vocab_size=20)
REQUESTS = [Request((2, 3, 4), 11), Request((5,), -(2**63))]
URL = "http://127.0.0.1:1"


def body(*requests: Request, sampling: Sampling = PLAIN) -> dict[str, Any]:
    return generate_body(Batch(requests, sampling, WANTED), CONTEXT)


def test_a_request_that_would_be_refused_is_not_sent() -> None:
    with pytest.raises(UserError, match="empty prompt"):
        body(REQUESTS[0], Request((), 1))


def item(tokens: list[int], logprobs: list[float], reason: str, prompt: int = 3, version: str = "w") -> dict[str, Any]:
    return {
        "output_ids": tokens,
        "meta_info": {
            "finish_reason": {"type": reason},
            "prompt_tokens": prompt,
            "weight_version": version,
            "e2e_latency": 0.25,
            "weight_versions": [{"version": version, "start": 0, "end": len(tokens)}],
            "output_token_logprobs": [[p, t, None] for p, t in zip(logprobs, tokens, strict=True)],
        },
    }


def read(*items: Any, requests: list[Request] = REQUESTS[:1]) -> list[Completion]:
    return read_completions(list(items), Batch(requests, PLAIN, WANTED), "w", URL)


def test_an_answer_by_hand() -> None:
    items = item([9, 7], [-0.5, -1.25], "stop"), item([9, 9, 9, 9], [-0.5] * 4, "length", prompt=1)
    items[1]["meta_info"]["e2e_latency"] = 2  # JSON may write a whole number without a point
    first, second = read(*items, requests=REQUESTS)
    assert (first.response_ids, first.finish_reason) == ((9, 7), "stop")
    assert first.logprobs.tolist() == [-0.5, -1.25]
    assert first.logprobs.dtype == torch.float32
    assert first.log_kept_mass.tolist() == [0.0, 0.0]
    assert first.kept_tokens.shape == (2, 0)
    assert (first.server, first.latency) == (URL, 0.25)
    assert second.finish_reason == "length"


def broken() -> dict[str, tuple[dict[str, Any], str]]:
    """Answers with one thing wrong, and what is said of it."""
    good = item([9, 7], [-0.5, -1.25], "stop")

    def changed(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
        tree = copy.deepcopy(good)
        node: Any = tree
        for step in path[:-1]:
            node = node[step]
        node[path[-1]] = value
        return tree

    meta, rows = ("meta_info",), ("meta_info", "output_token_logprobs")
    return {
        "no object": ("nothing", "has no meta_info"),  # type: ignore[dict-item]
        "other tokens": (changed(("output_ids",), [9, 1]), "of other tokens"),
        "fewer log-probs": (changed(rows, [[-0.5, 9, None]]), "of other tokens"),
        "token outside": (item([25, 7], [-0.5, -0.5], "stop"), "returned the id 25 at place 0"),
        "log-prob null": (changed((*rows, 0, 0), None), "returned the log-prob None at place 0"),
        "log-prob a float64": (changed((*rows, 0, 0), -0.1), "returned a log-prob that is no float32"),
        "aborted": (changed((*meta, "finish_reason"), {"type": "abort", "message": "x"}), "finish_reason .*abort"),
        "no reason": (changed((*meta, "finish_reason"), None), "finish_reason None"),
        "short": (item([9, 9], [-0.5] * 2, "length"), "after 2 ids; "),
        "other prompt": (item([9, 7], [-0.5] * 2, "stop", prompt=4), "a prompt of 3 tokens as 4"),
        "other weights": (item([9, 7], [-0.5] * 2, "stop", version="v"), "sampled with weights 'v', must be 'w'"),
        "weights changed": (changed((*meta, "weight_versions", 0, "version"), "v"), "sampled with weights 'v'"),
        "no latency": (changed((*meta, "e2e_latency"), None), "has no e2e_latency"),
    }


@pytest.mark.parametrize("name", broken())
def test_an_answer_with_one_thing_wrong_is_refused(name: str) -> None:
    answer, message = broken()[name]
    with pytest.raises(UserError, match=f"^{URL}: .*{message}") as caught:
        read(answer)
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------- routes, and what a cut kept

# three layers of which the second is dense, 2 of 4 experts, two tokens
SHAPE = RoutedLayers(3, (0, 2), 4, 2)
ROWS = np.array([[[0, 3], [0, 0], [1, 2]], [[2, 3], [0, 0], [0, 1]]], dtype=np.int32)


def text(rows: np.ndarray) -> str:
    return base64.b64encode(rows.astype("<i4").tobytes()).decode()


def test_routes_by_hand() -> None:
    found = read_routes(text(ROWS), 2, SHAPE)
    assert found.dtype == torch.int32
    assert found.tolist() == [[0, 3, 1, 2], [2, 3, 0, 1]]
    requests, sampling = [Request((2, 3), 1)], Sampling(1.0, 0, 1.0, 1, routes=True)
    asked = [generate_body(Batch(requests, sampling, WANTED, routed), CONTEXT) for routed in (SHAPE, None)]
    assert asked[0]["return_routed_experts"] is True
    assert "return_routed_experts" not in asked[1]


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (None, "returned no routed_experts; start the server with --enable-return-routed-experts"),
        ("%", "no base64 of int32"),
        (text(ROWS[:1]), "returned 6 routed_experts for 2 tokens, 3 layers"),
        (text(ROWS + 2), "not 2 of 4 by rising index"),
        (text(ROWS[..., ::-1]), "not 2 of 4 by rising index"),
    ],
)
def test_what_is_no_route_is_refused(sent: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_routes(sent, 2, SHAPE)
