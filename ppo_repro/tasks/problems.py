"""The prompts of a run and their answers, split into training and held-out ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ppo_repro.config.run import RunConfig
from ppo_repro.errors import UserError
from ppo_repro.json_lines import read_lines, text_field
from ppo_repro.output import shown
from ppo_repro.seeding import permutation

if TYPE_CHECKING:  # the prompts of a file are checked before anything is imported that takes seconds
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Problem:
    """One prompt. The key is its name everywhere and does not depend on the order of the file."""

    key: str
    prompt: str
    answer: str
    fields: str = "{}"  # its other fields, for functions that ask for them: a JSON object with sorted names


@dataclass(frozen=True)
class Split:
    """The problems of a task."""

    train: tuple[Problem, ...]
    held_out: tuple[Problem, ...]


def arithmetic(max_operand: int) -> list[Problem]:
    """All additions a+b= with 0 <= a, b <= max_operand."""
    return [
        Problem(f"{a}+{b}", f"{a}+{b}=", str(a + b)) for a in range(max_operand + 1) for b in range(max_operand + 1)
    ]


def make_problem(where: str, fields: Mapping[str, object]) -> Problem:
    """The problem in the fields of a JSON object; UserError names `where` and the field that is wrong."""
    prompt, answer = (text_field(where, name, fields.get(name)) for name in ("prompt", "answer"))
    if not prompt:
        raise UserError(f"{where}: field 'prompt' is empty; a prompt needs at least one character")
    key = text_field(where, "key", fields.get("key", prompt))
    if not key:
        raise UserError(f"{where}: field 'key' is empty; it names the prompt, leave it out or give a text")
    others = {name: value for name, value in fields.items() if name not in ("prompt", "answer", "key")}
    return Problem(key, prompt, answer, json.dumps(others, sort_keys=True))


def all_different(entries: Iterable[tuple[str, str, Problem]]) -> list[Problem]:
    """The problems of (where, name, problem).

    UserError for a key or prompt that appears twice: it could be trained on and held out.
    """
    problems: list[Problem] = []
    keys: dict[str, str] = {}
    prompts: dict[str, str] = {}
    for where, name, problem in entries:
        for what, text, first in (("key", problem.key, keys), ("prompt", problem.prompt, prompts)):
            if text in first:
                raise UserError(
                    f"{where}: {what} '{shown(text)}' is also that of {first[text]}; "
                    f"give each prompt once, with its own key"
                )
            first[text] = name
        problems.append(problem)
    return problems


def read_jsonl(path: Path) -> list[Problem]:
    """Read one problem per line; UserError names file and line of the first mistake."""
    lines = read_lines("task.path", path)
    return all_different((line.where, f"line {line.number}", make_problem(line.where, line.fields)) for line in lines)


def split(problems: Iterable[Problem], num_eval_prompts: int, seed: int) -> Split:
    """Hold out `num_eval_prompts` problems, chosen by keys and seed alone. UserError if there are too few."""
    ordered = sorted(problems, key=lambda p: p.key)
    if num_eval_prompts >= len(ordered):
        raise UserError(
            f"task.num_eval_prompts = {num_eval_prompts}: there are {len(ordered)} prompts; leave some to train on"
        )
    shuffled = [ordered[i] for i in permutation(len(ordered), "held out", seed)]
    return Split(tuple(shuffled[num_eval_prompts:]), tuple(shuffled[:num_eval_prompts]))


def encoder(
    tokenizer: PreTrainedTokenizerBase, chat_template: bool, system_prompt: str | None = None
) -> Callable[[Problem], tuple[int, ...]]:
    """The function from a problem to the token ids of its prompt. UserError if a chat template is missing."""
    if chat_template and not tokenizer.chat_template:
        raise UserError("task.chat_template = true: this tokenizer has no chat template; set it to false")
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]

    def encode(problem: Problem) -> tuple[int, ...]:
        if not chat_template:
            return tuple(tokenizer(problem.prompt)["input_ids"])
        turns = [*system, {"role": "user", "content": problem.prompt}]
        text = rendered(tokenizer, turns)
        if system_prompt is not None and system_prompt.strip() not in text:
            raise UserError("task.system_prompt: this tokenizer's chat template leaves it out; remove it")
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    return encode


def rendered(tokenizer: PreTrainedTokenizerBase, turns: list[dict[str, str]]) -> str:
    """The text of a chat up to where the model goes on; UserError where the template refuses it."""
    from jinja2.exceptions import TemplateError

    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    except TemplateError as error:
        raise UserError(f"task.chat_template: the tokenizer's template refuses the chat ({error})") from error


def encode_all(
    problems: Iterable[Problem], encode: Callable[[Problem], tuple[int, ...]], config: RunConfig, vocab_size: int
) -> dict[str, tuple[int, ...]]:
    """Token ids of every prompt by key; UserError names the first prompt that the engine cannot serve."""
    from ppo_repro.rollout.engine import Request, Sampling, check_request

    sampling = Sampling(1.0, 0, 1.0, config.rollout.max_response_tokens)
    ids = {}
    for problem in problems:
        ids[problem.key] = encode(problem)
        try:
            check_request(Request(ids[problem.key], 0), sampling, vocab_size, config.numerics.max_context)
        except UserError as error:
            raise UserError(f"prompt {problem.key!r}: {error}") from error
    return ids


def choose(problems: tuple[Problem, ...], count: int, seed: int, iteration: int) -> list[Problem]:
    """The `count` training problems of an iteration. Each time all have been used, they are shuffled anew."""
    chosen = []
    shuffles: dict[int, list[int]] = {}
    for position in range(iteration * count, (iteration + 1) * count):
        epoch, index = divmod(position, len(problems))
        if epoch not in shuffles:
            shuffles[epoch] = permutation(len(problems), "prompts", seed, epoch).tolist()
        chosen.append(problems[shuffles[epoch][index]])
    return chosen
