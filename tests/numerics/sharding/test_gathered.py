"""Matrices that lie in pieces with several processes and are whole for one product: the bits of whole ones.

The processes compute different sequences, in different numbers of passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers import PretrainedConfig

from ppo_repro.errors import UserError
from ppo_repro.mesh.shards import ShardRanks
from ppo_repro.models.batches import lay_out
from ppo_repro.models.networks import make_policy, policy_logits
from ppo_repro.numerics.logprobs import token_statistics
from ppo_repro.numerics.optim.adamw import AdamWSettings
from ppo_repro.numerics.optim.optimizer import ExactOptimizer, weights_digest
from ppo_repro.numerics.pieces import Division
from ppo_repro.numerics.sharding.parts import hold, parts_of, whole_parameters
from ppo_repro.ranks import ALONE, Ranks
from ppo_repro.rollout.engine import Request, Sampling
from ppo_repro.rollout.torch_engine import TorchEngine
from ppo_repro.testing.small_models import CONTEXT, gemma_config, gpt2_config, mixtral_config, qwen3_config, small_model
from tests.support.models import ragged
from tests.support.thread_ranks import ThreadRanks, in_threads, thread_shards

SETTINGS = AdamWSettings(1e-2, 0.9, 0.99, 1e-8, 0.01, 1.0)
PROMPTS, RESPONSES = ragged(5, 5)


@dataclass(frozen=True)
class Found:
    """What the processes say and become together."""

    samples: list[tuple[tuple[int, ...], list[float]]]
    logits: list[Tensor]  # of each sequence
    norm: float
    gradients: tuple[object, ...]
    digest: str
    state: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]


def found(config: PretrainedConfig, ranks: Ranks) -> Found:
    """Samples, logits, and a step on the log-probs of some tokens; one sequence in each pass, and unequal shares."""
    model = hold(make_policy(small_model(config, 3), "exact", CONTEXT), ranks)
    mine = ranks.mine(len(PROMPTS), [3, 1, 0][: ranks.size] if ranks.size > 1 else [])
    engine = TorchEngine(model, frozenset({1}), "exact", CONTEXT, 2, 3)
    completions = engine.generate([Request(tuple(PROMPTS[i]), 7 + i) for i in mine], Sampling(0.8, 0, 1.0, 4))
    samples = ranks.gather([(c.response_ids, c.logprobs.tolist()) for c in completions])
    batches = [lay_out([PROMPTS[i]], [RESPONSES[i]], "right") for i in mine]
    with torch.no_grad():
        logits = ranks.gather([policy_logits(model, batch) for batch in batches])
    optimizer = ExactOptimizer(model, SETTINGS, Division(ranks, 3 if ranks.size > 1 else 0))

    def backward() -> None:
        for batch in batches:
            logprobs, _ = token_statistics(policy_logits(model, batch), batch.targets, 0.9, None, "exact")
            torch.autograd.backward(logprobs, torch.linspace(-1, 1, len(logprobs)))

    for _ in range(2):
        report = optimizer.step(backward, 100, ranks, by_tensor=True)
    state = optimizer.state()
    moments = {name: held if isinstance(held := state.held(name, m), Tensor) else held.whole()
               for name, m in state.second.items()}  # fmt: skip
    digest = weights_digest(whole_parameters(model))
    return Found(samples, logits, report.grad_norm, report.gradients, digest, dict(whole_parameters(model)), moments)


def in_pieces(config: PretrainedConfig, size: int) -> list[Found]:
    return in_threads(size, lambda ranks: found(config, thread_shards(ranks)))


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (qwen3_config(), 2),  # tied, norms of heads
        pytest.param(gpt2_config(), 3, marks=pytest.mark.slow),  # transposed matrices, biases, positions
        pytest.param(gemma_config(), 2, marks=pytest.mark.slow),  # a scaled embedding
    ],
    ids=lambda value: getattr(value, "model_type", str(value)),
)
def test_a_model_in_pieces_says_samples_and_learns_what_a_whole_one_does(config: PretrainedConfig, size: int) -> None:
    whole = found(config, ALONE)
    for part in in_pieces(config, size):
        assert part.samples == whole.samples and part.norm == whole.norm and part.gradients == whole.gradients
        assert all(torch.equal(a, b) for a, b in zip(part.logits, whole.logits, strict=True))
        assert part.digest == whole.digest and part.state.keys() == whole.state.keys()
        for of_part, of_whole in ((part.state, whole.state), (part.moments, whole.moments)):
            assert all(torch.equal(of_part[name], tensor) for name, tensor in of_whole.items())


def test_weights_that_are_rounded_on_their_way_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what the others send arrives in 16 bits."""
    whole, usual = found(qwen3_config(), ALONE), ShardRanks.whole
    monkeypatch.setattr(ShardRanks, "whole", lambda ranks, number: usual(ranks, number).bfloat16().float())
    part, _ = in_pieces(qwen3_config(), 2)
    assert not torch.equal(part.logits[0], whole.logits[0]) and part.digest != whole.digest


def test_logits_of_a_model_in_pieces_are_as_accurate_as_float32() -> None:
    part, _ = in_pieces(qwen3_config(), 2)
    stock = small_model(qwen3_config(), 3).double()
    for i, logits in enumerate(part.logits):
        ids = torch.tensor([[*PROMPTS[i], *RESPONSES[i]]])
        with torch.no_grad():
            exact = stock(input_ids=ids).logits[0, len(PROMPTS[i]) - 1 : -1]
        # two layers and a head in float32: some 2^-24 of the largest logit at each of them
        assert (logits.double() - exact).abs().max() < 2.0**-19 * exact.abs().max()


def test_each_process_holds_its_pieces_and_nothing_of_a_product() -> None:
    whole = make_policy(small_model(qwen3_config(), 3), "exact", CONTEXT)
    sizes = {name: p.numel() for name, p in whole.named_parameters()}
    model = hold(whole, thread_shards(ThreadRanks(1, 2)))
    own = {name: p.untyped_storage().nbytes() // 4 for name, p in model.named_parameters()}
    alike = {name for name in sizes if own[name] == sizes[name]}
    assert all("norm" in name for name in alike) and len(alike) < len(sizes)
    assert all(own[name] == sizes[name] - sizes[name] // 2 for name in sizes if name not in alike)
    assert parts_of(model).flat.keys() == sizes.keys() - alike


def test_a_mixture_of_experts_is_refused_by_name() -> None:
    model = make_policy(small_model(mixtral_config(), 3), "exact", CONTEXT)
    with pytest.raises(UserError, match=r"^layout.mesh.zero = 3: the model is a mixture of experts, .*; take 2$"):
        hold(model, thread_shards(ThreadRanks(0, 2)))
