"""Preference pairs: read from a file, or made by a rule from a task with known answers."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ppo_repro.base.errors import UserError
from ppo_repro.base.json_lines import text_field
from ppo_repro.base.output import shown
from ppo_repro.base.parquet_rows import read_records
from ppo_repro.base.seeding import permutation, words
from ppo_repro.tasks.problems import Problem, make_problem
from ppo_repro.tasks.templates import Encode
from ppo_repro.tasks.tokenizer import decode, token_ids

MISTAKES = ("digit", "truncated", "too_long")

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Preference:
    """Two responses to one prompt. `chosen` is preferred. End tokens are included."""

    prompt_key: str
    prompt_ids: Ids
    chosen_ids: Ids
    rejected_ids: Ids


def sequences_of(pairs: Sequence[Preference]) -> list[Ids]:
    """Return prompt + preferred response and prompt + rejected response of each pair, pair after pair."""
    return [pair.prompt_ids + response for pair in pairs for response in (pair.chosen_ids, pair.rejected_ids)]


def check_pairs(pairs: Sequence[Preference], vocab_size: int, max_context: int) -> None:
    """Raise UserError for the first pair that does not fit the vocabulary or the context of a model."""
    for pair in pairs:
        for ids in sequences_of([pair]):
            where = f"preference pair of prompt '{shown(pair.prompt_key)}'"
            if len(ids) > max_context:
                raise UserError(f"{where}: has {len(ids)} tokens; numerics.max_context = {max_context}; raise it")
            if not 0 <= min(ids) <= max(ids) < vocab_size:
                raise UserError(
                    f"{where}: has a token outside 0..{vocab_size - 1}; use a model and pairs with the same tokenizer"
                )


def wrong_answer(answer: str, digits: str, draws: Sequence[int]) -> str:
    """Make a wrong answer: replace one digit, drop the last digit or add one, with equal probability.

    `digits` are the possible digits, at least two. `draws` are three random words, for the kind of mistake, the
    position and the digit.
    """
    mistake, position = MISTAKES[draws[0] % len(MISTAKES)], draws[1] % len(answer)
    if mistake == "truncated":
        return answer[:-1]
    if mistake == "too_long":
        return answer + digits[draws[2] % len(digits)]
    others = [d for d in digits if d != answer[position]]
    return answer[:position] + others[draws[2] % len(others)] + answer[position + 1 :]


def _digits_of(problems: Sequence[Problem]) -> str:
    """Return the digits that occur in the answers.

    Raises UserError unless all answers are numbers and have at least two different digits together.
    """
    for problem in problems:
        if not (problem.answer.isascii() and problem.answer.isdecimal()):
            raise UserError(
                f"prompt '{shown(problem.key)}': its answer '{shown(problem.answer)}' is not a number; wrong "
                "answers are made for numbers only; give pairs in a file"
            )
    digits = "".join(sorted({digit for problem in problems for digit in problem.answer}))
    if len(digits) < 2:
        raise UserError(f"the answers consist of one digit only ({digits!r}); wrong answers need two")
    return digits


def _response(tokenizer: PreTrainedTokenizerBase, text: str, where: str = "") -> Ids:
    """Return the tokens of a response with an end token. Raises UserError if the tokenizer cannot spell it.

    The text may come back with a letter and its accent as one character.
    """
    ids = token_ids(tokenizer, text, add_special_tokens=False)
    if _composed(decode(tokenizer, ids)) != _composed(text) or tokenizer.eos_token_id is None:
        raise UserError(
            f"{where}the tokenizer cannot spell the response '{shown(text)}' with an end token; use another model"
        )
    return (*ids, tokenizer.eos_token_id)


def _composed(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _drawn(problems: Sequence[Problem], count: int, seed: int) -> Iterator[tuple[Problem, int]]:
    """Draw `count` problems, each with the number of its earlier draws; after all were drawn, shuffle again."""
    for epoch in range(-(-count // len(problems))):
        order = permutation(len(problems), "preference prompts", seed, epoch)
        for index in order[: count - epoch * len(problems)]:
            yield problems[index], epoch


def pairs_by_rule(
    problems: Sequence[Problem],
    prompt_ids: Mapping[str, Ids],
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    label_noise: float,
    seed: int,
) -> list[Preference]:
    """Make pairs that prefer the right answer to a wrong one, or with probability `label_noise` the reverse.

    A pair is a function of the seed, the prompt key and the number of earlier draws of the prompt. With noise p a
    Bradley-Terry model has a finite optimum, score differences of log((1 - p) / p).

    Args:
        problems: to draw from, with numbers as answers.
        prompt_ids: token ids of each prompt, by key.
        tokenizer: encodes the answers.
        count: number of pairs.
        label_noise: p.
        seed: of the run.

    Raises:
        UserError: answers are not numbers.
    """
    digits = _digits_of(problems)
    pairs = []
    for problem, repeat in _drawn(problems, count, seed):
        *draws, noise = words(4, "preference", seed, problem.key, repeat).tolist()
        right = _response(tokenizer, problem.answer)
        wrong = _response(tokenizer, wrong_answer(problem.answer, digits, draws))
        # the upper 53 bits as a fraction in [0, 1)
        swapped = (noise >> 11) * 2.0**-53 < label_noise
        chosen, rejected = (wrong, right) if swapped else (right, wrong)
        pairs.append(Preference(problem.key, prompt_ids[problem.key], chosen, rejected))
    return pairs


def pairs_of_file(
    path: Path, field: str, tokenizer: PreTrainedTokenizerBase, encode: Encode, chat_template: bool
) -> list[Preference]:
    """Read the pairs of a JSON Lines or Parquet file with `prompt`, `chosen` and `rejected`, and optionally `key`.

    An end token follows each response.

    Args:
        path: the file.
        field: of the configuration that names the file, for errors.
        tokenizer: encodes the responses.
        encode: encodes a prompt.
        chat_template: whether a prompt may be a list of chat messages.

    Raises:
        UserError: names the line that is wrong.
    """
    problems, answers = [], []
    for line in read_records(field, path):
        problem = make_problem(line.where, {**line.fields, "answer": ""}, chat_template)
        responses = []
        for name in ("chosen", "rejected"):
            text = text_field(line.where, name, line.fields.get(name))
            responses.append(_response(tokenizer, text, f"{line.where}: field '{name}': "))
        if responses[0] == responses[1]:
            raise UserError(f"{line.where}: 'chosen' and 'rejected' are the same response; leave the line out")
        problems.append(problem)
        answers.append(responses)
    asked = zip(problems, encode(problems), answers, strict=True)
    return [Preference(problem.key, prompt, *responses) for problem, prompt, responses in asked]


def hold_out(
    pairs: Sequence[Preference], num_eval_prompts: int, seed: int
) -> tuple[list[Preference], list[Preference]]:
    """Split pairs into (training, held-out): all pairs of `num_eval_prompts` random prompts are held out.

    Raises UserError if no prompt is left to train on.
    """
    keys = sorted({pair.prompt_key for pair in pairs})
    if num_eval_prompts >= len(keys):
        raise UserError(
            f"num_eval_prompts = {num_eval_prompts}: the pairs have {len(keys)} prompts; leave some to train on"
        )
    held_out = {keys[i] for i in permutation(len(keys), "held-out pairs", seed)[:num_eval_prompts]}
    return [p for p in pairs if p.prompt_key not in held_out], [p for p in pairs if p.prompt_key in held_out]
