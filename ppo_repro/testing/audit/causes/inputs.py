"""Inputs that a model may have received: the dumped tokens, other tokens before a response token, other positions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from ppo_repro.tasks.templates import Ids
from ppo_repro.testing.audit.causes.chat_templates import templated
from ppo_repro.testing.audit.forward import Pass, pass_over
from ppo_repro.testing.audit.subject import Subject, positions, vocabulary
from ppo_repro.testing.dumps import DumpedResponse

OtherInput = Callable[[int], Sequence[Pass] | None]  # of the index of a response; None: it changes nothing there


def other_inputs(responses: Sequence[DumpedResponse], subject: Subject) -> dict[str, list[list[Pass]]]:
    """Return the passes of each response, by description of the input, for inputs that differ and fit the model."""
    plain = [[pass_over(r.prompt_ids, r.response_ids)] for r in responses]
    found: dict[str, list[list[Pass]]] = {}

    def fits(one: Pass) -> bool:
        length, ids = max(len(one.ids), 1 + max(one.positions or (0,))), (0, *one.ids, *one.targets)
        return all(length <= positions(m) and max(ids) < vocabulary(m) for m in subject.models.values())

    for words, other in _all(responses, subject).items():
        changed = [list(other(i) or plain[i]) for i in range(len(responses))]
        if changed != plain and changed not in found.values() and all(fits(f) for passes in changed for f in passes):
            found[words] = changed
    return found


def _all(responses: Sequence[DumpedResponse], subject: Subject) -> dict[str, OtherInput]:
    prompts, answers = [r.prompt_ids for r in responses], [r.response_ids for r in responses]
    padding = [r.padding for r in responses]  # as in the file; if it has none, to the longest prompt
    if subject.pad_token_id is not None and not any(padding):
        padding = [(subject.pad_token_id,) * (max(map(len, prompts)) - len(p)) for p in prompts]
    found: dict[str, OtherInput] = {
        words: lambda i, change=change: [pass_over(ids, answers[i])] if (ids := change(i)) else None  # type: ignore[misc]
        for words, change in _prompts(prompts, answers, padding, subject).items()
    }
    found["no prompt"] = lambda i: [pass_over((), answers[i])] if len(answers[i]) > 1 else None
    # a turn's tokens are a run of tokens that count; those between two turns lead to the second
    found["context without the tokens between turns"] = _seeing(responses, lambda turn, now, counts: counts)
    found["context without the earlier turns"] = _seeing(responses, lambda turn, now, counts: turn == now)
    found["context without the sampled tokens of earlier turns"] = _seeing(
        responses, lambda turn, now, counts: turn == now or not counts
    )
    has_positions = "position_ids" in inspect.signature(subject.model.forward).parameters
    found["only the token before (no key/value cache)"] = lambda i: _one_by_one(responses[i], has_positions)

    def moved(by: Callable[[int], int], is_whole: bool = False) -> OtherInput:
        def other(i: int) -> Sequence[Pass] | None:
            start = 0 if is_whole else len(prompts[i])
            places = tuple(p + by(i) * (p >= start) for p in range(len(prompts[i]) + len(answers[i]) - 1))
            return [pass_over(prompts[i], answers[i], places)] if by(i) and min(places) >= 0 else None

        return other

    if has_positions:
        found["positions from 0 at the response"] = moved(lambda i: -len(prompts[i]))
        found["positions of the response one too high"] = moved(lambda i: 1)
        found["positions of the response one too low"] = moved(lambda i: -1)
        found["positions that count the padding before the prompt"] = moved(lambda i: len(padding[i]), True)
    if subject.tokenizer is not None:
        found["ids that were decoded and encoded again"] = lambda i: _encoded_again(subject.tokenizer, responses[i])
    return found


def _prompts(
    prompts: Sequence[Ids], answers: Sequence[Ids], padding: Sequence[Ids], subject: Subject
) -> dict[str, Callable[[int], Ids]]:
    """Return other prompts of a response, by description; () where a prompt stays."""
    bos, eos = ([] if x is None else [x] for x in (subject.bos_token_id, subject.eos_token_id))

    def prompt(i: int) -> Ids:
        return prompts[i] if 0 <= i < len(prompts) else ()

    def begins(i: int) -> bool:
        return prompts[i][:1] == tuple(bos)

    of_templates = {} if subject.tokenizer is None else templated(subject.tokenizer, prompts)
    found: dict[str, Callable[[int], Ids]] = {
        **{words: lambda i, changed=changed: changed[i] for words, changed in of_templates.items()},  # type: ignore[misc]
        "prompt without its BOS token": lambda i: prompts[i][1:] if begins(i) else (),
        "prompt without its first token": lambda i: prompts[i][1:],
        "prompt without its last token": lambda i: prompts[i][:-1],
        "prompt with a BOS token before it": lambda i: () if begins(i) else (*bos, *prompts[i]),
        "prompt with a second BOS token before it": lambda i: (*bos, *prompts[i]) if begins(i) else (),
        "prompt with an EOS token after it": lambda i: (*prompts[i], *eos),
        "attention to the padding before the prompt": lambda i: (*padding[i], *prompts[i]),
        "attention to the response before it": lambda i: (*prompts[i - 1], *answers[i - 1], *prompts[i]) if i else (),
        "prompt of the response after it": lambda i: prompt(i + 1),
        "prompt of the response before it": lambda i: prompt(i - 1),
    }
    # stacks cut at powers of two, the largest ones first; an off-by-one cuts at other prompts' lengths
    lengths = sorted({len(p) for p in prompts})
    likely = dict.fromkeys([*(2**k for k in range(14, -1, -1)), 3, 6, 12, *(n - 1 for n in lengths), *lengths])
    for n in sorted([n for n in likely if 0 < n < lengths[-1]][:12]):
        found[f"prompt cut to its last {n} tokens"] = lambda i, n=n: prompts[i][-n:]  # type: ignore[misc]
        found[f"prompt cut to its first {n} tokens"] = lambda i, n=n: prompts[i][:n]  # type: ignore[misc]
    return found


def _one_by_one(r: DumpedResponse, has_positions: bool) -> Sequence[Pass]:
    whole, first = (*r.prompt_ids, *r.response_ids), len(r.prompt_ids)
    passes = [Pass(r.prompt_ids, (0,), (first - 1,), r.response_ids[:1])]
    for token in range(1, len(r.response_ids)):
        at = first + token - 1
        places = (at,) if has_positions else None
        passes.append(Pass(whole[at : at + 1], (token,), (0,), r.response_ids[token : token + 1], places))
    return passes


def _seeing(responses: Sequence[DumpedResponse], keep: Callable[[int, int, bool], bool]) -> OtherInput:
    """Return the input in which turn t sees a token if keep(turn of the token, t, whether the token counts)."""

    def other(i: int) -> Sequence[Pass] | None:
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
                passes.append(Pass(tuple(ids[: at[-1] + 1]), tuple(scored), tuple(at), targets))
        return passes if len(turns) > 1 else None

    return other


def _encoded_again(tokenizer: Any, r: DumpedResponse) -> Sequence[Pass] | None:
    """Decode and encode prompt and response again, separately; match tokens by index."""
    prompt, response = (
        tuple(tokenizer(tokenizer.decode(list(ids)), add_special_tokens=False).input_ids)
        for ids in (r.prompt_ids, r.response_ids)
    )
    if (prompt, response) == (r.prompt_ids, r.response_ids) or not response:
        return None
    return [pass_over(prompt, response[: len(r.response_ids)])]
