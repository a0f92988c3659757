"""Inputs that a model may have received: the dumped tokens, other tokens before a response token, other positions."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedModel

from ppo_repro.testing.audit.options import all_options
from ppo_repro.testing.audit.options.option import Option
from ppo_repro.testing.audit.templates import Ids, templated
from ppo_repro.testing.dumps import Response


@dataclass(frozen=True)
class Subject:
    """Model of an audit, other weights by name, and the tokens and tokenizer that may have changed its prompts."""

    model: PreTrainedModel
    others: Mapping[str, PreTrainedModel]
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    tokenizer: Any = None  # of transformers; None: without the ways that need one

    @cached_property
    def options(self) -> dict[str, Option]:
        """Return each change of the model's architecture that can be built, by its description."""
        return all_options(self.model)

    @property
    def models(self) -> dict[str, PreTrainedModel]:
        """Return all models by name."""
        return {"model": self.model, **self.others}


def positions(model: PreTrainedModel) -> float:
    """Return the number of positions of a model, infinity for no limit."""
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return math.inf if most is None else most


def vocabulary(model: PreTrainedModel) -> int:
    """Return the number of token ids of a model; a tokenizer may have more."""
    return int(model.config.get_text_config().vocab_size)


@dataclass(frozen=True)
class Fed:
    """One forward pass: `ids` at `positions` (None: from 0); the output at `at[k]` predicts `targets[k]`.

    The log-prob of `targets[k]` is compared with the recorded log-prob of response token `tokens[k]`.
    """

    ids: tuple[int, ...]
    tokens: tuple[int, ...]
    at: tuple[int, ...]
    targets: tuple[int, ...]
    positions: tuple[int, ...] | None = None

    def within(self, start: int, end: int) -> Fed | None:
        """Return the pass for response tokens `start` to `end` (exclusive) only; None if it predicts none of them."""
        some = [k for k, token in enumerate(self.tokens) if start <= token < end]
        if not some:
            return None
        length = self.at[some[-1]] + 1
        tokens, at, targets = (tuple(column[k] for k in some) for column in (self.tokens, self.at, self.targets))
        return Fed(self.ids[:length], tokens, at, targets, None if self.positions is None else self.positions[:length])


Way = Callable[[int], Sequence[Fed] | None]  # of the index of a response; None: there it changes nothing


def fed(before: Ids, response: Ids, positions: Ids | None = None) -> Fed:
    """Return one pass over `before` and the response; if `before` is empty, the first token has no prediction."""
    tokens = tuple(range(0 if before else 1, len(response)))
    at = tuple(len(before) - 1 + t for t in tokens)
    targets = tuple(response[t] for t in tokens)
    return Fed((*before, *response[:-1]), tokens, at, targets, None if positions is None else tuple(positions))


def ways(responses: Sequence[Response], subject: Subject) -> dict[str, list[list[Fed]]]:
    """Return the passes of each response, by description of a way; a way changes a response and fits the model."""
    plain = [[fed(r.prompt_ids, r.response_ids)] for r in responses]
    found: dict[str, list[list[Fed]]] = {}

    def fits(one: Fed) -> bool:
        length, ids = max(len(one.ids), 1 + max(one.positions or (0,))), (0, *one.ids, *one.targets)
        return all(length <= positions(m) and max(ids) < vocabulary(m) for m in subject.models.values())

    for words, way in _all(responses, subject).items():
        changed = [list(way(i) or plain[i]) for i in range(len(responses))]
        if changed != plain and changed not in found.values() and all(fits(f) for passes in changed for f in passes):
            found[words] = changed
    return found


