"""Ways to feed a model a response wrongly: other tokens before it, or other positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from ppo_repro.audit.dump import Response

AS_DUMPED = "as dumped"
WITHOUT_FIRST, WITH_BOS = "prompt without its first token", "prompt with a BOS token before it"
TEMPLATED, BARE = "prompt in the chat template", "prompt without the chat template"
CUED, UNCUED = "prompt with the generation prompt after it", "prompt without the generation prompt"
PADDED = "attention to the padding before the prompt"
PACKED = "attention to the response before it"
AGAIN = "positions from 0 at the response"
TOO_HIGH, TOO_LOW = "positions of the response one too high", "positions of the response one too low"
COUNTED = "positions that count the padding before the prompt"
_MARK = "ppo-repro-content"


@dataclass(frozen=True)
class Fed:
    """What a model is fed before the response tokens, and the position of every input; None: from 0."""

    before: tuple[int, ...]
    positions: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Special:
    """What prompts may have been changed with."""

    bos_token_id: int | None
    pad_token_id: int | None
    tokenizer: PreTrainedTokenizerBase | None  # None: without the ways of a chat template
    positions: int | None  # how many the model has; None: any number
    learned: bool  # positions are embeddings, so that an offset of all of them matters


def ways(responses: Sequence[Response], special: Special) -> dict[str, list[Fed]]:
    """By its words, each way that changes a response and that the model has positions for; one Fed a response."""
    plain = [Fed(r.prompt_ids) for r in responses]
    found: dict[str, list[Fed]] = {AS_DUMPED: plain}
    for words, one in [*_of_tokens(responses, special), *_of_positions(responses, special)]:
        fed = [one(i) or plain[i] for i in range(len(responses))]
        fits = all(_fits(f, r, special.positions) for f, r in zip(fed, responses, strict=True))
        if fits and fed not in found.values():
            found[words] = fed
    return found


def _fits(fed: Fed, response: Response, positions: int | None) -> bool:
    inputs = len(fed.before) + len(response.response_ids) - 1
    return positions is None or max(inputs, 1 + max(fed.positions or (0,))) <= positions


Way = tuple[str, Callable[[int], Fed | None]]  # of the index of a response; None: there it changes nothing


def _of_tokens(responses: Sequence[Response], special: Special) -> list[Way]:
    def without_first(i: int) -> Fed | None:
        ids = responses[i].prompt_ids
        return Fed(ids[1:]) if len(ids) > 1 else None

    def packed(i: int) -> Fed | None:
        if i == 0:
            return None
        return Fed((*responses[i - 1].prompt_ids, *responses[i - 1].response_ids, *responses[i].prompt_ids))

    padding = _padding(responses, special)
    found: list[Way] = [(WITHOUT_FIRST, without_first)]
    if (bos := special.bos_token_id) is not None:
        found.append((WITH_BOS, lambda i: Fed((bos, *responses[i].prompt_ids))))
    found += [
        (PADDED, lambda i: Fed((*padding[i], *responses[i].prompt_ids))),
        (PACKED, packed),
    ]
    if special.tokenizer is not None:
        for words, change in _templates(special.tokenizer):
            ids = [change(r.prompt_ids) for r in responses]
            found.append((words, lambda i, ids=ids: Fed(ids[i]) if ids[i] else None))  # type: ignore[misc]
    return found


def _of_positions(responses: Sequence[Response], special: Special) -> list[Way]:
    def moved(i: int, by: int) -> Fed | None:
        before, after = len(responses[i].prompt_ids), len(responses[i].response_ids) - 1
        return placed(i, [*range(before), *range(before + by, before + by + after)])

    def counted(i: int) -> Fed | None:
        inputs = len(responses[i].prompt_ids) + len(responses[i].response_ids) - 1
        return placed(i, range(len(padding[i]), len(padding[i]) + inputs))

    def placed(i: int, positions: Sequence[int]) -> Fed | None:
        is_usual = list(positions) == list(range(len(positions)))
        return None if is_usual else Fed(responses[i].prompt_ids, tuple(positions))

    padding = _padding(responses, special)
    found: list[Way] = [
        (AGAIN, lambda i: moved(i, -len(responses[i].prompt_ids))),
        (TOO_HIGH, lambda i: moved(i, 1)),
        (TOO_LOW, lambda i: moved(i, -1)),
    ]
    return [*found, (COUNTED, counted)] if special.learned else found


def _padding(responses: Sequence[Response], special: Special) -> list[tuple[int, ...]]:
    """As in the file; where it has none, to the longest prompt."""
    if any(r.padding for r in responses) or special.pad_token_id is None:
        return [r.padding for r in responses]
    longest = max(len(r.prompt_ids) for r in responses)
    return [(special.pad_token_id,) * (longest - len(r.prompt_ids)) for r in responses]


def _templates(tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, Callable[[Sequence[int]], tuple[int, ...]]]]:
    """Changes of a prompt by the tokenizer's chat template; () where a prompt cannot have it."""
    of: Any = tokenizer
    if not of.chat_template:
        return []

    def text(content: str, cue: bool) -> str:
        turn = [{"role": "user", "content": content}]
        return str(of.apply_chat_template(turn, tokenize=False, add_generation_prompt=cue))

    def encoded(content: str, special: bool) -> tuple[int, ...]:
        return tuple(of(content, add_special_tokens=special).input_ids) if content else ()

    def decoded(ids: Sequence[int]) -> str:
        return str(of.decode(list(ids), skip_special_tokens=False))

    try:
        begin, found, end = text(_MARK, True).partition(_MARK)
        cue = text(_MARK, True).removeprefix(text(_MARK, False))
    except (TemplateError, ValueError, TypeError, KeyError):  # a template may refuse such a conversation
        return []
    if not found:
        return []

    def bare(ids: Sequence[int]) -> tuple[int, ...]:
        of_prompt = decoded(ids)
        is_templated = of_prompt.startswith(begin) and of_prompt.endswith(end)
        return encoded(of_prompt.removeprefix(begin).removesuffix(end), True) if is_templated else ()

    def uncued(ids: Sequence[int]) -> tuple[int, ...]:
        of_prompt = decoded(ids)
        return encoded(of_prompt.removesuffix(cue), False) if cue and of_prompt.endswith(cue) else ()

    def cued(ids: Sequence[int]) -> tuple[int, ...]:
        return encoded(decoded(ids) + cue, False) if cue else ()

    return [
        (TEMPLATED, lambda ids: encoded(text(decoded(ids), True), False)),
        (BARE, bare),
        (CUED, cued),
        (UNCUED, uncued),
    ]
