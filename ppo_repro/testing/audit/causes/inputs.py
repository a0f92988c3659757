"""Causes before the model: other tokens before a response token, or other positions. INPUTS has a row for each.

A row says which forward passes predict a response of the dump. Prompts that are cut have a row for each length.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ppo_repro.tasks.templates import Ids
from ppo_repro.testing.advice import CauseName
from ppo_repro.testing.audit.causes.cause import OtherInput
from ppo_repro.testing.audit.causes.chat_templates import CHANGES, TemplateChange, Texts, texts_of
from ppo_repro.testing.audit.forward import Pass, pass_over
from ppo_repro.testing.audit.stack import StackModel, positions, vocabulary
from ppo_repro.testing.dumps import DumpedResponse

CUTS = 12  # lengths that prompts may have been cut to, which are tried


@dataclass(frozen=True)
class Dump:
    """The responses of a dump, and the stack that wrote them."""

    responses: Sequence[DumpedResponse]
    stack: StackModel

    def prompt(self, i: int) -> Ids:
        """Return the prompt of response i; () if there is no response i."""
        return self.responses[i].prompt_ids if 0 <= i < len(self.responses) else ()

    @cached_property
    def padding(self) -> list[Ids]:
        """Return the padding before each prompt: as in the file, or if it has none, up to the longest prompt."""
        padding, pad = [r.padding for r in self.responses], self.stack.pad_token_id
        if pad is None or any(padding):
            return padding
        longest = max(len(r.prompt_ids) for r in self.responses)
        return [(pad,) * (longest - len(r.prompt_ids)) for r in self.responses]

    @cached_property
    def texts(self) -> Texts | None:
        """Return the texts of the prompts; None without a chat template."""
        return texts_of(self.stack.tokenizer, [r.prompt_ids for r in self.responses])

    @cached_property
    def has_positions(self) -> bool:
        """Return whether the model takes positions."""
        return "position_ids" in inspect.signature(self.stack.model.forward).parameters


@dataclass(frozen=True)
class InputRow:
    """A cause in words, the passes that predict response i of a dump, and the cause's name in the diagnosis.

    The passes are None if the cause changes nothing in response i.
    """

    words: str
    passes: Callable[[Dump, int], Sequence[Pass] | None]
    name: CauseName = "other_prompt"


def of_inputs(responses: Sequence[DumpedResponse], stack: StackModel) -> Iterator[OtherInput]:
    """Yield the inputs that differ from the dumped tokens and fit the model, each once."""
    dump, plain = Dump(responses, stack), [[pass_over(r.prompt_ids, r.response_ids)] for r in responses]
    seen: list[list[list[Pass]]] = [plain]
    # the lengths of cut prompts are guesses: another row that gives the same passes says more
    for row in (*INPUTS, *_cut_prompts(responses)):
        changed = [row.passes(dump, i) for i in range(len(responses))]
        passes = [list(other or same) for other, same in zip(changed, plain, strict=True)]
        if passes not in seen and all(_fits(one, stack) for of_response in passes for one in of_response):
            seen.append(passes)
            yield OtherInput(row.words, row.name, changed)


def _fits(one: Pass, stack: StackModel) -> bool:
    length, ids = max(len(one.ids), 1 + max(one.positions or (0,))), (0, *one.ids, *one.targets)
    return all(length <= positions(m) and max(ids) < vocabulary(m) for m in stack.models.values())


# other prompts


def _prompt(words: str, ids: Callable[[Dump, int], Ids], name: CauseName = "other_prompt") -> InputRow:
    """Return the row in which response i comes after the prompt ids(dump, i), () for its own."""

    def passes(dump: Dump, i: int) -> Sequence[Pass] | None:
        found = ids(dump, i)
        return [pass_over(found, dump.responses[i].response_ids)] if found else None

    return InputRow(words, passes, name)


def _templated(row: TemplateChange) -> InputRow:
    return _prompt(row.words, lambda dump, i: () if dump.texts is None else dump.texts.changed(row, i))


def _begins_with_bos(dump: Dump, i: int) -> bool:
    return dump.prompt(i)[:1] == _if_any(dump.stack.bos_token_id)


def _with_bos(dump: Dump, i: int) -> Ids:
    return (*_if_any(dump.stack.bos_token_id), *dump.prompt(i))


def _if_any(token: int | None) -> Ids:
    return () if token is None else (token,)


def _after_response_before(dump: Dump, i: int) -> Ids:
    return (*dump.prompt(i - 1), *dump.responses[i - 1].response_ids, *dump.prompt(i)) if i else ()


def _cut_prompts(responses: Sequence[DumpedResponse]) -> Iterator[InputRow]:
    """Yield the rows in which prompts are cut to a length that is likely in this dump."""

    def cut(words: str, kept: slice) -> InputRow:
        return _prompt(f"prompt cut to its {words} tokens", lambda dump, i: dump.prompt(i)[kept])

    # stacks cut at powers of two, the largest ones first; an off-by-one cuts at other prompts' lengths
    lengths = sorted({len(r.prompt_ids) for r in responses})
    likely = dict.fromkeys([*(2**k for k in range(14, -1, -1)), 3, 6, 12, *(n - 1 for n in lengths), *lengths])
    for n in sorted([n for n in likely if 0 < n < lengths[-1]][:CUTS]):
        yield cut(f"last {n}", slice(-n, None))
        yield cut(f"first {n}", slice(n))


# other tokens before a token of the response


def _without_prompt(dump: Dump, i: int) -> Sequence[Pass] | None:
    ids = dump.responses[i].response_ids
    return [pass_over((), ids)] if len(ids) > 1 else None


def _one_by_one(dump: Dump, i: int) -> Sequence[Pass]:
    """Return the passes in which a token of the response sees only the token before it."""
    r = dump.responses[i]
    whole, first = (*r.prompt_ids, *r.response_ids), len(r.prompt_ids)
    passes = [Pass(r.prompt_ids, (0,), (first - 1,), r.response_ids[:1])]
    for token in range(1, len(r.response_ids)):
        at = first + token - 1
        places = (at,) if dump.has_positions else None
        passes.append(Pass(whole[at : at + 1], (token,), (0,), r.response_ids[token : token + 1], places))
    return passes


def _context(words: str, sees: Callable[[int, int, bool], bool]) -> InputRow:
    """Return the row in which turn t sees a token if sees(turn of the token, t, whether the token counts).

    A turn's tokens are a run of tokens that count; the tokens between two turns lead to the second one.
    """
    return InputRow(words, lambda dump, i: _seeing(dump.responses[i], sees))


def _seeing(r: DumpedResponse, sees: Callable[[int, int, bool], bool]) -> Sequence[Pass] | None:
    passes = []
    tokens = list(zip(r.response_ids, (r.turns + ~r.counts).tolist(), r.counts.tolist(), strict=True))
    turns = sorted({turn for _, turn, _ in tokens})
    for now in turns:
        ids, scored, at = list(r.prompt_ids), [], []
        for k, (token, turn, counts) in enumerate(tokens):
            if turn == now and counts:
                scored.append(k)
                at.append(len(ids) - 1)
            if turn <= now and sees(turn, now, counts):
                ids.append(token)
        if scored:
            targets = tuple(r.response_ids[k] for k in scored)
            passes.append(Pass(tuple(ids[: at[-1] + 1]), tuple(scored), tuple(at), targets))
    return passes if len(turns) > 1 else None


def _encoded_again(dump: Dump, i: int) -> Sequence[Pass] | None:
    """Decode and encode prompt and response again, separately; match tokens by index."""
    tokenizer: Any = dump.stack.tokenizer
    if tokenizer is None:
        return None
    r = dump.responses[i]
    prompt, response = (
        tuple(tokenizer(tokenizer.decode(list(ids)), add_special_tokens=False).input_ids)
        for ids in (r.prompt_ids, r.response_ids)
    )
    if (prompt, response) == (r.prompt_ids, r.response_ids) or not response:
        return None
    return [pass_over(prompt, response[: len(r.response_ids)])]


# other positions


def _moved(dump: Dump, i: int, by: int, start: int) -> Sequence[Pass] | None:
    """Return the pass in which the positions from `start` on are moved."""
    r = dump.responses[i]
    places = tuple(p + by * (p >= start) for p in range(len(r.prompt_ids) + len(r.response_ids) - 1))
    is_possible = dump.has_positions and by and min(places) >= 0
    return [pass_over(r.prompt_ids, r.response_ids, places)] if is_possible else None


def _moved_response(dump: Dump, i: int, by: int) -> Sequence[Pass] | None:
    return _moved(dump, i, by, len(dump.prompt(i)))


# the rows


INPUTS: tuple[InputRow, ...] = (
    *map(_templated, CHANGES),
    _prompt("prompt without its BOS token", lambda dump, i: dump.prompt(i)[1:] if _begins_with_bos(dump, i) else ()),
    _prompt("prompt without its first token", lambda dump, i: dump.prompt(i)[1:]),
    _prompt("prompt without its last token", lambda dump, i: dump.prompt(i)[:-1]),
    _prompt(
        "prompt with a BOS token before it", lambda dump, i: () if _begins_with_bos(dump, i) else _with_bos(dump, i)
    ),
    _prompt(
        "prompt with a second BOS token before it",
        lambda dump, i: _with_bos(dump, i) if _begins_with_bos(dump, i) else (),
    ),
    _prompt("prompt with an EOS token after it", lambda dump, i: (*dump.prompt(i), *_if_any(dump.stack.eos_token_id))),
    _prompt("attention to the response before it", _after_response_before),
    _prompt("prompt of the response after it", lambda dump, i: dump.prompt(i + 1)),
    _prompt("prompt of the response before it", lambda dump, i: dump.prompt(i - 1)),
    _prompt(
        "attention to the padding before the prompt",
        lambda dump, i: (*dump.padding[i], *dump.prompt(i)),
        "padding_leak",
    ),
    InputRow("no prompt", _without_prompt),
    _context("context without the tokens between turns", lambda turn, now, counts: counts),
    _context("context without the earlier turns", lambda turn, now, counts: turn == now),
    _context(
        "context without the sampled tokens of earlier turns", lambda turn, now, counts: turn == now or not counts
    ),
    InputRow("only the token before (no key/value cache)", _one_by_one),
    InputRow("positions from 0 at the response", lambda dump, i: _moved_response(dump, i, -len(dump.prompt(i)))),
    InputRow("positions of the response one too high", lambda dump, i: _moved_response(dump, i, 1)),
    InputRow("positions of the response one too low", lambda dump, i: _moved_response(dump, i, -1)),
    InputRow(
        "positions that count the padding before the prompt",
        lambda dump, i: _moved(dump, i, len(dump.padding[i]), 0),
        "padding_leak",
    ),
    InputRow("ids that were decoded and encoded again", _encoded_again, "retokenization"),
)