def _all(responses: Sequence[Response], subject: Subject) -> dict[str, Way]:
    prompts, answers = [r.prompt_ids for r in responses], [r.response_ids for r in responses]
    lengths = sorted({len(p) for p in prompts})
    padding = [r.padding for r in responses]  # as in the file; if it has none, to the longest prompt
    if subject.pad_token_id is not None and not any(padding):
        padding = [(subject.pad_token_id,) * (lengths[-1] - len(p)) for p in prompts]
    bos, eos = ([] if x is None else [x] for x in (subject.bos_token_id, subject.eos_token_id))

    def other(i: int) -> Ids:
        return prompts[i] if 0 <= i < len(prompts) else ()

    def begins(i: int) -> bool:
        return prompts[i][:1] == tuple(bos)

    of_templates = {} if subject.tokenizer is None else templated(subject.tokenizer, prompts)
    changes: dict[str, Callable[[int], Ids]] = {  # of the prompt; nothing: it stays
        **{words: lambda i, changed=changed: changed[i] for words, changed in of_templates.items()},  # type: ignore[misc]
        "prompt without its BOS token": lambda i: prompts[i][1:] if begins(i) else (),
        "prompt without its first token": lambda i: prompts[i][1:],
        "prompt without its last token": lambda i: prompts[i][:-1],
        "prompt with a BOS token before it": lambda i: () if begins(i) else (*bos, *prompts[i]),
        "prompt with a second BOS token before it": lambda i: (*bos, *prompts[i]) if begins(i) else (),
        "prompt with an EOS token after it": lambda i: (*prompts[i], *eos),
        "attention to the padding before the prompt": lambda i: (*padding[i], *prompts[i]),
        "attention to the response before it": lambda i: (*prompts[i - 1], *answers[i - 1], *prompts[i]) if i else (),
        "prompt of the response after it": lambda i: other(i + 1),
        "prompt of the response before it": lambda i: other(i - 1),
    }
    # stacks cut at powers of two, the largest ones first; an off-by-one cuts at other prompts' lengths
    likely = dict.fromkeys([*(2**k for k in range(14, -1, -1)), 3, 6, 12, *(n - 1 for n in lengths), *lengths])
    for n in sorted([n for n in likely if 0 < n < lengths[-1]][:12]):
        changes[f"prompt cut to its last {n} tokens"] = lambda i, n=n: prompts[i][-n:]  # type: ignore[misc]
        changes[f"prompt cut to its first {n} tokens"] = lambda i, n=n: prompts[i][:n]  # type: ignore[misc]
    found: dict[str, Way] = {
        words: lambda i, change=change: [fed(ids, answers[i])] if (ids := change(i)) else None  # type: ignore[misc]
        for words, change in changes.items()
    }
    found["no prompt"] = lambda i: [fed((), answers[i])] if len(answers[i]) > 1 else None
    # a turn's tokens are a run of tokens that count; those between two turns lead to the second
    found["context without the tokens between turns"] = _seeing(responses, lambda turn, now, counts: counts)
    found["context without the earlier turns"] = _seeing(responses, lambda turn, now, counts: turn == now)
    found["context without the sampled tokens of earlier turns"] = _seeing(
        responses, lambda turn, now, counts: turn == now or not counts
    )
    has_positions = "position_ids" in inspect.signature(subject.model.forward).parameters
    found["only the token before (no key/value cache)"] = lambda i: _one_by_one(responses[i], has_positions)

    def moved(by: Callable[[int], int], is_whole: bool = False) -> Way:
        def way(i: int) -> Sequence[Fed] | None:
            start = 0 if is_whole else len(prompts[i])
            positions = [p + by(i) * (p >= start) for p in range(len(prompts[i]) + len(answers[i]) - 1)]
            return [fed(prompts[i], answers[i], positions)] if by(i) and min(positions) >= 0 else None

        return way

    if has_positions:
        found["positions from 0 at the response"] = moved(lambda i: -len(prompts[i]))
        found["positions of the response one too high"] = moved(lambda i: 1)
        found["positions of the response one too low"] = moved(lambda i: -1)
        found["positions that count the padding before the prompt"] = moved(lambda i: len(padding[i]), True)
    if subject.tokenizer is not None:
        found["ids that were decoded and encoded again"] = lambda i: _encoded_again(subject.tokenizer, responses[i])
    return found


def _one_by_one(r: Response, has_positions: bool) -> Sequence[Fed]:
    whole, first = (*r.prompt_ids, *r.response_ids), len(r.prompt_ids)
    passes = [Fed(r.prompt_ids, (0,), (first - 1,), r.response_ids[:1])]
    for token in range(1, len(r.response_ids)):
        at = first + token - 1
        positions = (at,) if has_positions else None
        passes.append(Fed(whole[at : at + 1], (token,), (0,), r.response_ids[token : token + 1], positions))
    return passes


def _seeing(responses: Sequence[Response], keep: Callable[[int, int, bool], bool]) -> Way:
    """Return the way in which turn t sees a token if keep(turn of the token, t, whether the token counts)."""

    def way(i: int) -> Sequence[Fed] | None:
        r, passes = responses[i], []
        tokens = list(zip(r.response_ids, (r.turns + ~r.counts).tolist(), r.counts.tolist(), strict=True))
        turns = sorted({turn for _, turn, _ in tokens})
        for now in turns:
            ids, scored, at = list(r.prompt_ids), [], []
            for k, (token, turn, counts) in enumerate(tokens):
                if turn == now and counts:
                    scored.append(k)
                    at.append(len(ids) - 1)
                if turn <= now and keep(turn, now, counts):
                    ids.append(token)
            if scored:
                targets = tuple(r.response_ids[k] for k in scored)
                passes.append(Fed(tuple(ids[: at[-1] + 1]), tuple(scored), tuple(at), targets))
        return passes if len(turns) > 1 else None

    return way


def _encoded_again(tokenizer: Any, r: Response) -> Sequence[Fed] | None:
    """Decode and encode prompt and response again, separately; match tokens by index."""
    prompt, response = (
        tuple(tokenizer(tokenizer.decode(list(ids)), add_special_tokens=False).input_ids)
        for ids in (r.prompt_ids, r.response_ids)
    )
    if (prompt, response) == (r.prompt_ids, r.response_ids) or not response:
        return None
    return [fed(prompt, response[: len(r.response_ids)])]
