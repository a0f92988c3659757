"""What deterministic servers return of a cut distribution: written and read with the bits of the built-in sampler."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.errors import UserError
from ppo_repro.rollout.engine import Request, Sampling
from ppo_repro.rollout.sampler import Sample, sample
from ppo_repro.rollout.sglang.messages import read_completions
from ppo_repro.sglang_plugin import kept_tokens as kept

VOCAB = 21
CUT = Sampling(0.7, 12, 0.9, 4)


def drawn(seed: int = 0, sampling: Sampling = CUT) -> Sample:
    logits = 3.0 * torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(seed))
    return sample(logits, torch.arange(5), torch.arange(5), sampling, "deterministic")


@given(st.integers(0, 2**32), st.integers(0, 20).filter(lambda k: k != 1), st.sampled_from([0.3, 0.75, 0.9, 0.999]))
def test_what_is_written_is_read_with_its_bits(seed: int, top_k: int, top_p: float) -> None:
    found = drawn(seed, Sampling(0.7, top_k, top_p, 4))
    sent = json.loads(json.dumps(kept.written(found)))
    logprobs, mass, tokens = kept.read(sent, found.tokens.tolist(), VOCAB)
    assert logprobs.dtype == mass.dtype == torch.float32
    assert torch.equal(logprobs, found.logprobs) and torch.equal(mass, found.log_kept_mass)
    assert torch.equal(tokens, found.kept_tokens)


def test_another_cut_keeps_other_tokens() -> None:
    """The control: what is read is what was kept, and not what any cut keeps."""
    a, b = (kept.written(drawn(0, Sampling(0.7, top_k, 1.0, 4))) for top_k in (3, 4))
    assert all(x[0] != y[0] and x[2] < y[2] for x, y in zip(a, b, strict=True))


def entries(**change: Any) -> list[Any]:
    """Three tokens of eight, of which the third was sampled, with one thing changed."""
    usual = {"bits": base64.b64encode(b"\xe0").decode(), "logprob": -0.5, "mass": -0.25}
    return [list({**usual, **change}.values())]


BROKEN: dict[str, tuple[Any, str]] = {
    "nothing": (None, "returned no kept tokens"),
    "of fewer tokens": ([], "returned no kept tokens"),
    "no entry": ([None], "in another form"),
    "too short an entry": ([["4A=="]], "in another form"),
    "no base64": (entries(bits="?"), "no base64"),
    "too many bytes": (entries(bits=base64.b64encode(b"\xe0\x00").decode()), "returned 2 bytes"),
    "without the token": (entries(bits=base64.b64encode(b"\xc0").decode()), "without token 2"),
    "with an unknown token": (entries(bits=base64.b64encode(b"\xe1").decode()), "unknown ones"),
    "a float64": (entries(logprob=-0.1), "not float32"),
    "an infinite mass": (entries(mass=float("-inf")), "not float32"),
    "an integer": (entries(mass=0), "not float32"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_no_sampler_writes_is_refused(name: str) -> None:
    sent, said = BROKEN[name]
    kept.read(entries(), [2], 7)
    with pytest.raises(ValueError, match=said):
        kept.read(sent, [2], 7)


def test_a_completion_has_the_log_probs_of_the_cut_distribution() -> None:
    meta = {
        "finish_reason": {"type": "stop"},
        "prompt_tokens": 1,
        "weight_version": "w",
        "e2e_latency": 0.25,
        "output_token_logprobs": [[-2.5, 2, None]],
    }
    answer = {"output_ids": [2], "meta_info": {**meta, kept.KEPT: entries()}}
    about = [Request((1,), 0)], CUT, frozenset({2}), 7, "w", "http://h:1"
    (found,) = read_completions([answer], *about)
    assert found.logprobs.tolist() == [-0.5] and found.log_kept_mass.tolist() == [-0.25]
    assert found.kept_tokens.tolist() == [[0xE0]]
    with pytest.raises(UserError, match=r"^http://h:1: returned no kept tokens"):
        read_completions([{"output_ids": [2], "meta_info": meta}], *about)


@pytest.mark.parametrize("given_top_p", [0.9, 0.95, 0.123456, 0.5, 1.0])
def test_top_p_comes_back_from_a_float32_as_it_was_given(given_top_p: float) -> None:
    as_server_has_it = torch.tensor([given_top_p]).tolist()[0]
    assert kept.shortest(as_server_has_it) == given_top_p
    assert as_server_has_it == given_top_p or given_top_p not in (0.5, 1.0)
