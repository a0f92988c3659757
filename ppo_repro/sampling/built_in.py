"""Sample with the built-in sampler: seat requests, sample a token of each seated request, and end completions.

`seats.py` computes the logits, and `draw.py` samples from them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.base.mode import Mode
from ppo_repro.numerics.families import routers
from ppo_repro.sampler import Completion, Request, Sampling, check_request
from ppo_repro.sampling.draw import sample
from ppo_repro.sampling.seats import Sampled, Seated, Seats

# (logits [n, V] float32, seeds of the responses [n], positions [n] of the last input tokens, temperature) -> logits
LogitsHook = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def unchanged(logits: Tensor, seeds: Tensor, positions: Tensor, temperature: float) -> Tensor:
    """Return the logits unchanged."""
    return logits


class RequestQueue:
    """Requests that wait, and requests in seats. A finished request gives its seat to the next one."""

    def __init__(self, requests: Sequence[Request], seats: int) -> None:
        self._waiting, self._free = deque(enumerate(requests)), list(range(seats))
        self._seated: list[Seated] = []

    def next_batch(self) -> list[Seated]:
        """Return the answered requests, or else new ones, or else all seated requests; none when all are finished."""
        # in native numerics bits depend on the order of the rows, and recorded runs have this order
        self._seated.sort(key=lambda item: item.is_answered)
        if answered := [item for item in self._seated if item.is_answered]:
            return answered
        count = min(len(self._free), len(self._waiting))
        new = [Seated(*self._waiting.popleft(), self._free.pop()) for _ in range(count)]
        self._seated += new
        return new or list(self._seated)

    def finish(self, item: Seated) -> None:
        """Free the seat of a request."""
        self._seated.remove(item)
        self._free.append(item.seat)


@dataclass(eq=False)
class BuiltInSampler:
    """Samples with the weights that the policy has at a call. No keys and values stay after the call."""

    policy: PreTrainedModel
    stop_ids: frozenset[int]
    mode: Mode
    max_context: int  # tokens of the longest prompt and response together
    seats: int  # number of sequences at the same time
    prefill_chunk: int  # tokens of a prompt in one pass, 0 for all
    prefix_cache: bool = True  # whether prompts reuse the keys and values of a shared prefix
    live: PreTrainedModel | None = None  # the trained model, if `policy` is its copy in another dtype
    disturb: LogitsHook = unchanged  # changes logits before a token is sampled from them; only faults need it

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        if self.live is not None:  # round its weights into the copy
            for name, parameter in self.policy.named_parameters():
                parameter.copy_(self.live.get_parameter(name))
        for request in requests:
            check_request(request, sampling, self.policy.config.vocab_size, self.max_context)
        count, routes = min(self.seats, len(requests)), sampling.routes and bool(routers(self.policy))
        seats = Seats(self.policy, count, self.max_context, self.prefill_chunk, self.prefix_cache, routes)
        queue = RequestQueue(requests, count)
        done: dict[int, Completion] = {}
        while batch := queue.next_batch():
            self._sample(batch, seats.logits_after(batch), sampling)
            for item in batch:
                if reason := self._end_or_reply(item, sampling):
                    done[item.index] = _completion(item, reason, seats.release(item))
                    queue.finish(item)
        return [done[index] for index in range(len(requests))]

    def _end_or_reply(self, item: Seated, sampling: Sampling) -> str:
        """Return why the completion ends; if it continues, add the environment's reply, if any, and return ""."""
        dialogue, at_limit = item.request.dialogue, len(item.tokens) == sampling.max_response_tokens
        reason = "stop" if item.tokens[-1] in self.stop_ids else "length" if at_limit else ""
        if dialogue is None or (reason != "stop" and not dialogue.ends(item.turns[-1])):
            return reason
        reply = dialogue.reply(item.turns)
        if reply is None:
            return "stop"
        if len(item.tokens) + len(reply) >= sampling.max_response_tokens:
            return "length"
        item.put_in(reply)
        return ""

    def _sample(self, batch: list[Seated], logits: Tensor, sampling: Sampling) -> None:
        """Sample a token of each request from logits [len(batch), V]."""
        seeds = torch.tensor([item.request.seed for item in batch])
        positions = torch.tensor([item.last_position for item in batch])
        logits = logits.to(torch.float32)
        if not sampling.greedy:
            logits = self.disturb(logits, seeds, positions, sampling.temperature)
        drawn = sample(logits, seeds, positions, sampling, self.mode)
        columns = drawn.logprobs.numpy(), drawn.log_kept_mass.numpy(), drawn.kept_tokens.numpy()
        for item, *row in zip(batch, drawn.tokens.tolist(), *columns, strict=True):
            item.add(Sampled(*row))


def _completion(item: Seated, reason: str, routes: Tensor | None) -> Completion:
    tokens, *columns = zip(*item.sampled, strict=True)
    logprobs, log_kept_mass, kept_tokens = (torch.from_numpy(np.array(column)) for column in columns)
    return Completion(
        response_ids=tokens,
        logprobs=logprobs,
        log_kept_mass=log_kept_mass,
        kept_tokens=kept_tokens,
        finish_reason=reason,
        episode_ids=tuple(item.tokens),
        is_forced=tuple(item.is_forced),
        routes=routes,
    )
