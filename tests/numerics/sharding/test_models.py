"""Models that several processes hold together: logits, samples, gradients and steps have the bits of a whole one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import pytest
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from ppo_repro.errors import UserError
from ppo_repro.models.batches import lay_out
from ppo_repro.models.networks import hidden_states, make_policy, policy_logits
from ppo_repro.numerics.layers.families import head_of, trunk_of
from ppo_repro.numerics.logprobs import token_statistics
from ppo_repro.numerics.optim.adamw import AdamWSettings
from ppo_repro.numerics.optim.optimizer import ExactOptimizer, weights_digest
from ppo_repro.numerics.sharding import parts
from ppo_repro.numerics.sharding.layers import check_divisible, divide, own_logits
from ppo_repro.numerics.sharding.parts import parts_of, whole_parameters
from ppo_repro.ranks import ALONE, Ranks
from ppo_repro.rollout.engine import Request, Sampling
from ppo_repro.rollout.torch_engine import TorchEngine
from ppo_repro.testing.small_models import CONTEXT, gemma_config, llama_config, qwen2_config, qwen3_config, small_model
from tests.support.models import ragged
from tests.support.thread_ranks import ThreadRanks, in_threads

T = TypeVar("T")
SETTINGS = AdamWSettings(1e-2, 0.9, 0.99, 1e-8, 0.01, 1.0)


@dataclass(frozen=True)
class OneCopy(Ranks):
    """The processes of a mesh that hold one copy of the models together: one group, which computes all sequences."""

    threads: ThreadRanks = field(default_factory=lambda: ThreadRanks(0, 1))

    def everyone(self, value: T) -> list[T]:
        return self.threads.gather([value])

    def add_up(self, tensors: object) -> None:
        """Nothing: no other group has contributions."""


@dataclass(frozen=True)
class Found:
    """What one model says and becomes."""

    logits: Tensor
    samples: list[tuple[tuple[int, ...], list[float]]]
    norm: float
    gradients: tuple[object, ...]
    digest: str
    weights: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]


def found(model: PreTrainedModel, ranks: Ranks) -> Found:
    """Logits, samples, and two steps on the log-probs and entropies of some tokens."""
    batch = lay_out(*ragged(4, 5), "right")
    with torch.no_grad():
        logits = policy_logits(model, batch)
    engine = TorchEngine(model, frozenset({1}), "exact", CONTEXT, 2, 3)
    requests = [Request(tuple(prompt), 7 + i) for i, prompt in enumerate(ragged(4, 5)[0])]
    samples = [(c.response_ids, c.logprobs.tolist()) for c in engine.generate(requests, Sampling(0.8, 0, 1.0, 4))]
    optimizer = ExactOptimizer(model, SETTINGS)

    def backward() -> None:
        head = head_of(model)
        own, share = own_logits(head, hidden_states(trunk_of(model), batch))
        logprobs, entropies = token_statistics(own, batch.targets, 0.9, None, "exact", share)
        torch.autograd.backward(
            [logprobs, entropies], [torch.linspace(-1, 1, len(logprobs)), torch.ones_like(entropies)]
        )

    for _ in range(2):
        report = optimizer.step(backward, batch.real_tokens, ranks, by_tensor=True)
    state = optimizer.state()
    moments = dict(parts_of(model).whole(state.second.items()))
    digest = weights_digest(whole_parameters(model))
    return Found(logits, samples, report.grad_norm, report.gradients, digest, dict(whole_parameters(model)), moments)


def divided(config: PretrainedConfig, size: int) -> list[Found]:
    copies = [make_policy(small_model(config, 3), "exact", CONTEXT) for _ in range(size)]

    def work(ranks: ThreadRanks) -> Found:
        return found(divide(copies[ranks.rank], ranks), OneCopy(ranks.rank, ranks.size, threads=ranks))

    return in_threads(size, work)


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (qwen3_config(), 2),  # tied, norms of heads
        pytest.param(qwen2_config(num_key_value_heads=4), 4, marks=pytest.mark.slow),  # biases, untied
        pytest.param(llama_config(attention_bias=True, mlp_bias=True), 2, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "model_type", str(value)),
)
def test_a_divided_model_says_samples_and_learns_what_a_whole_one_does(config: PretrainedConfig, size: int) -> None:
    whole = found(make_policy(small_model(config, 3), "exact", CONTEXT), ALONE)
    for part in divided(config, size):
        assert torch.equal(part.logits, whole.logits) and part.samples == whole.samples
        assert part.norm == whole.norm and part.gradients == whole.gradients
        for name, weight in whole.weights.items():
            assert torch.equal(part.weights[name], weight), name
            assert torch.equal(part.moments[name], whole.moments[name]), name
        assert part.digest == whole.digest


def test_gradients_of_norms_of_heads_that_are_not_added_up_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: each process has the contributions of its own heads only."""
    whole = found(make_policy(small_model(qwen3_config(), 3), "exact", CONTEXT), ALONE)
    usual = parts.TensorParts
    monkeypatch.setattr(parts, "TensorParts", lambda holders, dims, sizes, _, owners: usual(holders, dims, sizes))
    part, _ = divided(qwen3_config(), 2)
    assert torch.equal(part.logits, whole.logits), "before the first step"
    differing = {
        name.rpartition(".")[0][-6:] for name, w in whole.weights.items() if not torch.equal(part.weights[name], w)
    }
    assert {"q_norm", "k_norm"} <= differing


def test_each_process_holds_its_part() -> None:
    model = make_policy(small_model(qwen2_config(), 3), "exact", CONTEXT)
    whole = {name: p.numel() for name, p in model.named_parameters()}
    part = divide(model, ThreadRanks(1, 2))
    own = {name: p.numel() for name, p in part.named_parameters()}
    alike = {name for name in whole if own[name] == whole[name]}
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in alike} == {
        *("input_layernorm", "post_attention_layernorm", "norm")
    }
    assert own["model.embed_tokens.weight"] == 45 * 48, "of 89 tokens the second process has 45"
    assert all(
        2 * own[name] == whole[name]
        for name in whole
        if name not in alike and "embed" not in name and "lm_head" not in name
    )


@pytest.mark.parametrize(
    ("config", "count", "message"),
    [
        (qwen3_config(), 4, "layout.mesh.tensor = 4: the model has num_key_value_heads = 2, .* must be one of 1, 2"),
        (qwen3_config(), 3, "num_attention_heads = 4, which it does not divide"),
        (llama_config(num_key_value_heads=4, intermediate_size=70), 4, "intermediate_size = 70, .* one of 1, 2"),
        (gemma_config(), 2, "the model is a gemma model; processes divide models of Llama, Qwen2, Qwen3 or Mistral"),
    ],
)
def test_what_does_not_divide_is_refused_by_name(config: PretrainedConfig, count: int, message: str) -> None:
    check_divisible(config, 1, "the model")
    with pytest.raises(UserError, match=message):
        check_divisible(config, count, "the model")
