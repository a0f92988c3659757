"""The prompts of a run and their answers, split into training and held-out ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ppo_repro.config.run import ArithmeticTask, JsonlTask, RunConfig
from ppo_repro.disk.json_lines import Line, read_lines, text_field
from ppo_repro.errors import UserError
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


def _problem(line: Line) -> Problem:
    prompt, answer = (text_field(line.where, name, line.fields.get(name)) for name in ("prompt", "answer"))
    if not prompt:
        raise UserError(f"{line.where}: field 'prompt' is empty; a prompt needs at least one character")
    key = text_field(line.where, "key", line.fields.get("key", prompt))
    if not key:
        raise UserError(f"{line.where}: field 'key' is empty; it names the prompt, leave it out or give a text")
    return Problem(key, prompt, answer)


def read_jsonl(path: Path) -> list[Problem]:
    """Read one problem per line; UserError names file and line of the first mistake.

    No key and no prompt may appear twice: a prompt could be trained on and held out.
    """
    problems: list[Problem] = []
    keys: dict[str, int] = {}
    prompts: dict[str, int] = {}
    for line in read_lines("task.path", path):
        problem = _problem(line)
        for what, text, first in (("key", problem.key, keys), ("prompt", problem.prompt, prompts)):
            if text in first:
                raise UserError(
                    f"{line.where}: {what} '{shown(text)}' is also that of line {first[text]}; "
                    f"give each prompt once, with its own key"
                )
            first[text] = line.number
        problems.append(problem)
    return problems


def split(problems: Iterable[Problem], num_eval_prompts: int, seed: int) -> Split:
    """Hold out `num_eval_prompts` problems, chosen by keys and seed alone. UserError if there are too few."""
    ordered = sorted(problems, key=lambda p: p.key)
    if num_eval_prompts >= len(ordered):
        raise UserError(
            f"task.num_eval_prompts = {num_eval_prompts}: there are {len(ordered)} prompts; leave some to train on"
        )
    shuffled = [ordered[i] for i in permutation(len(ordered), "held out", seed)]
    return Split(tuple(shuffled[num_eval_prompts:]), tuple(shuffled[:num_eval_prompts]))


def load_problems(task: ArithmeticTask | JsonlTask, seed: int) -> Split:
    """The problems of a task section."""
    problems = arithmetic(task.max_operand) if isinstance(task, ArithmeticTask) else read_jsonl(Path(task.path))
    return split(problems, task.num_eval_prompts, seed)


def encoder(tokenizer: PreTrainedTokenizerBase, chat_template: bool) -> Callable[[Problem], tuple[int, ...]]:
    """The function from a problem to the token ids of its prompt. UserError if a chat template is missing."""
    if chat_template and not tokenizer.chat_template:
        raise UserError("task.chat_template = true: this tokenizer has no chat template; set it to false")

    def encode(problem: Problem) -> tuple[int, ...]:
        if not chat_template:
            return tuple(tokenizer(problem.prompt)["input_ids"])
        turn = [{"role": "user", "content": problem.prompt}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    return encode


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
