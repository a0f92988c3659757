"""Turn prompts into text and token ids: chat templates, control tokens, end tokens, prompts that are too long."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppo_repro.base.errors import UserError
from ppo_repro.base.output import shown, type_and_message
from ppo_repro.base.watcher import Watcher
from ppo_repro.config.dpo import DPOConfig
from ppo_repro.config.run import RunConfig
from ppo_repro.config.tasks import TaskConfig, Templated, TextTask
from ppo_repro.tasks.problems import Problem, Split
from ppo_repro.user.process import UserFunction, UserProcess, load_from_package

if TYPE_CHECKING:  # the prompts of a file are checked before anything is imported that takes seconds
    from transformers import PreTrainedTokenizerBase

TEMPLATE_SECONDS = 10.0  # of wall time for one chat
AT_ONCE = 2000  # prompts to render and encode together

Ids = tuple[int, ...]
Chat = list[dict[str, str]]
Encode = Callable[[Sequence[Problem]], list[Ids]]
Prompted = TaskConfig | DPOConfig  # sections that say how a prompt becomes text


@cache
def _template_renderer() -> UserFunction:
    """Start the child process that renders chat templates."""
    module, code = Path(__file__).with_name("template_child.py"), "the tokenizer's template"
    return load_from_package(UserProcess(), "task.chat_template", code, module, ["render"], TEMPLATE_SECONDS)["render"]


def rendered(
    tokenizer: PreTrainedTokenizerBase,
    chats: Sequence[Chat],
    cue: bool = True,
    arguments: Mapping[str, Any] | None = None,
    time: str | None = None,
    section: str = "task.",
) -> list[str]:
    """Return the text of each chat, a list of messages with role and content, by the tokenizer's template.

    Raises UserError if the template fails, needs more than 10 s or 1 GiB, reads a time that is not set, does not read
    an argument, or writes an address of memory.

    Args:
        cue: whether the text ends with the beginning of the model's turn.
        arguments: further arguments of the template.
        time: the time that the template reads, in ISO format.
        section: the part of the configuration before the fields' names in messages.
    """
    try:
        about = {
            "template": tokenizer.get_chat_template(),
            "special_tokens": tokenizer.special_tokens_map,
            "arguments": dict(arguments or {}),
            "time": time,
            "section": section,
        }
        json.dumps(about)
    except Exception as error:  # a template may be anything in the tokenizer's files
        reason = type_and_message(error)
        raise UserError(f"{section}chat_template: the tokenizer's template is none ({reason})") from error
    if not _template_renderer().process.is_alive:  # an earlier template ended it
        _template_renderer.cache_clear()
    render = replace(_template_renderer(), options=about)
    return [str(text) for text in render([{"turns": chat, "cue": cue} for chat in chats])]


def rendered_for(task: Prompted, tokenizer: PreTrainedTokenizerBase, chats: Sequence[Chat]) -> list[str]:
    """Return `rendered` chats with the arguments and the time of a task."""
    assert isinstance(task, Templated), "a generated problem is plain text"
    return rendered(tokenizer, chats, True, task.template_arguments, task.template_time, _section(task))


def _section(task: Prompted) -> str:
    return "" if isinstance(task, DPOConfig) else "task."  # a file for DPO has the fields at its top


def encoder(tokenizer: PreTrainedTokenizerBase, task: Prompted) -> Encode:
    """Return the function that maps a problem to the token ids of its prompt.

    Raises UserError if a chat template is missing or leaves something out, and for control tokens in a prompt.
    """
    from ppo_repro.tasks.tokenizer import all_token_ids

    if task.chat_template and not tokenizer.chat_template:
        raise UserError(f"{_section(task)}chat_template = true: this tokenizer has no chat template; set it to false")
    refuse = control_tokens_of(tokenizer, task)

    def encode(problems: Sequence[Problem]) -> list[Ids]:
        chats = [chat_of(task, problem) for problem in problems]
        for problem, chat in zip(problems, chats, strict=True):
            for turn in chat:
                refuse(f"prompt '{shown(problem.key)}'", turn["content"])
        if not task.chat_template:
            return all_token_ids(tokenizer, [problem.prompt for problem in problems])
        texts = rendered_for(task, tokenizer, chats)
        for problem, chat, text in zip(problems, chats, texts, strict=True):
            _require_whole(task, problem, chat, text)
        return all_token_ids(tokenizer, texts, add_special_tokens=False)

    return encode


def _require_whole(task: Prompted, problem: Problem, chat: Chat, text: str) -> None:
    """Raise UserError if a template left out a message of the system or of a user."""
    for turn in chat:
        if turn["role"] in ("system", "user") and turn["content"].strip() not in text:
            if turn["role"] == "system" and _system_prompt(task) is not None:
                raise UserError("task.system_prompt: this tokenizer's chat template leaves it out; remove it")
            raise UserError(
                f"prompt '{shown(problem.key)}': the tokenizer's chat template leaves out its message "
                f"'{shown(turn['content'])}' of role {turn['role']}; remove the message, or set "
                f"{_section(task)}chat_template = false"
            )


def _system_prompt(task: Prompted) -> str | None:
    return task.system_prompt if isinstance(task, TextTask) else None


def chat_of(task: Prompted, problem: Problem) -> Chat:
    """Return the prompt as chat messages, after the configuration's system prompt.

    Raises UserError for two system prompts.
    """
    messages = [{"role": "user", "content": problem.prompt}]
    if problem.messages is not None:
        messages = json.loads(problem.messages)
    system = _system_prompt(task)
    if system is None:
        return messages
    if messages[0]["role"] == "system":
        raise UserError(
            f"task.system_prompt: prompt '{shown(problem.key)}' has a system message of its own; remove one of them"
        )
    return [{"role": "system", "content": system}, *messages]


def control_tokens_of(tokenizer: PreTrainedTokenizerBase, task: Prompted) -> Callable[[str, str], None]:
    """Return the function that refuses a text, named by its first argument, with control tokens of the tokenizer.

    The function does nothing if the task allows control tokens.
    """
    from ppo_repro.tasks.tokenizer import special_tokens

    # the longest first: one token may begin with another
    tokens = sorted(special_tokens(tokenizer), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, filter(None, tokens))) or "(?!)")

    def refuse(what: str, text: str) -> None:
        match = None if isinstance(task, TextTask) and task.control_tokens == "allow" else pattern.search(text)
        if match is not None:
            advice = ", or set task.control_tokens = allow" if isinstance(task, TextTask) else ""
            raise UserError(
                f"{what} contains {shown(match[0])!r}, which the tokenizer reads as a control token; remove it{advice}"
            )

    return refuse


def encode_all(
    problems: Split, encode: Encode, config: RunConfig, vocab_size: int, watcher: Watcher
) -> tuple[Split, dict[str, Ids]]:
    """Encode every prompt; return the problems whose prompts fit, and the token ids of their prompts by key.

    `task.overlong` says whether a prompt that is too long is dropped. Raises UserError, with its key, for the first
    prompt that the sampler cannot serve.
    """
    from ppo_repro.sampler import Request, Sampling, TooLongError, check_request

    sampling = Sampling(1.0, 0, 1.0, config.rollout.max_response_tokens)
    every, ids, dropped = [*problems.train, *problems.held_out], dict[str, Ids](), set[str]()
    for start in range(0, len(every), AT_ONCE):
        some = every[start : start + AT_ONCE]
        for problem, tokens in zip(some, encode(some), strict=True):
            try:
                check_request(Request(tokens, 0), sampling, vocab_size, config.numerics.max_context)
            except TooLongError as error:
                if not isinstance(config.task, TextTask) or config.task.overlong == "fail":
                    advice = ", or set task.overlong = drop" if isinstance(config.task, TextTask) else ""
                    raise UserError(f"prompt '{shown(problem.key)}': {error}{advice}") from error
                dropped.add(problem.key)
                continue
            except UserError as error:
                raise UserError(f"prompt '{shown(problem.key)}': {error}") from error
            ids[problem.key] = tokens
        if len(every) > AT_ONCE:
            watcher.step("prompts", start + len(some), len(every), "encoded")
    if not dropped:
        return problems, ids
    left = Split(*(tuple(p for p in part if p.key not in dropped) for part in (problems.train, problems.held_out)))
    parts = ("training", problems.train, left.train), ("held-out", problems.held_out, left.held_out)
    counts = [f"{len(part) - len(rest):,} of {len(part):,} {name} prompts" for name, part, rest in parts]
    warning = f"task.overlong = drop: {' and '.join(counts)} are left out, which numerics.max_context has no room for"
    if not left.train or not left.held_out:
        raise UserError(f"{warning}; raise it, or give shorter prompts")
    watcher.warning(warning)
    return left, ids


def end_token_warning(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Ids], ends: frozenset[int], has_template: bool
) -> str | None:
    """Return a warning about prompts that end with one of the tokens `ends`; None if there is no such prompt."""
    ended = [ids[-1] for ids in prompts if ids[-1] in ends]
    if not ended:
        return None
    token = shown(str(tokenizer.convert_ids_to_tokens(ended[0])))
    why = "the tokenizer adds it; set add_eos_token to false in its tokenizer_config.json"
    if has_template:
        why = "the chat template begins no turn of the model; correct its add_generation_prompt"
    return f"{len(ended):,} of {len(prompts):,} prompts end with the end token '{token}', which ends a text: {why}"
