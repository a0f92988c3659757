"""Causes before the model: other tokens before a response token, or other positions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from ppo_repro.tasks.templates import Ids
from ppo_repro.testing.advice import CauseName
from ppo_repro.testing.audit.causes.cause import OtherInput
from ppo_repro.testing.audit.causes.chat_templates import templated
from ppo_repro.testing.audit.forward import Pass, pass_over
from ppo_repro.testing.audit.stack import StackModel, positions, vocabulary
from ppo_repro.testing.dumps import DumpedResponse

CUTS = 12  # lengths that prompts may have been cut to, which are tried


def of_inputs(responses: Sequence[DumpedResponse], stack: StackModel) -> Iterator[OtherInput]:
    """Yield the inputs that differ from the dumped tokens and fit the model, each once."""
    plain = [[pass_over(r.prompt_ids, r.response_ids)] for r in responses]
    seen: list[list[list[Pass]]] = [plain]
    for change in _changes(responses, stack):
        passes = [list(other or same) for other, same in zip(change.passes, plain, strict=True)]
        if passes not in seen and all(_fits(one, stack) for of_response in passes for one in of_response):
            seen.append(passes)
            yield change


def _fits(one: Pass, stack: StackModel) -> bool:
    length, ids = max(len(one.ids), 1 + max(one.positions or (0,))), (0, *one.ids, *one.targets)
    return all(length <= positions(m) and max(ids) < vocabulary(m) for m in stack.models.values())


def _changes(responses: Sequence[DumpedResponse], stack: StackModel) -> Iterator[OtherInput]:
    padding = _padding(responses, stack)
    for words, prompts in _prompts(responses, stack).items():
        yield _before(words, prompts, responses)
    padded = [(*pad, *r.prompt_ids) for pad, r in zip(padding, responses, strict=True)]
    yield _before("attention to the padding before the prompt", padded, responses, "padding_leak")
    without = [[pass_over((), r.response_ids)] if len(r.response_ids) > 1 else None for r in responses]
    yield OtherInput("no prompt", "other_prompt", without)
    yield from _contexts(responses)
    has_positions = "position_ids" in inspect.signature(stack.model.forward).parameters
    one_by_one = [_one_by_one(r, has_positions) for r in responses]
    yield OtherInput("only the token before (no key/value cache)", "other_prompt", one_by_one)
    if has_positions:
        yield from _positions(responses, padding)
    if stack.tokenizer is not None:
        again = [_encoded_again(stack.tokenizer, r) for r in responses]
        yield OtherInput("ids that were decoded and encoded again", "retokenization", again)


def _before(
    words: str, prompts: Sequence[Ids], responses: Sequence[DumpedResponse], name: CauseName = "other_prompt"
) -> OtherInput:
    """Return the change in which each response comes after another prompt, () for its own."""
    pairs = zip(prompts, responses, strict=True)
    return OtherInput(words, name, [[pass_over(ids, r.response_ids)] if ids else None for ids, r in pairs])


def _contexts(responses: Sequence[DumpedResponse]) -> Iterator[OtherInput]:
    """Yield what a turn may not see of the earlier turns."""
    # a turn's tokens are a run of tokens that count; those between two turns lead to the second
    contexts: dict[str, Callable[[int, int, bool], bool]] = {
        "context without the tokens between turns": lambda turn, now, counts: counts,
        "context without the earlier turns": lambda turn, now, counts: turn == now,
        "context without the sampled tokens of earlier turns": lambda turn, now, counts: turn == now or not counts,
    }
    for words, keep in contexts.items():
        yield OtherInput(words, "other_prompt", [_seeing(r, keep) for r in responses])


def _positions(responses: Sequence[DumpedResponse], padding: Sequence[Ids]) -> Iterator[OtherInput]:
    def moved(words: str, by: int) -> OtherInput:
        return OtherInput(words, "other_prompt", [_moved(r, by, len(r.prompt_ids)) for r in responses])

    of_response = [_moved(r, -len(r.prompt_ids), len(r.prompt_ids)) for r in responses]
    yield OtherInput("positions from 0 at the response", "other_prompt", of_response)
    yield moved("positions of the response one too high", 1)
    yield moved("positions of the response one too low", -1)
    counted = [_moved(r, len(before), 0) for r, before in zip(responses, padding, strict=True)]
    yield OtherInput("positions that count the padding before the prompt", "padding_leak", counted)


def _padding(responses: Sequence[DumpedResponse], stack: StackModel) -> list[Ids]:
    """Return the padding before each prompt: as in the file, or if it has none, up to the longest prompt."""
    padding = [r.padding for r in responses]
    if stack.pad_token_id is None or any(padding):
        return padding
    longest = max(len(r.prompt_ids) for r in responses)
    return [(stack.pad_token_id,) * (longest - len(r.prompt_ids)) for r in responses]


def _prompts(responses: Sequence[DumpedResponse], stack: StackModel) -> dict[str, list[Ids]]:
    """Return the other prompts of the responses, by description; () where a prompt stays."""
    prompts = [r.prompt_ids for r in responses]
    bos, eos = (() if x is None else (x,) for x in (stack.bos_token_id, stack.eos_token_id))
    with_bos = [(*bos, *prompt) for prompt in prompts]
    begins = [prompt[:1] == bos for prompt in prompts]
    found: dict[str, list[Ids]] = {} if stack.tokenizer is None else templated(stack.tokenizer, prompts)
    found |= {
        "prompt without its BOS token": [p[1:] if has else () for p, has in zip(prompts, begins, strict=True)],
        "prompt without its first token": [p[1:] for p in prompts],
        "prompt without its last token": [p[:-1] for p in prompts],
        "prompt with a BOS token before it": [() if has else p for p, has in zip(with_bos, begins, strict=True)],
        "prompt with a second BOS token before it": [p if has else () for p, has in zip(with_bos, begins, strict=True)],
        "prompt with an EOS token after it": [(*p, *eos) for p in prompts],
        "attention to the response before it": [
            (),
            *((*a.prompt_ids, *a.response_ids, *b.prompt_ids) for a, b in pairwise(responses)),
        ],
        "prompt of the response after it": [*prompts[1:], ()],
        "prompt of the response before it": [(), *prompts[:-1]],
    }
    # stacks cut at powers of two, the largest ones first; an off-by-one cuts at other prompts' lengths
    lengths = sorted({len(p) for p in prompts})
    likely = dict.fromkeys([*(2**k for k in range(14, -1, -1)), 3, 6, 12, *(n - 1 for n in lengths), *lengths])
    for n in sorted([n for n in likely if 0 < n < lengths[-1]][:CUTS]):
        found[f"prompt cut to its last {n} tokens"] = [p[-n:] for p in prompts]
        found[f"prompt cut to its first {n} tokens"] = [p[:n] for p in prompts]
    return found


def _moved(r: DumpedResponse, by: int, start: int) -> Sequence[Pass] | None:
    """Return the pass in which the positions from `start` on are moved."""
    places = tuple(p + by * (p >= start) for p in range(len(r.prompt_ids) + len(r.response_ids) - 1))
    return [pass_over(r.prompt_ids, r.response_ids, places)] if by and min(places) >= 0 else None


def _one_by_one(r: DumpedResponse, has_positions: bool) -> Sequence[Pass]:
    whole, first = (*r.prompt_ids, *r.response_ids), len(r.prompt_ids)
    passes = [Pass(r.prompt_ids, (0,), (first - 1,), r.response_ids[:1])]
    for token in range(1, len(r.response_ids)):
        at = first + token - 1
        places = (at,) if has_positions else None
        passes.append(Pass(whole[at : at + 1], (token,), (0,), r.response_ids[token : token + 1], places))
    return passes


def _seeing(r: DumpedResponse, keep: Callable[[int, int, bool], bool]) -> Sequence[Pass] | None:
    """Return the passes in which turn t sees a token if keep(turn of the token, t, whether the token counts)."""
    passes = []
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


def _encoded_again(tokenizer: Any, r: DumpedResponse) -> Sequence[Pass] | None:
    """Decode and encode prompt and response again, separately; match tokens by index."""
    prompt, response = (
        tuple(tokenizer(tokenizer.decode(list(ids)), add_special_tokens=False).input_ids)
        for ids in (r.prompt_ids, r.response_ids)
    )
    if (prompt, response) == (r.prompt_ids, r.response_ids) or not response:
        return None
    return [pass_over(prompt, response[: len(r.response_ids)])]
