"""Let transformers read files, silently, and say in one line what fails; imports no kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging

from ppo_repro.base.errors import UserError, is_out_of_memory
from ppo_repro.base.output import type_and_message


@contextmanager
def reading(where: str) -> Iterator[None]:
    """Silence transformers while it reads files. Raises UserError, beginning with `where`, if reading fails.

    A lack of memory passes unchanged.
    """
    try:
        with quiet():
            yield
    except (KeyboardInterrupt, UserError):
        raise
    except BaseException as error:  # a wrong value can fail anywhere, and Rust's panics are no Exception
        if is_out_of_memory(error):
            raise
        raise UserError(f"{where}: cannot be loaded ({type_and_message(error)})") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers inside the block."""
    before, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if has_bars:
            logging.enable_progress_bar()
