"""What a model may have been fed: as dumped, or with other tokens before a response token, or other positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from ppo_repro.testing.dumps import Response

WITHOUT_FIRST, WITHOUT_LAST = "prompt without its first token", "prompt without its last token"
WITH_BOS, WITH_EOS = "prompt with a BOS token before it", "prompt with an EOS token after it"
TEMPLATED, BARE = "prompt in the chat template", "prompt without the chat template"
CUED, UNCUED = "prompt with the generation prompt after it", "prompt without the generation prompt"
PADDED = "attention to the padding before the prompt"
PACKED = "attention to the response before it"
NO_PROMPT = "no prompt"
NEXT, PREVIOUS = "prompt of the response after it", "prompt of the response before it"
AGAIN = "positions from 0 at the response"
TOO_HIGH, TOO_LOW = "positions of the response one too high", "positions of the response one too low"
COUNTED = "positions that count the padding before the prompt"
NO_CACHE = "only the token before (no key/value cache)"
NO_TOOLS = "context without the tokens between turns"
OWN_TURN, NO_SAMPLED = "context without the earlier turns", "context without the sampled tokens of earlier turns"
ENCODED = "ids that were decoded and encoded again"
LAST_TOKENS = "prompt cut to its last {} tokens"
FIRST_TOKENS = "prompt cut to its first {} tokens"
_MARK = "ppo-repro-content"


@dataclass(frozen=True)
class Fed:
    """One forward pass: `ids` at `positions` (None: from 0); the output at `at[k]` predicts `targets[k]`.

    That is taken for the log-prob of the response token `tokens[k]`.
    """

    ids: tuple[int, ...]
    tokens: tuple[int, ...]
    at: tuple[int, ...]
    targets: tuple[int, ...]
    positions: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Special:
    """What prompts may have been changed with."""

    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    tokenizer: Any  # of transformers; None: without the ways that need one
    positions: int | None  # how many the model has; None: any number


Way = Callable[[int], Sequence[Fed] | None]  # of the index of a response; None: there it changes nothing


def fed(before: Sequence[int], response: Sequence[int], positions: Sequence[int] | None = None) -> Fed:
    """All response tokens after `before`, in one pass; without a token before, the first has no prediction."""
    first = 0 if before else 1
    tokens = tuple(range(first, len(response)))
    at = tuple(len(before) - 1 + t for t in tokens)
    ids = (*before, *response[:-1])
    return Fed(ids, tokens, at, tuple(response[first:]), None if positions is None else tuple(positions))


def ways(responses: Sequence[Response], special: Special, has_positions: bool = True) -> dict[str, list[list[Fed]]]:
    """By its words, each way that changes a response and that the model has positions for; Feds of each response."""
    plain = [[fed(r.prompt_ids, r.response_ids)] for r in responses]
    found: dict[str, list[list[Fed]]] = {}
    for words, one in _all(responses, special, has_positions):
        changed = [list(one(i) or plain[i]) for i in range(len(responses))]
        fits = all(_fits(f, special.positions) for passes in changed for f in passes)
        if fits and changed != plain and changed not in found.values():
            found[words] = changed
    return found


def _fits(one: Fed, positions: int | None) -> bool:
    return positions is None or max(len(one.ids), 1 + max(one.positions or (0,))) <= positions


def _all(responses: Sequence[Response], special: Special, has_positions: bool) -> list[tuple[str, Way]]:
    padding = _padding(responses, special)
    prompts, answers = [r.prompt_ids for r in responses], [r.response_ids for r in responses]

    def with_prompt(change: Callable[[int], Sequence[int] | None]) -> Way:
        def way(i: int) -> Sequence[Fed] | None:
            ids = change(i)
            return None if ids is None else [fed(ids, answers[i])]

        return way

    def moved(by: Callable[[int], int], from_: Callable[[int], int]) -> Way:
        def way(i: int) -> Sequence[Fed] | None:
            count, start = len(prompts[i]) + len(answers[i]) - 1, from_(i)
            positions = [p + by(i) * (p >= start) for p in range(count)]
            is_usual = positions == list(range(count))
            return None if is_usual or min(positions) < 0 else [fed(prompts[i], answers[i], positions)]

        return way

    def other(step: int) -> Way:
        return with_prompt(lambda i: prompts[i + step] if 0 <= i + step < len(prompts) else None)

    found: list[tuple[str, Way]] = [
        (WITHOUT_FIRST, with_prompt(lambda i: prompts[i][1:] or None)),
        (WITHOUT_LAST, with_prompt(lambda i: prompts[i][:-1] or None)),
    ]
    if (bos := special.bos_token_id) is not None:
        found.append((WITH_BOS, with_prompt(lambda i: (bos, *prompts[i]))))
    if (eos := special.eos_token_id) is not None:
        found.append((WITH_EOS, with_prompt(lambda i: (*prompts[i], eos))))
    found += [
        (NO_PROMPT, lambda i: [fed((), answers[i])] if len(answers[i]) > 1 else None),
        (PADDED, with_prompt(lambda i: (*padding[i], *prompts[i]))),
        (PACKED, with_prompt(lambda i: (*prompts[i - 1], *answers[i - 1], *prompts[i]) if i else None)),
        (NEXT, other(1)),
        (PREVIOUS, other(-1)),
        *_of_turns(responses),
        (NO_CACHE, lambda i: _one_by_one(responses[i], positions=has_positions)),
    ]
    found += [(words, with_prompt(change)) for words, change in _cuts(prompts)]
    if has_positions:
        found += [
            (AGAIN, moved(lambda i: -len(prompts[i]), lambda i: len(prompts[i]))),
            (TOO_HIGH, moved(lambda i: 1, lambda i: len(prompts[i]))),
            (TOO_LOW, moved(lambda i: -1, lambda i: len(prompts[i]))),
            (COUNTED, moved(lambda i: len(padding[i]), lambda i: 0)),
        ]
    if special.tokenizer is not None:
        for words, change_ids in _templates(special.tokenizer):
            ids = [change_ids(p) for p in prompts]
            found.append((words, with_prompt(lambda i, ids=ids: ids[i] or None)))  # type: ignore[misc]
        found.append((ENCODED, lambda i: _encoded_again(special.tokenizer, responses[i])))
    return found


def _padding(responses: Sequence[Response], special: Special) -> list[tuple[int, ...]]:
    """As in the file; where it has none, to the longest prompt."""
    if any(r.padding for r in responses) or special.pad_token_id is None:
        return [r.padding for r in responses]
    longest = max(len(r.prompt_ids) for r in responses)
    return [(special.pad_token_id,) * (longest - len(r.prompt_ids)) for r in responses]


def _cuts(prompts: Sequence[Sequence[int]]) -> list[tuple[str, Callable[[int], Sequence[int] | None]]]:
    """Prompts cut to a length: every one that cuts some prompt, at most 12 of them."""
    lengths = sorted({len(p) for p in prompts})
    candidates = sorted({1, 2, 3, 4, 6, 8, 12, 16, *(n - 1 for n in lengths), *lengths, *(2**k for k in range(5, 15))})
    sizes = [n for n in candidates if 0 < n < lengths[-1]][:12]
    return [
        *((LAST_TOKENS.format(n), lambda i, n=n: prompts[i][-n:]) for n in sizes),
        *((FIRST_TOKENS.format(n), lambda i, n=n: prompts[i][:n]) for n in sizes),
    ]


def _one_by_one(r: Response, positions: bool) -> Sequence[Fed]:
    whole = (*r.prompt_ids, *r.response_ids)
    first = len(r.prompt_ids)
    passes = [Fed(r.prompt_ids, (0,), (first - 1,), r.response_ids[:1])]
    for token in range(1, len(r.response_ids)):
        at = first + token - 1
        place = (at,) if positions else None
        passes.append(Fed(whole[at : at + 1], (token,), (0,), r.response_ids[token : token + 1], place))
    return passes


def _of_turns(responses: Sequence[Response]) -> list[tuple[str, Way]]:
    """Contexts in which tokens of earlier turns are missing. A turn's tokens are a run of tokens that count."""

    def without(keep: Callable[[int, int, bool], bool]) -> Way:
        """keep(turn of a token, turn that is scored, whether it counts): whether it stays in the context."""

        def way(i: int) -> Sequence[Fed] | None:
            r, passes = responses[i], []
            # a token between two turns leads to the second
            turn = [int(t) + (not c) for t, c in zip(r.turns, r.counts, strict=True)]
            if len(set(turn)) < 2:
                return None
            for now in sorted({t for t, c in zip(turn, r.counts, strict=True) if c}):
                ids, at, tokens = list(r.prompt_ids), [], []
                for k, (t, counts) in enumerate(zip(turn, r.counts, strict=True)):
                    if t > now:
                        break
                    if t == now and counts:
                        tokens.append(k)
                        at.append(len(ids) - 1)
                    if t == now or keep(t, now, bool(counts)):
                        ids.append(r.response_ids[k])
                targets = tuple(r.response_ids[k] for k in tokens)
                passes.append(Fed(tuple(ids[:-1]), tuple(tokens), tuple(at), targets))
            return passes

        return way

    def no_tools(i: int) -> Sequence[Fed] | None:
        r = responses[i]
        counted = [k for k, c in enumerate(r.counts) if c]
        if len(counted) == len(r.counts):
            return None
        one = fed(r.prompt_ids, [r.response_ids[k] for k in counted])
        return [Fed(one.ids, tuple(counted), one.at, one.targets)]

    return [
        (NO_TOOLS, no_tools),
        (OWN_TURN, without(lambda turn, now, counts: False)),
        (NO_SAMPLED, without(lambda turn, now, counts: not counts)),
    ]


