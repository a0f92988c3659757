"""Faults that somebody drew who had not read the table of causes: 42 of the kinds that people report, and their
names."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout
from transformers import PreTrainedModel

from tests.support.models import VOCAB, seeded
from tests.testing.audit.material import (
    EOS_ID,
    TEMPERATURE,
    Fault,
    Material,
    Values,
    first_part,
    from_point,
    kept,
    of_matrix,
    of_tokens,
    old,
    penalty,
    repetition,
    top_k,
    top_p,
    up_to_point,
    with_bos,
)


def of_logits(change: Callable[[Tensor], Tensor]) -> Fault:
    """Logits [n, V] changed before the temperature divides them."""
    return lambda m: m.logprobs([change(x.double()) for x in m.plain])


def of_model(change: Callable[[Any], object]) -> Fault:
    def fault(m: Material) -> Values:
        other = copy.deepcopy(m.model)
        with torch.no_grad():
            change(other)
        return m.logprobs(m.logits(other))

    return fault


def of_context(view: Callable[[list[int], list[int]], list[int]]) -> Fault:
    """Each token predicted after view(prompt, response before it)."""

    @torch.no_grad()
    def fault(m: Material) -> Values:
        found = []
        for p, r in zip(m.prompts, m.responses, strict=True):
            rows = [m.model(torch.tensor([view(p, r[:t])])).logits[0, -1].double() for t in range(len(r))]
            found.append((torch.stack(rows) / TEMPERATURE).log_softmax(-1)[range(len(r)), r])
        return found

    return fault


def typical(p: Tensor) -> Tensor:
    surprise = -p.log()
    return first_part(p, (surprise - (p * surprise).sum(-1, keepdim=True)).abs().argsort(-1), 0.9)


def to_int8(model: PreTrainedModel) -> None:
    for p in model.parameters():
        if p.dim() > 1:
            scale = p.abs().amax(1, keepdim=True) / 127
            p.copy_((p / scale).round() * scale)


def with_lora(model: Any) -> None:
    weight, generator = model.model.layers[0].self_attn.q_proj.weight, seeded(9)
    down, up = (torch.randn(n, 2, generator=generator) for n in weight.shape)
    weight.add_(0.3 * down @ up.T)


def with_dropout(model: Any) -> None:
    torch.manual_seed(0)
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda module, given, out: dropout(out, 0.1, True))


def one_layer(model: Any) -> None:
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:1], 1


def filled(token: int, value: float, add: bool = False) -> Fault:
    return of_logits(lambda x: x.index_add(1, torch.tensor([token]), torch.full((len(x), 1), value).double()) if add
                     else x.index_fill(1, torch.tensor([token]), value))  # fmt: skip


def second_half_first(v: Tensor) -> Tensor:
    even = len(v) // 2 * 2
    return torch.cat([v[:even].view(-1, 2).flip(1).reshape(-1), v[even:]])


def by_row(m: Material) -> Values:
    return [m.logprobs(temperature=0.6 + 0.05 * i)[i] for i in range(len(m.responses))]


def annealed(m: Material) -> Values:
    steps = [0.8 + 0.03 * torch.arange(len(r))[:, None] for r in m.responses]
    return m.logprobs([x.double() / s for x, s in zip(m.plain, steps, strict=True)], temperature=1.0)


def in_turn(m: Material) -> Values:
    bare, bos = m.logprobs(temperature=1.0), m.logprobs(with_bos(m))
    return [(bare if i % 2 else bos)[i] for i in range(len(bare))]


def mixed(m: Material) -> Values:
    return [0.9 * a + 0.1 * b for a, b in zip(m.logprobs(), m.logprobs(m.logits(old())), strict=True)]


def before(v: Tensor) -> Tensor:
    return torch.cat([v.new_zeros(1), v[:-1]])


UNKNOWN = "unknown"
OUTSIDER: dict[str, tuple[Fault, str]] = {
    "logits capped": (of_logits(lambda x: 5 * (x / 5).tanh()), "logits capped by 5 tanh(logit / 5)"),
    "EOS banned": (filled(EOS_ID, -math.inf), f"normalised without token id {EOS_ID}"),
    "vocabulary padded with zeros": (
        of_logits(lambda x: torch.cat([x, x.new_zeros(len(x), 39)], 1)),
        "normalised over 39 more tokens with a logit of 0",
    ),
    "logit bias on one id": (filled(5, 4.0, add=True), UNKNOWN),
    "int8 weights": (of_model(to_int8), UNKNOWN),
    "last layer dropped": (of_model(one_layer), UNKNOWN),
    "dropout active": (of_model(with_dropout), UNKNOWN),
    "LoRA merged on one side": (of_model(with_lora), UNKNOWN),
    "logits cast to bfloat16": (of_logits(lambda x: x.bfloat16().double()), "logits rounded to bfloat16"),
    "label smoothing": (of_matrix(lambda x, r: 0.9 * x.gather(1, r)[:, 0] + 0.1 * x.mean(-1)), UNKNOWN),
    "log(p + 1e-3)": (of_tokens(lambda v: (v.exp() + 1e-3).log()), "the logarithm of the probability + 0.001"),
    "log(1 - p)": (of_tokens(lambda v: (-v.exp()).log1p()), UNKNOWN),
    "context of 12 tokens": (of_context(lambda p, r: (p + r)[-12:]), UNKNOWN),
    "response in blocks of 8": (of_context(lambda p, r: p + r[len(r) // 8 * 8 :]), UNKNOWN),
    "window of 6 after the prompt": (of_context(lambda p, r: p + r[-6:]), UNKNOWN),
    "prompt twice": (of_context(lambda p, r: p + p + r), UNKNOWN),
    "EOS after the prompt": (of_context(lambda p, r: [*p, EOS_ID, *r]), "prompt with an EOS token after it"),
    "another second token": (of_context(lambda p, r: [p[0], 7, *p[2:], *r]), UNKNOWN),
    "mixture of weights": (mixed, UNKNOWN),
    "old weights up to token 6": (
        up_to_point(lambda m: m.logprobs(m.logits(old())), 6),
        "at some of 109 tokens weights of old",
    ),
    "two faults in turn": (in_turn, UNKNOWN),
    "temperature by row": (by_row, UNKNOWN),
    "temperature annealed": (annealed, UNKNOWN),
    "pairs exchanged": (of_tokens(second_half_first), "the right numbers in another order within the response"),
    "token id + 1": (of_matrix(lambda x, r: x.gather(1, (r + 1) % VOCAB)[:, 0]), UNKNOWN),
    "second likeliest": (of_matrix(lambda x, r: x.sort(-1).values[:, -2]), UNKNOWN),
    "beside the likeliest": (of_matrix(lambda x, r: x.gather(1, r)[:, 0] - x.max(-1).values), UNKNOWN),
    "log of the rank": (of_matrix(lambda x, r: -(1.0 + (x > x.gather(1, r)).sum(-1)).log()), UNKNOWN),
    "ceiling": (of_tokens(lambda v: v.clamp(max=-0.5)), UNKNOWN),
    "8-bit codes": (of_tokens(lambda v: (v * 25.5).round() / 25.5), UNKNOWN),
    "sums of two neighbours": (of_tokens(lambda v: v + before(v)), UNKNOWN),
    "first token 0": (
        of_tokens(lambda v: torch.cat([v.new_zeros(1), v[1:]])),
        "8 of 109 tokens have no log-prob or a 0",
    ),
    "top-a": (kept(lambda p: p >= 0.3 * p.max(-1, keepdim=True).values ** 2), UNKNOWN),
    "epsilon cut": (kept(lambda p: p >= 0.004), UNKNOWN),
    "top-p of undivided logits": (kept(top_p(0.9), 1.0), UNKNOWN),
    "top-p of the temperature twice": (kept(top_p(0.9), 0.64), UNKNOWN),
    "typical": (kept(typical), UNKNOWN),
    "top-k 5 and the sampled one": (kept(top_k(5)), UNKNOWN),
    "repetition penalty on the response": (penalty(repetition), "repetition penalty 1.3 on response tokens alone"),
    "repetition penalty that always divides": (penalty(lambda logit, count: logit / 1.3, with_prompt=True), UNKNOWN),
    "log10 of per cent": (of_tokens(lambda v: (v.exp() * 100).log10()), UNKNOWN),
    "bits and a floor": (of_tokens(lambda v: (v / math.log(2)).clamp(min=-3)), UNKNOWN),
    "a line": (of_tokens(lambda v: v * 1.7 - 0.2), UNKNOWN),
    # kinds that the table knows, in a shape that it may not
    "float16 logits": (of_logits(lambda x: x.half().double()), "logits rounded to float16"),
    "EOS banned up to token 4": (
        up_to_point(filled(EOS_ID, -math.inf), 4),
        f"at some of 109 tokens normalised without token id {EOS_ID}",
    ),
    "EOS banned from token 4 on": (
        from_point(filled(EOS_ID, -math.inf), 4),
        f"at some of 109 tokens normalised without token id {EOS_ID}",
    ),
}
OF_OUTSIDER = {
    "context of 12 tokens": "right where at most 12 tokens come before, then not",
    "response in blocks of 8": "right up to token 8 of each response, then not",
    "ceiling": "wrong where the log-prob should be above",
    "bits and a floor": "the number -3 occurs",
    "log10 of per cent": "numbers are above 0",
}
