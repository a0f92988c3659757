"""PPO on a language model in one file: the first iterations of experiments/quickstart.yaml, bit for bit.

    python experiments/single_file/ppo.py

The program makes a small Qwen3, teaches it some additions by supervised training, and trains it by PPO with a verifier,
a value model, a KL penalty and GAE. `ppo-repro run experiments/quickstart.yaml` does the same and records it. Each
number that the program prints has the bits of the number in the run's table `steps` or `iterations`.

The algorithm is here, in plain torch. ppo_repro computes what otherwise depends on the machine or the batch: forward
and backward passes, samples, log-softmax, exp, means, AdamW and random numbers. With stock torch in their place the
algorithm is the same, but the log-probs of sampler and trainer differ in their last bits.

Left out, see ppo_repro/loop.py: held-out evaluation, records, checkpoints, micro-batches, several processes, top-k and
top-p, other objectives, KL estimators, advantages and rewards, and the checks that end a run where two numbers differ.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

import ppo_repro
from ppo_repro.api.text import Response
from ppo_repro.base.processes import SLOTS
from ppo_repro.base.seeding import permutation, sample_seed
from ppo_repro.models.batches import TokenBatch, lay_out
from ppo_repro.models.networks import make_value_model, policy_logits, value_predictions
from ppo_repro.models.tiny import draw_weights, make_tokenizer
from ppo_repro.numerics import exp
from ppo_repro.numerics.adamw import AdamWSettings
from ppo_repro.numerics.optimizer import Optimizer
from ppo_repro.numerics.sequences import slots_of
from ppo_repro.numerics.sums import mean_of
from ppo_repro.numerics.token_statistics import token_statistics
from ppo_repro.numerics.weights import weights_digest
from ppo_repro.tasks.problems import Problem, arithmetic, choose, split

SEED = 0
ITERATIONS = 3  # the quickstart has 70
PROMPTS = 512  # of an iteration; each gets one response
MAX_RESPONSE_TOKENS = 8
MAX_CONTEXT = 32  # tokens of prompt and response together
KL_COEF = 0.02
GAMMA, GAE_LAMBDA = 1.0, 1.0  # so an advantage is the sum of the rewards from the token on, minus the value
EPOCHS = 2
MINIBATCH = 128  # responses of an optimizer step
CLIP_RANGE = 0.2
VALUE_CLIP_RANGE = 0.2
# a run of few steps needs a shorter memory of squared gradients than the usual beta2 = 0.999
ADAMW = AdamWSettings(learning_rate=1e-3, beta1=0.9, beta2=0.98, eps=1e-8, weight_decay=0.0, max_grad_norm=1.0)
WARM_START_STEPS = 400  # at most
WARM_START_ACCURACY = 0.2  # PPO needs some right answers to begin with
WARM_START_ADAMW = replace(ADAMW, learning_rate=8e-3, weight_decay=0.01)


@dataclass(frozen=True)
class Rollout:
    """The B responses of an iteration, and the numbers of their N tokens, one response after the other."""

    responses: list[tuple[int, ...]]  # [B] token ids, the end token included
    scores: Tensor  # [B]
    rollout_logprobs: Tensor  # [N] nats, in the sampler, while it sampled
    old_logprobs: Tensor  # [N] nats, in the trainer, before the first step
    ref_logprobs: Tensor  # [N] nats, in the reference
    rewards: Tensor  # [N]
    values: Tensor  # [N] expected sum of the rewards from the token on
    advantages: Tensor  # [N] whitened
    returns: Tensor  # [N] what the value model learns to predict


@dataclass(frozen=True)
class Step:
    """One optimizer step of policy and value model on the M tokens of a minibatch. Losses are before the step."""

    new_logprobs: Tensor  # [M] nats
    ratios: Tensor  # [M]
    policy_losses: Tensor  # [M]
    is_clipped: Tensor  # [M] bool, the clip removes the gradient
    new_values: Tensor  # [M]
    value_losses: Tensor  # [M]
    grad_norm: float  # of the policy, before clipping
    value_grad_norm: float
    policy_digest: str  # of the weights after the step
    value_digest: str


def make_model(vocab_size: int, eos: int | None) -> PreTrainedModel:
    """Make a Qwen3 of two layers. To train a real model, load it here, and its tokenizer in `ppo`."""
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=MAX_CONTEXT,
        tie_word_embeddings=True,
        eos_token_id=eos,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config)
    draw_weights(model, SEED)  # torch's random numbers can differ between its versions
    return model


def for_training(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], by: Optimizer) -> TokenBatch:
    """Lay out a minibatch whose gradients go to an optimizer, which adds them in one fixed order."""
    return lay_out(prompts, responses, slots=slots_of(range(len(prompts)), len(prompts), SLOTS)).with_sums(by.sink)


def logprobs_of(policy: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """Compute log pi(token) of the n response tokens of a batch: [n], nats, differentiable."""
    return token_statistics(policy_logits(policy, batch), batch.targets, 1.0, None, "deterministic")[0]


def backward(losses: Tensor) -> None:
    """Compute the gradients of the mean of n losses, by starting from 1/n at each; autograd adds no losses itself."""
    torch.autograd.backward(losses, torch.full_like(losses, 1.0 / len(losses)))


def warm_start(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem], accuracy: float
) -> None:
    """Train on right answers until the policy gives some: where every score is 0, PPO learns nothing."""
    optimizer = Optimizer(policy, WARM_START_ADAMW, "deterministic")
    greedy = ppo_repro.Sampling(max_response_tokens=MAX_RESPONSE_TOKENS, greedy=True)
    prompts = tokenizer([p.prompt for p in problems])["input_ids"]
    answers = [[*ids, tokenizer.eos_token_id] for ids in tokenizer([p.answer for p in problems])["input_ids"]]
    order: list[int] = []
    step, end, epoch = 0, WARM_START_STEPS, 0
    while step < end:
        if len(order) < MINIBATCH:
            order, epoch = permutation(len(problems), "warm start", SEED, epoch).tolist(), epoch + 1
        chosen, order = order[:MINIBATCH], order[MINIBATCH:]
        scale = min(1.0, (step + 1) / 30, (end - step) / 20)  # rises at the start, falls at the end
        optimizer.settings = replace(WARM_START_ADAMW, learning_rate=WARM_START_ADAMW.learning_rate * scale)
        batch = for_training([prompts[i] for i in chosen], [answers[i] for i in chosen], optimizer)
        optimizer.step(partial(backward, -logprobs_of(policy, batch)))
        step += 1
        if step % 10 == 0 and step + 20 < end:
            given = ppo_repro.generate(policy, prompts[:256], greedy)
            right = sum(list(r.response_ids) == answer for r, answer in zip(given, answers[:256], strict=True))
            if right / len(given) >= accuracy:
                end = step + 20


def score(response: Response, answer: str) -> float:
    """Return 1 for the right answer with an end token after it, else 0."""
    return float(response.finish_reason == "stop" and (response.text or "").strip() == answer)


def gae(rewards: Tensor, values: Tensor) -> Tensor:
    """Compute GAE of one response: A_t = delta_t + gamma lambda A_{t+1} with delta_t = r_t + gamma V_{t+1} - V_t.

    After the last token V and A are 0, also if the response was cut at the limit.
    """
    advantages = torch.zeros(len(rewards))
    advantage, next_value = torch.tensor(0.0), torch.tensor(0.0)
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + next_value * GAMMA - values[t]
        advantage = delta + advantage * (GAMMA * GAE_LAMBDA)
        advantages[t], next_value = advantage, values[t]
    return advantages


def whiten(x: Tensor) -> Tensor:
    """Shift and scale numbers to mean 0 and variance 1."""
    centred = x.double() - mean_of(x)
    return (centred * (1.0 / math.sqrt(mean_of(centred * centred) + 1e-8))).float()


def policy_loss(ratios: Tensor, advantages: Tensor, clip_range: float) -> tuple[Tensor, Tensor]:
    """Return -min(r A, clip(r, 1 - eps, 1 + eps) A) of each token, and whether the clip removes its gradient."""
    unclipped, clipped = ratios * advantages, ratios.clamp(1.0 - clip_range, 1.0 + clip_range) * advantages
    return -torch.min(unclipped, clipped), clipped < unclipped


def value_loss(new_values: Tensor, old_values: Tensor, returns: Tensor) -> Tensor:
    """Return 1/2 max((V - R)^2, (V_old + clip(V - V_old, -eps, eps) - R)^2) of each token."""
    step = (new_values - old_values).detach()
    bounded = old_values + step.clamp(-VALUE_CLIP_RANGE, VALUE_CLIP_RANGE)
    # not by torch.max: where nothing is clipped, V_old + (V - V_old) is V only up to rounding
    is_clipped = (step.abs() > VALUE_CLIP_RANGE) & ((bounded - returns) ** 2 > (new_values - returns) ** 2)
    errors = torch.where(is_clipped, bounded, new_values) - returns
    return errors * errors * 0.5


def ppo(
    iterations: int = ITERATIONS, warm_start_accuracy: float = WARM_START_ACCURACY, clip_range: float = CLIP_RANGE
) -> Iterator[tuple[Rollout, list[Step]]]:
    """Make a policy, warm-start it, train it by PPO, and yield each iteration."""
    problems = split(arithmetic(max_operand=49), num_eval_prompts=256, seed=SEED).train
    tokenizer = make_tokenizer(problems, vocab_size=24)
    model = make_model(len(tokenizer), tokenizer.eos_token_id)
    policy = ppo_repro.deterministic(model, max_context=MAX_CONTEXT)
    warm_start(policy, tokenizer, problems, warm_start_accuracy)

    # the reference begins as the policy, and so does the value model, whose head has one output
    reference = copy.deepcopy(policy).requires_grad_(False)
    model.load_state_dict(policy.state_dict())
    value_model = make_value_model(model, "deterministic", MAX_CONTEXT, SEED)
    policy_optimizer = Optimizer(policy, ADAMW, "deterministic")
    value_optimizer = Optimizer(value_model, ADAMW, "deterministic")

    for iteration in range(iterations):
        # sample: a token is a function of the logits, its position and the response's seed, whatever the batch
        chosen, seeds, times = choose(problems, PROMPTS, SEED, iteration), [], Counter[str]()
        for problem in chosen:  # a problem can come twice, where one pass over all problems ends and the next begins
            seeds.append(sample_seed(SEED, iteration, problem.key, times[problem.key]))
            times[problem.key] += 1
        sampling = ppo_repro.Sampling(max_response_tokens=MAX_RESPONSE_TOKENS)
        texts = [problem.prompt for problem in chosen]
        sampled = ppo_repro.generate(policy, texts, sampling, tokenizer=tokenizer, seeds=seeds, slots=256)
        scores = torch.tensor([score(r, problem.answer) for r, problem in zip(sampled, chosen, strict=True)])

        # score the tokens by policy, reference and value model as they are before the update; the policy's log-probs
        # have the bits of the sampler's, although they are computed in another batch and without a cache
        prompts, responses = [r.prompt_ids for r in sampled], [r.response_ids for r in sampled]
        lengths = [len(response) for response in responses]
        with torch.no_grad():
            batch = lay_out(prompts, responses)
            old_logprobs, ref_logprobs = logprobs_of(policy, batch), logprobs_of(reference, batch)
            values = value_predictions(value_model, batch)

        # each token pays for its distance from the reference (KL estimator k1); the last token gets the score
        rewards = torch.zeros(len(values))
        rewards[torch.tensor(lengths).cumsum(0) - 1] = scores
        rewards -= (old_logprobs - ref_logprobs) * KL_COEF
        raw_advantages = torch.cat(list(map(gae, rewards.split(lengths), values.split(lengths))))
        rollout = Rollout(
            responses=responses,
            scores=scores,
            rollout_logprobs=torch.cat([r.logprobs for r in sampled]),
            old_logprobs=old_logprobs,
            ref_logprobs=ref_logprobs,
            rewards=rewards,
            values=values,
            advantages=whiten(raw_advantages),  # over the whole iteration, because a minibatch has few right answers
            returns=raw_advantages + values,
        )

        # update: several epochs over the same tokens, in random minibatches of whole responses
        steps: list[Step] = []
        owners = torch.arange(len(responses)).repeat_interleave(torch.tensor(lengths))  # the response of each token
        for epoch in range(EPOCHS):
            order = torch.from_numpy(permutation(len(responses), "minibatches", SEED, iteration, epoch))
            for minibatch in order.split(MINIBATCH):
                members = sorted(minibatch.tolist())  # gradients are added in the order of the responses
                tokens = torch.isin(owners, minibatch)
                asked, answers = [prompts[i] for i in members], [responses[i] for i in members]

                # the ratio is to the sampler's log-probs, because the sampler drew the tokens
                new_logprobs = logprobs_of(policy, for_training(asked, answers, policy_optimizer))
                ratios = exp(new_logprobs - rollout.rollout_logprobs[tokens])
                policy_losses, is_clipped = policy_loss(ratios, rollout.advantages[tokens], clip_range)
                grad_norm = policy_optimizer.step(partial(backward, policy_losses))

                new_values = value_predictions(value_model, for_training(asked, answers, value_optimizer))
                value_losses = value_loss(new_values, values[tokens], rollout.returns[tokens])
                value_grad_norm = value_optimizer.step(partial(backward, value_losses))
                steps.append(
                    Step(
                        new_logprobs=new_logprobs.detach(),
                        ratios=ratios.detach(),
                        policy_losses=policy_losses.detach(),
                        is_clipped=is_clipped,
                        new_values=new_values.detach(),
                        value_losses=value_losses.detach(),
                        grad_norm=grad_norm,
                        value_grad_norm=value_grad_norm,
                        policy_digest=weights_digest(policy.named_parameters()),
                        value_digest=weights_digest(value_model.named_parameters()),
                    )
                )
        yield rollout, steps


def main() -> None:
    """Print each optimizer step of the first iterations."""
    columns = "{:9}  {:<10}  {:<20}  {:<19}  {:<19}  {}".format
    print(columns("iteration", "score_mean", "clip_fraction", "grad_norm", "value_grad_norm", "policy_digest"))
    for iteration, (rollout, steps) in enumerate(ppo()):
        score_mean = mean_of(rollout.scores)
        for s in steps:
            norms = s.grad_norm, s.value_grad_norm
            print(columns(iteration, score_mean, mean_of(s.is_clipped), *norms, s.policy_digest), flush=True)


if __name__ == "__main__":
    main()
