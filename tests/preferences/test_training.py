"""Training on pairs beside the unmodified model in float64: log-probs, loss, gradient, divergence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ppo_repro.base.ranks import ALONE
from ppo_repro.base.seeding import sample_seed
from ppo_repro.base.watcher import Silent
from ppo_repro.config.dpo import DPOUpdate
from ppo_repro.config.layout import LayoutConfig
from ppo_repro.models.networks import make_policy
from ppo_repro.numerics.adamw import AdamWSettings
from ppo_repro.numerics.optimizer import Optimizer
from ppo_repro.preferences.preference_pairs import Preference
from ppo_repro.preferences.training import PairScorer, PairTraining
from ppo_repro.runs.dpo_from_run import RecordedRun, sequence_kl
from ppo_repro.runs.prepare import prepare
from ppo_repro.sampler import Request
from ppo_repro.stages.rollout import sampling_of
from tests.support.models import CONTEXT, ragged, source_model
from tests.support.runs import small_config


def ragged_pairs(count: int) -> list[Preference]:
    prompts, chosen = ragged(count, 0)
    _, rejected = ragged(count, 1)
    rows = zip(prompts, chosen, rejected, strict=True)
    return [Preference(str(i), tuple(p), tuple(c), tuple(r)) for i, (p, c, r) in enumerate(rows)]


def stock_logprobs(model: PreTrainedModel, pairs: list[Preference], temperature: float) -> list[torch.Tensor]:
    """log pi of chosen and rejected responses by the unmodified model."""
    sums = []
    for ids in (lambda p: p.chosen_ids, lambda p: p.rejected_ids):
        rows = []
        for pair in pairs:
            inputs = torch.tensor([pair.prompt_ids + ids(pair)])
            logits = model(input_ids=inputs, use_cache=False).logits[0] / temperature
            logprobs = logits[len(pair.prompt_ids) - 1 : -1].log_softmax(-1)
            rows.append(logprobs.gather(-1, torch.tensor(ids(pair))[:, None]).sum())
        sums.append(torch.stack(rows))
    return sums


def test_pair_log_probs_are_those_of_the_unmodified_model() -> None:
    policy, pairs = make_policy(source_model("gpt2"), "deterministic", CONTEXT), ragged_pairs(9)
    found = PairScorer(policy, 0.9, "deterministic", LayoutConfig()).logprobs(pairs, ALONE)
    with torch.no_grad():
        chosen, rejected = stock_logprobs(source_model("gpt2").double(), pairs, 0.9)
    # a sum of up to 7 log-probs, each good to about 1e-5
    assert torch.allclose(found, torch.stack([chosen, rejected]), rtol=0, atol=1e-4)


def test_loss_and_gradient_norm_are_those_of_autograd_in_float64() -> None:
    pairs, wide = ragged_pairs(6), source_model("qwen3").double()
    chosen, rejected = stock_logprobs(wide, pairs, 1.0)
    loss = -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean()
    loss.backward()
    expected = torch.stack([p.grad.norm() for p in wide.parameters() if p.grad is not None]).norm().item()
    policy = make_policy(source_model("qwen3"), "deterministic", CONTEXT)
    optimizer = Optimizer(
        policy,
        AdamWSettings(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, max_grad_norm=1.0),
        "deterministic",
    )
    nothing = torch.zeros(2, 6, dtype=torch.float64)
    scorer = PairScorer(policy, 1.0, "deterministic", LayoutConfig())
    losses_of = scorer.dpo_losses_of(pairs, nothing, 0.1, optimizer)
    settings = DPOUpdate(minibatch_size=6, learning_rate=1e-3)
    (step,) = PairTraining(policy, optimizer, losses_of, 6, settings, 4, 0, ALONE, lambda *_: None).epoch(0)
    assert step.grad_norm == pytest.approx(expected, rel=1e-6)
    assert step.loss == pytest.approx(loss.item(), rel=1e-5)


def test_the_divergence_is_its_definition_on_the_unmodified_models(tmp_path: Path) -> None:
    config = small_config("model.warm_start_steps=0")
    prepared = prepare(config, Silent())
    with torch.no_grad():
        for parameter in prepared.state.policy.parameters():
            parameter.mul_(1.25)
    models = []
    for name in ("policy", "reference"):
        getattr(prepared.state, name).save_pretrained(tmp_path / name)
        models.append(AutoModelForCausalLM.from_pretrained(tmp_path / name).double())
    found = sequence_kl(RecordedRun(config, prepared), 2, ALONE)
    total, problems = 0.0, prepared.task.problems.held_out
    requests = [Request(prepared.task.prompt_ids[p.key], sample_seed(2, 0, p.key, 0)) for p in problems]
    for request, done in zip(requests, prepared.sampler.generate(requests, sampling_of(config)), strict=True):
        ids = torch.tensor([[*request.prompt_ids, *done.response_ids[:-1]]])
        with torch.no_grad():
            log_p, log_q = (model(input_ids=ids).logits[0].log_softmax(-1) for model in models)
        rows = (log_p.exp() * (log_p - log_q)).sum(-1)
        total += float(rows[len(request.prompt_ids) - 1 :].sum())
    assert found == pytest.approx(total / len(problems), rel=1e-4)
    assert found > 0
