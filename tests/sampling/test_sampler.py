"""The seeded sampler against pure-Python formulas, and the sets that top-k and top-p keep."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.numerics.definition.sampling import murmur3
from ppo_repro.numerics.token_sampling import expand_kept
from ppo_repro.sampler import Sampling
from ppo_repro.sampling.draw import first_argmax, sample
from ppo_repro.sampling.sglang.plugin.cpu_shim.sgl_kernel import murmur_hash32
from tests.support.models import seeded
from tests.support.sampler import drawn_case


def test_murmur3_gives_the_published_values() -> None:
    assert murmur3(b"") == 0
    assert murmur3(b"", 1) == 0x514E28B7
    assert murmur3(b"\xff\xff\xff\xff") == 0x76293B50
    assert murmur3(b"\x21\x43\x65\x87") == 0xF55B516B
    assert murmur3(b"\x21\x43\x65\x87", 0x5082EDEE) == 0x2362F9DE
    assert murmur3(b"\0\0\0\0") == 0x2362F9DE
    assert murmur3(b"test", 0x9747B28C) == 0x704B81DC
    assert murmur3(b"aaaa", 0x9747B28C) == 0x5A97808A


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**31), st.lists(st.integers(0, 2**31), min_size=1, max_size=5))
def test_the_hash_for_servers_on_cpus_is_murmur3(seed: int, position: int, columns: list[int]) -> None:
    got = murmur_hash32(torch.tensor([seed]), torch.tensor([position]), torch.tensor(columns))
    assert got.tolist() == [[murmur3(struct.pack("<QII", seed, position, column)) for column in columns]]


def test_of_tokens_as_likely_the_one_with_the_largest_hash_is_sampled() -> None:
    """Noise grows with the hash. In a thousand rows the winner is often close to the bound that leaves tokens out."""
    n, v = 1000, 1024
    _, seeds, positions = drawn_case(n, 1, 5)
    noise = murmur_hash32(seeds, positions, torch.arange(v)).long()
    found = sample(torch.zeros(n, v), seeds, positions, Sampling(), "deterministic").tokens
    assert found.tolist() == noise.argmax(1).tolist()


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (6, 0.9)])
def test_tokens_come_as_often_as_their_probability_says(top_k: int, top_p: float) -> None:
    n, sampling = 20_000, Sampling(0.8, top_k, top_p, 1)
    logits = (torch.randn(12, generator=seeded(0)) * 1.5).expand(n, 12)
    got = sample(logits, torch.arange(n), torch.full((n,), 9), sampling, "deterministic")
    eligible = expand_kept(got.kept_tokens[:1], 12)
    log_p = (logits[0] / 0.8).double()
    if eligible is not None:
        log_p = log_p.masked_fill(~eligible[0], -math.inf)
    p = log_p.softmax(-1)
    counts = torch.bincount(got.tokens, minlength=12).double()
    assert not counts[p == 0].any()
    live = p > 0
    chi_square = float((((counts - n * p) ** 2)[live] / (n * p)[live]).sum())
    # 11 degrees of freedom at most: 31.3 is exceeded once in 1000; the seeds are fixed
    assert chi_square < 31.3
    # sampling from another temperature would be noticed
    q = (log_p * 0.9).softmax(-1)
    assert float((((counts - n * q) ** 2)[live] / (n * q)[live]).sum()) > 31.3


def test_the_likeliest_token_is_always_kept_and_certain_when_alone() -> None:
    logits, seeds, positions = drawn_case(50, 30, 0)
    for sampling in (Sampling(1.0, 1, 1.0, 1), Sampling(1.0, 0, 1e-9, 1)):
        got = sample(logits, seeds, positions, sampling, "deterministic")
        assert torch.equal(got.tokens, logits.argmax(-1))
        assert not got.logprobs.any()
        assert bool((got.log_kept_mass < 0).all())


def test_greedy_takes_the_first_of_the_likeliest_whatever_the_seed() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [5.0, 3.0, 5.0, 5.0], [-0.0, 0.0, -1.0, -1.0]])
    for seed in (0, 1, 2**40):
        got = sample(logits, torch.full((3,), seed), torch.arange(3), Sampling(1.0, 0, 1.0, 1, True), "deterministic")
        assert got.tokens.tolist() == [1, 0, 0]
    assert first_argmax(logits).tolist() == [1, 0, 0]
