"""What is sent to `/generate`, and what of its answer is believed."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.errors import UserError
from ppo_repro.rollout.engine import Completion, Request, Sampling
from ppo_repro.rollout.sglang.messages import generate_body, read_completions

VOCAB, CONTEXT, STOPS = 20, 32, frozenset({1, 7})
PLAIN = Sampling(0.7, 0, 1.0, 4)
REQUESTS = [Request((2, 3, 4), 11), Request((5,), -(2**63))]
URL = "http://127.0.0.1:1"


def body(*requests: Request, sampling: Sampling = PLAIN) -> dict[str, Any]:
    return generate_body(requests, sampling, STOPS, VOCAB, CONTEXT)


def test_a_request_by_hand() -> None:
    shared = {"max_new_tokens": 4, "temperature": 0.7, "stop_token_ids": [1, 7]}
    assert body(*REQUESTS) == {
        "input_ids": [[2, 3, 4], [5]],
        "sampling_params": [{**shared, "sampling_seed": 11}, {**shared, "sampling_seed": -(2**63)}],
        "return_logprob": True,
        "stream": False,
    }
    greedy = body(Request((2,), 0), sampling=Sampling(1.0, 0, 1.0, 4, greedy=True))
    assert greedy["sampling_params"][0]["temperature"] == 0.0
    cut = body(Request((2,), 0), sampling=Sampling(0.5, 0, 0.9, 4))["sampling_params"][0]
    assert (cut["top_k"], cut["top_p"], cut["temperature"]) == (-1, 0.9, 0.5)


@pytest.mark.parametrize(
    "request_, message",
    [
        (Request((), 1), "empty prompt"),
        (Request((2, VOCAB), 1), "prompt token id 20: must be in 0..19"),
        (Request((-1,), 1), "prompt token id -1"),
        (Request((2,) * 29, 1), "exceeds numerics.max_context = 32"),
        (Request((2,), 2**63), "must fit into a signed 64-bit integer"),
        (Request((2,), -(2**63) - 1), "must fit into a signed 64-bit integer"),
    ],
)
def test_a_request_that_would_be_refused_or_kill_the_server_is_not_sent(request_: Request, message: str) -> None:
    with pytest.raises(UserError, match=message):
        body(REQUESTS[0], request_)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0, 1, 1.0, 4),
        Sampling(1.0, 0, 0.912345678, 4),
        Sampling(0.5, 0, 1.0, 4, True),
        Sampling(1e-7, 0, 1.0, 4),
    ],
    ids=["top-k 1", "top-p beyond float32", "greedy at another temperature", "a temperature taken for greedy"],
)
def test_distributions_sglang_does_not_give_log_probs_of_are_refused(sampling: Sampling) -> None:
    with pytest.raises(UserError, match=r"sglang|SGLang"):
        body(REQUESTS[0], sampling=sampling)


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
    return read_completions(list(items), requests, PLAIN, STOPS, VOCAB, "w", URL)


def test_an_answer_by_hand() -> None:
    first, second = read(
        item([9, 7], [-0.5, -1.25], "stop"), item([9, 9, 9, 9], [-0.5] * 4, "length", prompt=1), requests=REQUESTS
    )
    assert first.response_ids == (9, 7) and first.finish_reason == "stop"
    assert first.logprobs.tolist() == [-0.5, -1.25] and first.logprobs.dtype == torch.float32
    assert first.log_kept_mass.tolist() == [0.0, 0.0] and first.kept_tokens.shape == (2, 0)
    assert first.top_ids.shape == first.top_logits.shape == (2, 0), "a server returns no logits"
    assert (first.server, first.latency) == (URL, 0.25)
    assert second.finish_reason == "length"


def test_a_stop_token_at_the_length_limit_is_a_stop_as_in_the_built_in_engine() -> None:
    assert read(item([9, 9, 9, 7], [-0.5] * 4, "length"))[0].finish_reason == "stop"


@given(st.lists(st.floats(-(2.0**100), 0, width=32), min_size=1, max_size=4))
def test_every_float32_comes_through_with_its_bits(logprobs: list[float]) -> None:
    tokens = [9] * (len(logprobs) - 1) + [7]
    found = read(item(tokens, logprobs, "stop"))[0].logprobs.numpy()
    assert found.tobytes() == np.array(logprobs, dtype=np.float32).tobytes()


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
        "no tokens": (changed(("output_ids",), None), "has no output_ids"),
        "other tokens": (changed(("output_ids",), [9, 1]), "of other tokens"),
        "fewer log-probs": (changed(rows, [[-0.5, 9, None]]), "of other tokens"),
        "empty row": (changed(rows, [[], []]), "of other tokens"),
        "token outside": (item([25, 7], [-0.5, -0.5], "stop"), "returned token 25"),
        "token true": (item([True, 7], [-0.5, -0.5], "stop"), "returned token True"),
        "token a float": (item([9.0, 7], [-0.5, -0.5], "stop"), "returned token 9.0"),  # type: ignore[list-item]
        "log-prob null": (changed((*rows, 0, 0), None), "returned None as a log-prob"),
        "log-prob infinite": (changed((*rows, 0, 0), -math.inf), "returned -inf"),
        "log-prob nan": (changed((*rows, 0, 0), math.nan), "returned nan"),
        "log-prob a float64": (changed((*rows, 0, 0), -0.1), "returned -0.1 as a log-prob"),
        "log-prob too large": (changed((*rows, 0, 0), -1e300), "returned -1e[+]300"),
        "aborted": (changed((*meta, "finish_reason"), {"type": "abort", "message": "x"}), "finish_reason"),
        "unfinished": (changed((*meta, "finish_reason"), None), "finish_reason None"),
        "too long": (item([9] * 5, [-0.5] * 5, "length"), "returned 5 tokens"),
        "no token": (item([], [], "length"), "returned 0 tokens"),
        "after a stop": (item([7, 9, 7], [-0.5] * 3, "stop"), "after a stop token"),
        "short": (item([9, 9], [-0.5] * 2, "length"), "after 2 of 4 tokens with token 9"),
        "foreign stop": (item([9, 3], [-0.5] * 2, "stop"), "with token 3, which is no end token"),
        "stop at the limit": (item([9, 9, 9, 3], [-0.5] * 4, "stop"), "with token 3, which is no end token"),
        "other prompt": (item([9, 7], [-0.5] * 2, "stop", prompt=4), "a prompt of 3 tokens as 4"),
        "other weights": (item([9, 7], [-0.5] * 2, "stop", version="v"), "sampled with weights 'v', must be 'w'"),
        "weights changed": (changed((*meta, "weight_versions", 0, "version"), "v"), "sampled with weights 'v'"),
        "no latency": (changed((*meta, "e2e_latency"), None), "has no e2e_latency"),
        "latency nan": (changed((*meta, "e2e_latency"), math.nan), "returned nan as e2e_latency"),
        "no weights": (changed((*meta, "weight_version"), None), "sampled with weights 'None'"),
    }


@pytest.mark.parametrize("name", broken())
def test_an_answer_with_one_thing_wrong_is_refused(name: str) -> None:
    answer, message = broken()[name]
    with pytest.raises(UserError, match=f"^{URL}: .*{message}") as caught:
        read(answer)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("answer", [[], {}, None, "x"])
def test_as_many_answers_as_requests(answer: Any) -> None:
    with pytest.raises(UserError, match="must be one answer each"):
        read_completions(answer, REQUESTS, PLAIN, STOPS, VOCAB, "w", URL)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(["output_ids", "meta_info", *item([9, 7], [-0.5, -0.5], "stop")["meta_info"]]), json_values)
def test_no_answer_does_more_than_end_in_one_line(field: str, value: Any) -> None:
    answer = item([9, 7], [-0.5, -1.25], "stop")
    (answer if field in answer else answer["meta_info"])[field] = value
    try:
        found = read(answer)[0]
    except UserError:
        return
    assert found.response_ids == (9, 7) and found.logprobs.tolist() == [-0.5, -1.25]
