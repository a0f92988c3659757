"""Decode and encode responses again before training, as in stacks that pass texts instead of token ids."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import fsum

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ppo_repro.base.seeding import words
from ppo_repro.buffers import Spans
from ppo_repro.sampler import Completion, EncodedAgain, Request, Sampler, Sampling
from ppo_repro.tasks.tokenizer import decode, spans, special_ids


@dataclass(frozen=True)
class Encoding:
    """The T new tokens of a response whose text was encoded again, and their relation to the S sampled tokens."""

    ids: list[int]  # [T]
    spans: Spans  # [T]
    owners: list[int]  # [S] the new token that has the last character of a sampled token
    sources: list[int]  # [T] the last sampled token that a new token owns, or else the one with its last character
    as_sampled: list[bool]  # [T] whether a new token is a sampled token at the same place in the text

    def summed(self, logprobs: Tensor) -> Tensor:
        """Sum the values [S] of the sampled tokens that belong to each new token: [T] float32."""
        parts: list[list[float]] = [[] for _ in self.ids]
        for owner, value in zip(self.owners, logprobs.tolist(), strict=True):
            parts[owner].append(value)
        return torch.tensor([fsum(part) for part in parts], dtype=torch.float32)


def encode_again(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], before: Spans, most: int, ended: bool
) -> Encoding | None:
    """Encode the decoded text of a response again, and add its end token if it `ended`.

    Special tokens inside a response have no text, and are lost. Returns None if the new response would have no token,
    or more than `most` tokens.
    """
    tail = [ids[-1]] if ended and ids[-1] in special_ids(tokenizer) else []
    body = list(ids[: len(ids) - len(tail)])
    text = decode(tokenizer, ids)
    new = [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
    if (body and not new) or len(new) + len(tail) > most:
        return None
    after = spans(tokenizer, [*new, *tail], text)
    owners, last = [], -1
    for end in before.char_end[: len(body)]:
        owners.append(next((j for j in range(max(last, 0), len(new)) if after.char_end[j] >= end), len(new) - 1))
        last = owners[-1]
    owned, last_owned = Counter(owners), {owner: t for t, owner in enumerate(owners)}
    ends = before.char_end[: len(body)]  # in rising order
    with_end = [min(bisect_left(ends, end), len(body) - 1) for end in after.char_end[: len(new)]]
    sources = [last_owned.get(token, with_end[token]) for token in range(len(new))]
    old_spans, new_spans = (list(zip(x.char_start, x.char_end, strict=True)) for x in (before, after))
    same = [owned[j] == 1 and new[j] == body[t] and new_spans[j] == old_spans[t] for j, t in enumerate(sources)]
    if tail:
        owners, sources, same = [*owners, len(new)], [*sources, len(body)], [*same, True]
    return Encoding([*new, *tail], after, owners, sources, same)


@dataclass(frozen=True)
class RetokenizingSampler:
    """A sampler that replaces the tokens of some sampled responses by other tokens of the same text.

    `logprobs` and `log_kept_mass` of a new token are the sums over the sampled tokens that it owns, 0 if it owns none.
    So the log-prob of a response stays. Routes and kept sets are dropped. Greedy evaluation does not change.
    """

    sampler: Sampler
    tokenizer: PreTrainedTokenizerBase
    share: float  # share of the responses that are encoded again

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        completions = self.sampler.generate(requests, sampling)
        if sampling.greedy:
            return completions
        most = sampling.max_response_tokens
        draws = (int(words(1, "retokenize", request.seed)[0]) for request in requests)
        pairs = zip(completions, draws, strict=True)
        return [self._encoded(c, most if draw < self.share * 2.0**64 else 0) for c, draw in pairs]

    def _encoded(self, completion: Completion, most: int) -> Completion:
        """Encode a completion again in at most `most` tokens; return it unchanged if that is not possible."""
        ids, ended = completion.response_ids, completion.finish_reason == "stop"
        text = decode(self.tokenizer, ids)
        before = spans(self.tokenizer, ids, text)
        new = encode_again(self.tokenizer, ids, before, most, ended) if most else None
        if new is None:
            unchanged = list(range(len(ids)))
            new = Encoding(list(ids), before, unchanged, unchanged, [True] * len(unchanged))
        count, versions = len(new.ids), completion.policy_versions
        return replace(
            completion,
            response_ids=tuple(new.ids),
            logprobs=new.summed(completion.logprobs),
            log_kept_mass=new.summed(completion.log_kept_mass),
            kept_tokens=torch.empty(count, 0, dtype=torch.uint8),
            policy_versions=None if versions is None else tuple(versions[source] for source in new.sources),
            encoded_again=EncodedAgain(text, ids, tuple(new.as_sampled)),
            routes=None,
        )
