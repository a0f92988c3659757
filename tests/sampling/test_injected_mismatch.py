"""A mismatch of a chosen size: the noise, what it does to KL and tokens, and that nothing else is disturbed."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ppo_repro.analysis.mismatch import mismatch_summary
from ppo_repro.analysis.run_pairs import run_pairs
from ppo_repro.base.errors import UserError
from ppo_repro.base.mode import Mode
from ppo_repro.base.ranks import ALONE
from ppo_repro.base.watcher import Silent
from ppo_repro.config.run import RunConfig
from ppo_repro.numerics.noise import normal_noise
from ppo_repro.records import reader
from ppo_repro.runs.prepare import Prepared, prepare
from ppo_repro.sampler import Request, Sampler, Sampling
from ppo_repro.sampling.built_in import BuiltInSampler
from ppo_repro.sampling.draw import sample
from ppo_repro.sampling.faults.logits import biased, disturbed, logits_fault
from ppo_repro.sampling.faults.sampler import with_faults
from tests.support.language import small_run
from tests.support.models import CONTEXT, policy, unequal
from tests.support.runs import small_config
from tests.support.sampler import STOPS, drawn_case, requests_of

SIGMA = 0.1


def test_the_noise_is_normal_and_the_bias_comes_after_it() -> None:
    logits, seeds, positions = drawn_case(40, 30, 3)
    noisy = logits_fault(0.5, None, 7)(logits, seeds, positions, 0.7)
    offsets = normal_noise(seeds, positions, 30) * (0.7 * 0.5)
    assert unequal(noisy, (logits.double() + offsets).float()) == 0
    both = logits_fault(0.5, 0.3, 7)(logits, seeds, positions, 0.7)
    assert unequal(both, biased(noisy, 7, 0.7, 0.3)) == 0
    assert unequal(both, noisy) > 0
    assert logits_fault(None, None, 7)(logits, seeds, positions, 0.7) is logits


@pytest.mark.parametrize("sampling", [Sampling(0.7, 0, 1.0, 1), Sampling(1.3, 6, 0.9, 1)])
@pytest.mark.parametrize("mode", ["deterministic", "native"])
def test_the_sampler_sees_the_disturbed_logits_and_reports_their_log_probs(mode: Mode, sampling: Sampling) -> None:
    seen = []

    def disturb(logits: Tensor, seeds: Tensor, positions: Tensor, temperature: float) -> Tensor:
        seen.append((logits, disturbed(logits, seeds, positions, temperature, 2.0), seeds, positions))
        return seen[-1][1]

    sampler = BuiltInSampler(policy("qwen3", mode), STOPS, mode, CONTEXT, 40, 0, disturb=disturb)
    requests = requests_of(40, 3)
    found = sampler.generate(requests, sampling)
    ((logits, changed, seeds, positions),) = seen
    expected = sample(changed, seeds, positions, sampling, mode)
    assert [c.response_ids for c in found] == [(token,) for token in expected.tokens.tolist()]
    assert unequal(torch.cat([c.logprobs for c in found]), expected.logprobs) == 0
    assert torch.equal(torch.cat([c.kept_tokens for c in found]), expected.kept_tokens)
    assert not torch.equal(expected.tokens, sample(logits, seeds, positions, sampling, mode).tokens)
    sampler.generate(requests, replace(sampling, greedy=True))
    assert len(seen) == 1, "greedy decoding is disturbed"


def test_the_mismatch_of_a_run_is_the_chosen_one(tmp_path: Path) -> None:
    disturbed_run = small_run(tmp_path, f"rollout.mismatch_sigma={SIGMA}", "ppo.iterations=2")
    table = mismatch_summary(run_pairs(disturbed_run)).set_index(["metric", "reduction"])["value"]
    tokens = reader.read_tokens(disturbed_run)
    uncertain = float((1.0 - tokens["prob_sq_sums"]).mean())
    deltas = (tokens["old_logprobs"] - tokens["rollout_logprobs"]).to_numpy(float)
    k3 = [math.expm1(d) - d for d in deltas]
    error = float(torch.tensor(k3).std()) / math.sqrt(len(k3))
    # E[k3] = KL(rollout || old), to first order in sigma^2 = 0.01
    expected = SIGMA**2 / 2 * uncertain
    assert abs(table["k3", "token_mean"] - expected) < 4 * error + SIGMA**2 * expected
    assert error < 0.2 * expected, "the check can fail"
    assert table["k3", "token_mean"] == pytest.approx(math.fsum(k3) / len(k3), rel=1e-6)  # float32 columns
    assert table["frac_bitwise_equal", "token_mean"] < 0.05
    counted = reader.read_iterations(disturbed_run)["unequal_old_rollout_logprobs"].sum()
    assert counted == (deltas != 0).sum()


def faulty_sampler(config: RunConfig, prepared: Prepared) -> Sampler:
    """The sampler of a run with the faults of its configuration."""
    tokenizer, end_ids = prepared.task.tokenizer, prepared.sampler.stop_ids
    return with_faults(config.mismatch, prepared.sampler, prepared.state, tokenizer, end_ids, ALONE)


def greedy_logprobs(*fault: str) -> Tensor:
    """The log-probs of greedy responses before the first iteration, as an evaluation samples them."""
    config = small_config("model.warm_start_steps=0", *fault)
    prepared = prepare(config, Silent())
    sampler = faulty_sampler(config, prepared)
    requests = [Request(ids, 0) for ids in list(prepared.task.prompt_ids.values())[:8]]
    return torch.cat([c.logprobs for c in sampler.generate(requests, Sampling(1.0, 0, 1.0, 4, greedy=True))])


def test_evaluation_has_the_rounding_of_the_sampler_and_no_other_fault() -> None:
    expected = greedy_logprobs()
    for fault in ("mismatch.sampler.precision.logits=bfloat16", "mismatch.sampler.stock=bfloat16"):
        assert not torch.equal(greedy_logprobs(fault), expected), fault
    weights_and_logits = "mismatch.sampler.lag=1", "mismatch.sampler.token_bias=1", "rollout.mismatch_sigma=1"
    for fault in (*weights_and_logits, "mismatch.flip=token", "mismatch.trainer.retokenize=1"):
        assert torch.equal(greedy_logprobs(fault), expected), fault


def test_evaluation_has_a_flipped_bit() -> None:
    config = small_config("model.warm_start_steps=0", "mismatch.flip=bit")
    prepared = prepare(config, Silent())
    before = [parameter.detach().clone() for parameter in prepared.sampler.policy.parameters()]
    faulty_sampler(config, prepared)
    assert sum(unequal(a, b) for a, b in zip(prepared.sampler.policy.parameters(), before, strict=True)) == 1


@pytest.mark.parametrize("sigma", ["0", "-0.1", ".nan", ".inf"])
def test_a_mismatch_that_is_none_is_refused(sigma: str) -> None:
    with pytest.raises(UserError, match=r"rollout\.mismatch_sigma = "):
        small_config(f"rollout.mismatch_sigma={sigma}")
