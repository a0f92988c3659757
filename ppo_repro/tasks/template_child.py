"""Render a tokenizer's chat template in a child process, because a template may loop for ever or fill the memory.

A template can also read the time and random numbers. The configuration sets the time, and the child seeds the
generators before each call. So a prompt depends only on the inputs of a run.
"""

from __future__ import annotations

import os
import re
import resource
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from ppo_repro.base.errors import UserError
from ppo_repro.base.output import did_you_mean, shown
from ppo_repro.user.file import described

MEMORY = 1 << 30  # bytes that a template may need
_ADDRESS = re.compile(r" at 0x[0-9a-f]+>")  # of an object that a template prints by mistake


def _limit_memory() -> None:
    """Make allocations beyond MEMORY fail with MemoryError."""
    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


_limit_memory()
os.environ["TZ"] = "UTC"  # a time format may ask for the time zone
time.tzset()


def _clock(moment: str | None, section: str) -> Callable[[str], str]:
    """Return the function that gives a template the time `moment`, in a format."""

    def strftime_now(form: str) -> str:
        if moment is None:
            raise UserError(
                f"{section}chat_template: the tokenizer's template asks for the time, which a rerun would find changed"
                f"; set {section}template_time, such as 2026-11-28T12:00"
            )
        return datetime.fromisoformat(moment).replace(tzinfo=UTC).strftime(form)

    return strftime_now


def _check_arguments(template: str, arguments: Mapping[str, Any], section: str) -> None:
    words = set(re.findall(r"[A-Za-z_]\w*", template)) if arguments else set()
    for name in arguments:
        if name not in words:
            meant = did_you_mean(name, sorted(words))
            raise UserError(f"{section}template_arguments.{name}: the tokenizer's template does not read it{meant}")


def render(
    turns: list[dict[str, str]],
    cue: bool,
    template: str,
    special_tokens: dict[str, Any],
    arguments: dict[str, Any],
    time: str | None,
    section: str,
) -> str:
    """Return the text of a chat. Raises UserError if the template fails. `templates.rendered` has the arguments."""
    try:
        _check_arguments(template, arguments, section)
        text_and_spans: Any = render_jinja_template(
            conversations=[turns],
            chat_template=template,
            add_generation_prompt=cue,
            **{**special_tokens, "strftime_now": _clock(time, section), **arguments},
        )
        text = str(text_and_spans[0][0])  # texts, and where the model's turns are
    except UserError:
        raise
    except Exception as error:
        why = f"it needs more than {MEMORY >> 30} GiB of memory" if isinstance(error, MemoryError) else described(error)
        raise UserError(f"{section}chat_template: the tokenizer's template cannot render a chat ({why})") from error
    address = _ADDRESS.search(text)
    if address is not None and not any(_ADDRESS.search(turn["content"]) for turn in turns):
        part = shown(text[max(0, address.start() - 40) : address.end()])
        raise UserError(
            f"{section}chat_template: the tokenizer's template writes an address of memory into the prompt ({part}), "
            "which every process has another of; correct the template, which prints a function instead of its value"
        )
    return text
