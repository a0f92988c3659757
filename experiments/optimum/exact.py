"""Compute the distance of a trained policy from the known optimum, by sums over every possible response.

The objective J(pi) = E[R(x, y)] - beta KL(pi || reference), with KL over whole responses, has its maximum beta log
Z(x), Z(x) = sum_y pi_ref(y|x) exp(R(x, y) / beta), at pi*(y|x) = pi_ref(y|x) exp(R / beta) / Z, and J(pi) = beta log Z
- beta KL(pi || pi*). `experiments/kl/README.md` explains why this is the fixed point of PPO.

`python -m experiments.optimum.exact RUN` prints both for every prompt of a recorded run.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.base.output import Parser, tell
from ppo_repro.base.program import program
from ppo_repro.base.watcher import Silent
from ppo_repro.config.algorithm import NoKL
from ppo_repro.config.run import RunConfig
from ppo_repro.models.batches import lay_out
from ppo_repro.models.load import load_folder
from ppo_repro.models.networks import make_policy, policy_logits
from ppo_repro.numerics.token_statistics import token_statistics
from ppo_repro.records.folder import FINAL, load_recorded_config
from ppo_repro.runs.prepare import Prepared, prepare
from ppo_repro.tasks.problems import row_of
from ppo_repro.tasks.tokenizer import decode

Response = tuple[int, ...]


def all_responses(vocab_size: int, stop_ids: frozenset[int], longest: int) -> list[Response]:
    """Return every possible response: ended by a stop token, or cut off after `longest` tokens."""
    going_on = [i for i in range(vocab_size) if i not in stop_ids]
    ended = [
        (*begin, stop)
        for length in range(longest)
        for begin in itertools.product(going_on, repeat=length)
        for stop in sorted(stop_ids)
    ]
    return ended + list(itertools.product(going_on, repeat=longest))


@torch.no_grad()
def response_logprobs(
    policy: PreTrainedModel, prompt: Response, responses: Sequence[Response], config: RunConfig
) -> Tensor:
    """Return log pi(y|x) of whole responses, float64 [n], nats."""
    batch = lay_out([prompt] * len(responses), responses, "right")
    logits = policy_logits(policy, batch)
    tokens, _ = token_statistics(logits, batch.targets, config.rollout.temperature, None, config.numerics.mode)
    return torch.stack([response.sum() for response in tokens.to(torch.float64).split([len(y) for y in responses])])


def log_sum_exp(x: Tensor) -> float:
    """Return log sum exp over all elements of x."""
    return float(torch.logsumexp(x, 0))


def objective(log_p: Tensor, log_ref: Tensor, rewards: Tensor, beta: float) -> float:
    """Return E_p[R] - beta KL(p || ref); the arguments are float64 [n] over all responses."""
    return math.fsum((log_p.exp() * (rewards - beta * (log_p - log_ref))).tolist())


def optimum(log_ref: Tensor, rewards: Tensor, beta: float) -> tuple[float, Tensor]:
    """Return (beta log Z, log pi* [n]) of one prompt; Z and pi* are defined above."""
    tilted = log_ref + rewards / beta
    return beta * log_sum_exp(tilted), tilted - log_sum_exp(tilted)


@dataclass(frozen=True)
class Distance:
    """Objectives of one prompt: the reference's, a policy's, and the maximum."""

    prompt: str
    reference: float
    policy: float
    optimum: float
    expected_reward: float  # of the policy
    kl: float  # KL(policy || reference), nats per response
    likeliest_text: str  # under the optimum


def distances(config: RunConfig, prepared: Prepared, policy: PreTrainedModel, beta: float) -> list[Distance]:
    """Return the distance of every training prompt."""
    task = prepared.task
    (reward,) = task.judge.functions
    assert reward is not None, "the reward is a function of the experiment"
    responses = all_responses(policy.config.vocab_size, prepared.sampler.stop_ids, config.rollout.max_response_tokens)
    texts = [decode(task.tokenizer, y) for y in responses]
    results = []
    for problem in sorted(task.problems.train, key=lambda p: p.key):
        rewards = reward([row_of(problem, [text], text) for text in texts])
        ids = task.prompt_ids[problem.key]
        log_p, log_ref = (response_logprobs(m, ids, responses, config) for m in (policy, prepared.state.reference))
        results.append(
            distance(problem.prompt, log_p, log_ref, torch.tensor(rewards, dtype=torch.float64), beta, texts)
        )
    return results


def distance(
    prompt: str, log_p: Tensor, log_ref: Tensor, rewards: Tensor, beta: float, texts: Sequence[str]
) -> Distance:
    """Return the distance of one prompt from log-probs and rewards of all its responses, float64 [n] each."""
    best, log_best = optimum(log_ref, rewards, beta)
    return Distance(
        prompt=prompt,
        reference=objective(log_ref, log_ref, rewards, beta),
        policy=objective(log_p, log_ref, rewards, beta),
        optimum=best,
        expected_reward=math.fsum((log_p.exp() * rewards).tolist()),
        kl=math.fsum((log_p.exp() * (log_p - log_ref)).tolist()),
        likeliest_text=texts[int(log_best.argmax())],
    )


def read(run_dir: Path, beta: float | None = None) -> list[Distance]:
    """Return the distances of a recorded run's final policy, for `beta`, or None for the run's own."""
    config = load_recorded_config(run_dir)
    prepared = prepare(config, Silent())
    source, _ = load_folder(run_dir / FINAL)
    numerics = config.numerics
    policy = make_policy(source, numerics.mode, numerics.max_context, numerics.precision)
    assert not isinstance(config.kl, NoKL)
    return distances(config, prepared, policy, config.kl.kl_coef if beta is None else beta)


@program
def main(given: Sequence[str] | None) -> None:
    parser = Parser(description="a trained policy beside the optimum, by summing over all responses")
    parser.add_argument("run", type=Path, help="folder of a recorded run")
    parser.add_argument("--beta", type=float, help="measure for this weight of the KL instead of the run's")
    arguments = parser.parse_args(given)
    results = read(arguments.run, arguments.beta)
    tell("prompt  reference     policy    optimum  gap/optimum  gap/gain   reward   KL nats  likeliest at the optimum")
    for d in results:
        gap = d.optimum - d.policy
        tell(
            f"{d.prompt:<6} {d.reference:>10.5f} {d.policy:>10.5f} {d.optimum:>10.5f} {gap / d.optimum:>12.3%}"
            f" {gap / (d.optimum - d.reference):>9.3%} {d.expected_reward:>8.4f} {d.kl:>9.4f}  {d.likeliest_text!r}"
        )


if __name__ == "__main__":
    sys.exit(main())
