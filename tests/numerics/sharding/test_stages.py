"""Models whose layers lie with several processes: logits, samples, gradients and steps have the bits of a whole one."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from ppo_repro.errors import UserError
from ppo_repro.models.batches import lay_out
from ppo_repro.models.networks import checkpoint_gradients, hidden_states, make_policy, policy_logits
from ppo_repro.numerics.layers.families import head_of, trunk_of
from ppo_repro.numerics.logprobs import token_statistics
from ppo_repro.numerics.optim.adamw import AdamWSettings
from ppo_repro.numerics.optim.optimizer import ExactOptimizer
from ppo_repro.numerics.sharding import stages
from ppo_repro.numerics.sharding.layers import own_logits
from ppo_repro.numerics.sharding.parts import parts_of, whole_parameters
from ppo_repro.numerics.sharding.stages import check_layers, stage
from ppo_repro.ranks import ALONE, Ranks
from ppo_repro.rollout.engine import Request, Sampling
from ppo_repro.rollout.torch_engine import TorchEngine
from ppo_repro.testing.small_models import CONTEXT, gemma_config, llama_config, qwen2_config, qwen3_config, small_model
from tests.support.models import ragged
from tests.support.thread_ranks import ThreadRanks, in_threads, thread_mesh

SETTINGS = AdamWSettings(1e-2, 0.9, 0.99, 1e-8, 0.01, 1.0)
PROMPTS, RESPONSES = ragged(4, 5)


@dataclass(frozen=True)
class Found:
    """What one model says and becomes."""

    logits: Tensor
    samples: list[tuple[tuple[int, ...], list[float]]]
    norm: float
    gradients: tuple[object, ...]
    weights: dict[str, Tensor]
    moments: dict[str, Tensor]


def found(model: PreTrainedModel, ranks: Ranks) -> Found:
    """Logits, samples, and two steps on the log-probs of some tokens in two micro-batches."""
    halves = [lay_out(PROMPTS[i : i + 2], RESPONSES[i : i + 2], "right") for i in (0, 2)]
    with torch.no_grad():
        logits = torch.cat([policy_logits(model, batch) for batch in halves])
    engine = TorchEngine(model, frozenset({1}), "exact", CONTEXT, 2, 3)
    requests = [Request(tuple(prompt), 7 + i) for i, prompt in enumerate(PROMPTS)]
    samples = [(c.response_ids, c.logprobs.tolist()) for c in engine.generate(requests, Sampling(0.8, 0, 1.0, 4))]
    optimizer = ExactOptimizer(model, SETTINGS)

    def backward() -> None:
        for batch in halves:
            own, share = own_logits(head_of(model), hidden_states(trunk_of(model), batch))
            logprobs, _ = token_statistics(own, batch.targets, 0.9, None, "exact", share)
            torch.autograd.backward(logprobs, torch.linspace(-1, 1, len(logprobs)))

    for _ in range(2):
        report = optimizer.step(backward, 100, ranks, by_tensor=True)
    moments = dict(parts_of(model).whole(optimizer.state().second.items()))
    return Found(logits, samples, report.grad_norm, report.gradients, dict(whole_parameters(model)), moments)


def in_stages(config: PretrainedConfig, size: int, recompute: bool = False) -> list[Found]:
    def work(world: ThreadRanks) -> Found:
        ranks = thread_mesh(world, size, by_layers=True)
        model = stage(make_policy(small_model(config, 3), "exact", CONTEXT), ranks.holders)
        if recompute:
            checkpoint_gradients(model)
        return found(model, ranks)

    return in_threads(size, work)


@pytest.mark.parametrize(
    ("config", "size", "recompute"),
    [
        (qwen3_config(num_hidden_layers=3), 2, False),  # unequal stages, tied
        pytest.param(qwen2_config(num_hidden_layers=4), 3, True, marks=pytest.mark.slow),  # biases, untied
        pytest.param(llama_config(num_hidden_layers=2), 2, True, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "model_type", str(value)),
)
def test_a_pipeline_says_samples_and_learns_what_a_whole_model_does(
    config: PretrainedConfig, size: int, recompute: bool
) -> None:
    whole = found(make_policy(small_model(config, 3), "exact", CONTEXT), ALONE)
    for part in in_stages(config, size, recompute):
        assert torch.equal(part.logits, whole.logits) and part.samples == whole.samples
        assert part.norm == whole.norm and part.gradients == whole.gradients
        assert part.weights.keys() == whole.weights.keys()
        for of_part, of_whole in ((part.weights, whole.weights), (part.moments, whole.moments)):
            assert all(torch.equal(of_part[name], tensor) for name, tensor in of_whole.items())


def test_a_residual_stream_that_is_rounded_on_its_way_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what is handed over arrives in 16 bits."""
    config, usual = qwen3_config(), stages._handed_over
    whole = found(make_policy(small_model(config, 3), "exact", CONTEXT), ALONE)
    monkeypatch.setattr(stages, "_handed_over", lambda *given: usual(*given).bfloat16().float())
    part, _ = in_stages(config, 2)
    assert not torch.equal(part.logits, whole.logits) and part.norm != whole.norm


def test_logits_of_a_pipeline_are_as_accurate_as_float32() -> None:
    part, _ = in_stages(qwen3_config(), 2)
    stock, rows = small_model(qwen3_config(), 3).double(), 0
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        with torch.no_grad():
            exact = stock(input_ids=torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        logits = part.logits[rows : rows + len(response)]
        # two layers and a head in float32: some 2^-24 of the largest logit at each of them
        assert (logits.double() - exact).abs().max() < 2.0**-19 * exact.abs().max()
        rows += len(response)


def test_each_process_holds_its_layers() -> None:
    model = make_policy(small_model(qwen3_config(num_hidden_layers=3), 3), "exact", CONTEXT)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    part = stage(model, ThreadRanks(1, 2))
    for name, parameter in part.named_parameters():
        if ".layers." in name:
            held = 0 if ".layers.0." in name else sizes[name]
        else:
            held = sizes[name] if "norm" in name else sizes[name] // 89 * 45
        assert parameter.numel() == held, name
    assert [*dict(part.named_parameters())] == [*sizes]


@pytest.mark.parametrize(
    ("config", "count", "message"),
    [
        (qwen3_config(), 3, "layout.mesh.pipeline = 3: the model has num_hidden_layers = 2, .* take up to 2"),
        (gemma_config(), 2, "the model is a gemma model; processes divide models of Llama, Qwen2, Qwen3 or Mistral"),
    ],
)
def test_what_has_no_stages_is_refused_by_name(config: PretrainedConfig, count: int, message: str) -> None:
    check_layers(config, 1, "the model")
    with pytest.raises(UserError, match=message):
        check_layers(config, count, "the model")
