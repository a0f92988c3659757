"""Prompts and responses of a tiny model, and faults of training stacks made from stock transformers in float32."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.testing.audit.judged_side import JudgedSide
from ppo_repro.testing.audit.report import side_fields
from ppo_repro.testing.dumps import DumpedResponse
from tests.support.models import qwen3_config, seeded, small_model

TEMPERATURE, BOS_ID, EOS_ID, PAD_ID = 0.8, 1, 2, 0
SHAPE = ((6, 9), (4, 17), (5, 12), (7, 20), (3, 15), (6, 11), (5, 8), (4, 17))  # tokens of prompt and response
Values = list[Tensor]


def cause_of(side: JudgedSide) -> str:
    """The cause as `--json` says it."""
    return str(side_fields(side)["cause"])


@dataclass(frozen=True)
class Material:
    """Prompts, and responses that were sampled from the 8 likeliest tokens, so that a cut at 8 keeps them all."""

    model: PreTrainedModel
    prompts: list[list[int]]
    responses: list[list[int]]

    @cached_property
    def plain(self) -> list[Tensor]:
        """Logits [n, V] float32 of each response."""
        return self.logits()

    @torch.no_grad()
    def logits(
        self,
        model: PreTrainedModel | None = None,
        prompt: Callable[[int], Sequence[int]] | None = None,
        positions: Callable[[int, int], Sequence[int]] | None = None,
    ) -> list[Tensor]:
        """By another model, after other prompts, at other positions."""
        found = []
        for i, response in enumerate(self.responses):
            before = list(self.prompts[i] if prompt is None else prompt(i))
            ids = torch.tensor([[*before, *response[:-1]]])
            options = {}
            if positions is not None:
                options["position_ids"] = torch.tensor([list(positions(i, ids.shape[1]))])
            out = (model or self.model)(ids, attention_mask=torch.ones_like(ids), **options)
            found.append(out.logits[0, len(before) - 1 :].float())
        return found

    def logprobs(self, logits: list[Tensor] | None = None, temperature: float = TEMPERATURE) -> Values:
        """Of the responses, float64 sums of float32 logits."""
        pairs = zip(self.plain if logits is None else logits, self.responses, strict=True)
        return [(x.double() / temperature).log_softmax(-1)[range(len(r)), r] for x, r in pairs]

    def matrix(self, i: int) -> Tensor:
        """Log-probs [n, V] at the temperature, of response i."""
        return (self.plain[i].double() / TEMPERATURE).log_softmax(-1)

    def dump(self, sampler: Values, trainer: Values, mask: list[list[bool]] | None = None) -> list[DumpedResponse]:
        """The responses of a dump with these numbers."""
        found = []
        for i, (p, r, s, t) in enumerate(zip(self.prompts, self.responses, sampler, trainer, strict=True)):
            counts = np.ones(len(r), bool) if mask is None else np.array(mask[i])
            sides = [np.array(x.tolist(), np.float32) for x in (s, t)]
            found.append(DumpedResponse(i + 1, tuple(p), tuple(r), *sides, counts))
        return found


Fault = Callable[[Material], Values]


@torch.no_grad()
def material(model: PreTrainedModel, shape: Sequence[tuple[int, int]] = SHAPE, kept: int = 8) -> Material:
    """Responses that `model` samples at TEMPERATURE from its `kept` likeliest tokens."""
    generator, prompts, responses = seeded(11), [], []
    vocabulary = model.config.vocab_size
    for start, length in shape:
        ids = torch.randint(3, vocabulary, (start,), generator=generator).tolist()
        prompts.append(list(ids))
        for _ in range(length):
            top = (model(input_ids=torch.tensor([ids])).logits[0, -1] / TEMPERATURE).topk(kept)
            ids.append(int(top.indices[torch.multinomial(top.values.softmax(-1), 1, generator=generator)]))
        responses.append(ids[start:])
    return Material(model, prompts, responses)


@torch.no_grad()
def sampled_by(m: Material, draw: Callable[[Tensor], int]) -> Material:
    """Responses of the same lengths, whose tokens `draw` takes from the model's logits [V]."""
    rows, longest = [list(prompt) for prompt in m.prompts], max(map(len, m.responses))
    for _ in range(longest):  # prompts are of one length
        logits = m.model(input_ids=torch.tensor(rows)).logits[:, -1]
        for row, of in zip(rows, logits, strict=True):
            row.append(draw(of))
    return Material(m.model, m.prompts, [row[len(prompt) :] for row, prompt in zip(rows, m.prompts, strict=True)])


