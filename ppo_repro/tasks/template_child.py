"""The chat template of a tokenizer, in the child process: a template may loop for ever, or fill the memory."""

from __future__ import annotations

import resource
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from ppo_repro.base.errors import UserError
from ppo_repro.base.user_file import described

MEMORY = 1 << 30  # bytes that a template may need


def _limit_memory() -> None:
    """Let allocations beyond MEMORY fail, as MemoryError."""
    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


_limit_memory()


def render(template: str, turns: list[dict[str, str]], special_tokens: dict[str, Any], cue: bool) -> str:
    """Return the text of a chat; UserError if the template fails.

    Args:
        template: Jinja.
        turns: role and content of each.
        special_tokens: by their names in templates.
        cue: whether what begins the model's turn is added.
    """
    try:
        found: Any = render_jinja_template(
            conversations=[turns], chat_template=template, add_generation_prompt=cue, **special_tokens
        )
        return str(found[0][0])  # texts, and where the model's turns are
    except Exception as error:
        why = f"it needs more than {MEMORY >> 30} GiB of memory" if isinstance(error, MemoryError) else described(error)
        raise UserError(f"task.chat_template: the tokenizer's template cannot render a chat ({why})") from error