def _encoded_again(tokenizer: Any, r: Response) -> Sequence[Fed] | None:
    """Prompt and response decoded and encoded again, each by itself; tokens are matched by their index."""
    prompt, response = (
        tuple(tokenizer(tokenizer.decode(list(ids)), add_special_tokens=False).input_ids)
        for ids in (r.prompt_ids, r.response_ids)
    )
    if (prompt, response) == (r.prompt_ids, r.response_ids) or not response:
        return None
    one = fed(prompt, response[: len(r.response_ids)])
    return [one]


def _templates(tokenizer: Any) -> list[tuple[str, Callable[[Sequence[int]], tuple[int, ...]]]]:
    """Changes of a prompt by the tokenizer's chat template; () where a prompt cannot have it."""
    if not getattr(tokenizer, "chat_template", None):
        return []

    def text(content: str, cue: bool) -> str:
        turn = [{"role": "user", "content": content}]
        return str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=cue))

    def encoded(content: str, special: bool) -> tuple[int, ...]:
        return tuple(tokenizer(content, add_special_tokens=special).input_ids) if content else ()

    def decoded(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    try:
        begin, mark, end = text(_MARK, True).partition(_MARK)
        cue = text(_MARK, True).removeprefix(text(_MARK, False))
    except (TemplateError, ValueError, TypeError, KeyError):  # a template may refuse such a conversation
        return []
    if not mark:
        return []

    def bare(ids: Sequence[int]) -> tuple[int, ...]:
        prompt = decoded(ids)
        is_templated = prompt.startswith(begin) and prompt.endswith(end)
        return encoded(prompt.removeprefix(begin).removesuffix(end), True) if is_templated else ()

    def uncued(ids: Sequence[int]) -> tuple[int, ...]:
        prompt = decoded(ids)
        return encoded(prompt.removesuffix(cue), False) if cue and prompt.endswith(cue) else ()

    def cued(ids: Sequence[int]) -> tuple[int, ...]:
        return encoded(decoded(ids) + cue, False) if cue else ()

    return [
        (TEMPLATED, lambda ids: encoded(text(decoded(ids), True), False)),
        (BARE, bare),
        (CUED, cued),
        (UNCUED, uncued),
    ]