def response(prompt: tuple[int, ...], ids: tuple[int, ...], padding: tuple[int, ...] = ()) -> DumpedResponse:
    """A response without log-probs."""
    values, counts = np.zeros(len(ids), np.float32), np.ones(len(ids), bool)
    return DumpedResponse(1, prompt, ids, values, values, counts, padding)


def first(n: int, m: Material) -> Material:
    """Its first n responses."""
    return Material(m.model, m.prompts[:n], m.responses[:n])


def half(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """As a stack loads it: `from_pretrained` leaves rotary frequencies in float32."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return type(model).from_pretrained(folder, dtype=dtype, use_safetensors=True).eval()


def old() -> PreTrainedModel:
    return small_model(qwen3_config(), 5)


def bf16(m: Material) -> PreTrainedModel:
    return half(m.model, torch.bfloat16)


def padding(m: Material, i: int) -> list[int]:
    return [PAD_ID] * (max(map(len, m.prompts)) - len(m.prompts[i]))


def packed(m: Material, i: int) -> list[int]:
    return [*(m.prompts[i - 1] + m.responses[i - 1] if i else []), *m.prompts[i]]


def at(by: Callable[[int], int]) -> Fault:
    """Positions of the response moved by `by` of the prompt's length."""

    def fault(m: Material) -> Values:
        def positions(i: int, count: int) -> list[int]:
            start = len(m.prompts[i])
            return [p if p < start else p + by(start) for p in range(count)]

        return m.logprobs(m.logits(positions=positions))

    return fault


def after(prompt: Callable[[Material, int], Sequence[int]]) -> Fault:
    """The model sees prompt(m, i) before response i."""
    return lambda m: m.logprobs(m.logits(prompt=lambda i: prompt(m, i)))


def without_prompt(m: Material) -> Values:
    """The first token has no context: its number is any."""
    later = Material(m.model, [r[:1] for r in m.responses], [r[1:] for r in m.responses]).logprobs()
    return [torch.cat([torch.tensor([-3.0], dtype=torch.float64), v]) for v in later]


def without_cache(m: Material) -> Values:
    """After its first token, a response is scored token by token, each after the one before alone."""
    found = []
    for i, (prompt, response) in enumerate(zip(m.prompts, m.responses, strict=True)):
        alone = Material(m.model, [[token] for token in response[:-1]], [[token] for token in response[1:]])
        positions = range(len(prompt), len(prompt) + len(response) - 1)
        later = alone.logprobs(alone.logits(positions=lambda k, count, at=positions: [at[k]]))
        found.append(torch.cat([m.logprobs()[i][:1], *later]))
    return found


def with_bos(m: Material) -> list[Tensor]:
    return m.logits(prompt=lambda i: [BOS_ID, *m.prompts[i]])


def of_tokens(change: Callable[[Tensor], Tensor]) -> Fault:
    """A fault of what is recorded: of each response's log-probs."""
    return lambda m: [change(v) for v in m.logprobs()]


def shifted(k: int) -> Callable[[Tensor], Tensor]:
    def fault(v: Tensor) -> Tensor:
        edge = torch.full((min(abs(k), len(v)),), -3.0, dtype=v.dtype)
        return torch.cat([v[k:], edge]) if k > 0 else torch.cat([edge, v[:k]])

    return fault


def kept(keep: Callable[[Tensor], Tensor], cut_at: float = TEMPERATURE, temperature: float = TEMPERATURE) -> Fault:
    """Normalised over the tokens that keep(p [n, V]) says, p at the temperature `cut_at`, and the sampled one."""

    def fault(m: Material) -> Values:
        found = []
        for x, r in zip(m.plain, m.responses, strict=True):
            within, n = keep((x.double() / cut_at).softmax(-1)), range(len(r))
            within[n, r] = True
            p = (x.double() / temperature).softmax(-1)
            found.append((p[n, r] / (p * within).sum(-1)).log())
        return found

    return fault


def top_k(k: int) -> Callable[[Tensor], Tensor]:
    return lambda p: p >= p.topk(k, -1).values[:, -1:]


def first_part(p: Tensor, order: Tensor, limit: float) -> Tensor:
    """Whether the tokens that come before in this order have less than `limit` of the probability."""
    sums = p.gather(1, order)
    return torch.zeros_like(p, dtype=torch.bool).scatter(1, order, sums.cumsum(-1) - sums < limit)


def top_p(limit: float) -> Callable[[Tensor], Tensor]:
    return lambda p: first_part(p, p.argsort(-1, descending=True), limit)


def penalty(change: Callable[[Tensor, int], Tensor], with_prompt: bool = False) -> Fault:
    """change(logit, count) for each token that the response, or prompt and response, had `count` times before."""

    def fault(m: Material) -> Values:
        found = []
        for x, prompt, response in zip(m.plain, m.prompts, m.responses, strict=True):
            logits = x.double().clone()
            for t in range(len(response)):
                before = [*(prompt if with_prompt else ()), *response[:t]]
                for v in set(before):
                    logits[t, v] = change(logits[t, v], before.count(v))
            found.append(logits)
        return m.logprobs(found)

    return fault


def repetition(logit: Tensor, count: int) -> Tensor:
    return logit / 1.3 if logit > 0 else logit * 1.3


def noise(size: float, seed: int = 3) -> Callable[[Tensor], Tensor]:
    generator = seeded(seed)
    return lambda v: v + size * torch.randn(len(v), generator=generator)


def paired(token: int = 0, logits: int = 0) -> Fault:
    """The log-prob of the token so many places on, by the logits so many places on."""

    def fault(m: Material) -> Values:
        found = []
        for i, r in enumerate(m.responses):
            row, n = m.matrix(i), len(r)
            inside = [0 <= t + token < n and 0 <= t + logits < n for t in range(n)]
            found.append(torch.tensor([row[t + logits, r[t + token]] if x else -3.0 for t, x in enumerate(inside)]))
        return found

    return fault


def of_matrix(change: Callable[[Tensor, Tensor], Tensor]) -> Fault:
    """change(log-probs [n, V], sampled ids [n, 1]) -> [n]."""
    return lambda m: [change(m.matrix(i), torch.tensor(r)[:, None]) for i, r in enumerate(m.responses)]


def as_bfloat16(v: Tensor) -> Tensor:
    return v.float().bfloat16().double()


def from_point(fault: Fault, start: int) -> Fault:
    """Right up to a token, then wrong."""
    return lambda m: [torch.cat([g[:start], b[start:]]) for g, b in zip(m.logprobs(), fault(m), strict=True)]


def up_to_point(fault: Fault, end: int) -> Fault:
    """Wrong up to a token, then right."""
    return lambda m: [torch.cat([b[:end], g[end:]]) for g, b in zip(m.logprobs(), fault(m), strict=True)]


def some_rows(fault: Fault, rows: set[int]) -> Fault:
    return lambda m: [b if i in rows else g for i, (g, b) in enumerate(zip(m.logprobs(), fault(m), strict=True))]


NO_T = "temperature 1 instead of 0.8"
FAULTS: dict[str, tuple[Fault, str]] = {
    "bfloat16": (lambda m: m.logprobs(m.logits(bf16(m))), "computed in bfloat16"),
    "float16": (lambda m: m.logprobs(m.logits(half(m.model, torch.float16))), "computed in float16"),
    "no temperature": (lambda m: m.logprobs(temperature=1.0), NO_T),
    "other temperature": (lambda m: m.logprobs(temperature=0.65), "temperature 0.65 instead of 0.8"),
    "temperature twice": (lambda m: m.logprobs(temperature=0.64), "temperature 0.8 applied twice"),
    "temperature multiplied": (lambda m: m.logprobs(temperature=1 / 0.8), "logits multiplied by the temperature 0.8"),
    "divided after the softmax": (
        lambda m: [v / 0.8 for v in m.logprobs(temperature=1.0)],
        "temperature 1 instead of 0.8 and divided by the temperature 0.8 after the softmax",
    ),
    "old weights": (lambda m: m.logprobs(m.logits(old())), "weights of old"),
    "BOS": (after(lambda m, i: [BOS_ID, *m.prompts[i]]), "prompt with a BOS token before it"),
    "only the last token of the prompt": (after(lambda m, i: m.prompts[i][-1:]), "prompt cut to its last 1 tokens"),
    "first token missing": (after(lambda m, i: m.prompts[i][1:]), "prompt without its first token"),
    "prompt truncated": (after(lambda m, i: m.prompts[i][-4:]), "prompt cut to its last 4 tokens"),
    "padded": (after(lambda m, i: [*padding(m, i), *m.prompts[i]]), "attention to the padding before the prompt"),
    "last token of the prompt missing": (after(lambda m, i: m.prompts[i][:-1]), "prompt without its last token"),
    "prompt without its end": (after(lambda m, i: m.prompts[i][:3]), "prompt cut to its first 3 tokens"),
    "no cache": (without_cache, "only the token before (no key/value cache)"),
    "no prompt": (without_prompt, "no prompt"),
    "packed": (after(packed), "attention to the response before it"),
    "wrong prompts": (after(lambda m, i: (m.prompts[i + 1 :] or m.prompts[i:])[0]), "prompt of the response after it"),
    "prompts of the rows before": (after(lambda m, i: m.prompts[max(i - 1, 0)]), "prompt of the response before it"),
    "positions again": (at(lambda start: -start), "positions from 0 at the response"),
    "positions too high": (at(lambda start: 1), "positions of the response one too high"),
    "positions too low": (at(lambda start: -1), "positions of the response one too low"),
    "moved left": (of_tokens(shifted(1)), "each entry is of the token +1 places on"),
    "moved right by 3": (of_tokens(shifted(-3)), "each entry is of the token -3 places on"),
    "moved left by 5": (of_tokens(shifted(5)), "each entry is of the token +5 places on"),
    "base 2": (of_tokens(lambda v: v / math.log(2)), "in base 2, not in nats"),
    "base 10": (of_tokens(lambda v: v / math.log(10)), "in base 10, not in nats"),
    "cumulative": (of_tokens(lambda v: v.cumsum(0)), "cumulative sums"),
    "sums to the end": (of_tokens(lambda v: v.flip(0).cumsum(0).flip(0)), "sums from each token to the end"),
    "running mean": (of_tokens(lambda v: v.cumsum(0) / torch.arange(1, len(v) + 1)), "running means"),
    "mean": (of_tokens(lambda v: v.mean().expand(len(v))), "the mean over the response at every token"),
    "sum": (of_tokens(lambda v: v.sum().expand(len(v))), "the sum over the response at every token"),
    "length": (of_tokens(lambda v: v / len(v)), "divided by the number of tokens of the response"),
    "floor": (of_tokens(lambda v: v.clamp(min=-2.0)), "cut off below -2"),
    "reversed": (of_tokens(lambda v: v.flip(0)), "in the opposite order"),
    "sorted": (of_tokens(lambda v: v.sort().values), "the right numbers in another order within the response"),
    "sorted, stored in bfloat16": (
        of_tokens(lambda v: as_bfloat16(v.sort().values)),
        "the right numbers in another order within the response",
    ),
    "rows exchanged": (
        lambda m: [m.logprobs()[{1: 7, 7: 1}.get(i, i)] for i in range(len(m.responses))],
        "the log-probs of other responses",
    ),
    "loss": (of_tokens(lambda v: -v), "minus the log-prob (a loss)"),
    "probability": (of_tokens(torch.exp), "the probability, not its logarithm"),
    "greedy": (of_matrix(lambda x, r: x.amax(-1)), "log-prob of the likeliest token"),
    "entropy": (of_matrix(lambda x, r: -(x.exp() * x).sum(-1)), "the entropy"),
    "minus entropy": (of_matrix(lambda x, r: (x.exp() * x).sum(-1)), "minus the entropy"),
    "pad token": (of_matrix(lambda x, r: x[:, PAD_ID]), "log-prob of token id 0 at every position"),
    "labels not shifted": (paired(token=-1), "log-prob of the token -1 places on, by the right logits"),
    "logits not shifted": (paired(logits=1), "log-prob of the right token, by the logits +1 places on"),
    "top-k 8": (kept(top_k(8)), "of the processed distribution, not of all tokens"),
    "top-k 20": (kept(top_k(20)), "normalised over the tokens that top-k keeps (try --top-k 20)"),
    "top-p": (kept(top_p(0.97)), "normalised over the tokens that top-p keeps (try --top-p "),
    "min-p": (
        kept(lambda p: p >= 0.01 * p.amax(-1, keepdim=True)),
        "normalised over the tokens that min-p keeps (try --min-p ",
    ),
    "repetition penalty": (penalty(repetition, with_prompt=True), "repetition penalty 1.3"),
    "presence penalty": (penalty(lambda logit, count: logit - 0.7), "presence penalty 0.7"),
    "frequency penalty": (penalty(lambda logit, count: logit - 0.4 * count), "frequency penalty 0.4"),
    "stored in bfloat16": (of_tokens(as_bfloat16), "rounded to bfloat16"),
    "stored with 2 decimals": (of_tokens(lambda v: v.round(decimals=2)), "rounded to 2 decimals"),
    "bfloat16, no temperature": (lambda m: m.logprobs(m.logits(bf16(m)), 1.0), f"computed in bfloat16 and {NO_T}"),
    "bfloat16 and BOS": (
        lambda m: m.logprobs(Material.logits(m, bf16(m), lambda i: [BOS_ID, *m.prompts[i]])),
        "computed in bfloat16 and prompt with a BOS token before it",
    ),
    "BOS, no temperature": (lambda m: m.logprobs(with_bos(m), 1.0), f"prompt with a BOS token before it and {NO_T}"),
    "top-k 8, no temperature": (
        kept(top_k(8), 1.0, 1.0),
        "temperature 1 and normalised over the tokens that the cuts keep",
    ),
    "moved left, no temperature": (
        lambda m: [shifted(1)(v) for v in m.logprobs(temperature=1.0)],
        f"{NO_T} and each entry is of the token +1 places on",
    ),
    "base 2, no temperature": (
        lambda m: [v / math.log(2) for v in m.logprobs(temperature=1.0)],
        f"{NO_T} and in base 2, not in nats",
    ),
    "no temperature from token 5 on": (from_point(lambda m: m.logprobs(temperature=1.0), 5), "at "),
    "no temperature in two responses": (some_rows(lambda m: m.logprobs(temperature=1.0), {2, 7}), NO_T),
    # what the table of causes has no entry for is unknown, with what is known
    "noise": (of_tokens(noise(0.3)), "unknown"),
    "noise like bfloat16": (of_tokens(noise(0.02)), "unknown"),
    "noise from token 5 on": (from_point(of_tokens(noise(0.3)), 5), "unknown"),
    "constant": (of_tokens(lambda v: v - 0.3), "unknown"),
    "factor": (of_tokens(lambda v: v * 0.7), "unknown"),
    "last token": (of_tokens(lambda v: torch.cat([v[:-1], v[-1:] - 1])), "unknown"),
    "square": (of_tokens(lambda v: -(v**2)), "unknown"),
    "rare tokens": (of_tokens(lambda v: torch.where(v < -2, v * 1.1, v)), "unknown"),
    "unlike weights": (lambda m: m.logprobs(m.logits(small_model(qwen3_config(), 9))), "unknown"),
    "smoothed": (of_tokens(lambda v: (v + v.roll(1)) / 2), "unknown"),
}
KNOWN = {
    "noise from token 5 on": "right up to token 5 of each response, then not",
    "constant": "0.3 nats lower at every wrong token",
    "factor": "0.7 times the right number at every wrong token",
    "last token": "wrong at the last token of the response alone",
    "rare tokens": "wrong where the log-prob should be below",
    "stored in bfloat16": "every number is a bfloat16 number: its low 16 bits are 0",
}
