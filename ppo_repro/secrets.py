"""Passwords in URIs and options: found, and masked wherever one could be shown or recorded."""

from __future__ import annotations

import re

# `user:password@` or `token@`; people write passwords with slashes too, but digits and a slash are a port and a path
_LOGIN = re.compile(r"(?<=\w:)//(?:[^\s/]{1,500}|[^\s/@:]{0,500}:(?!\d+/)\S{1,500})@")
_PARAMETER = re.compile(r"([?&;](?:password|passwd|pwd|secret|token|access_token|api_key)=)[^\s&;]+", re.IGNORECASE)
_OPTION_NAME = r"--(?:[\w-]{0,50}[-_])?(?:api[-_]key|password|passwd|secret|token)"
# `--api-key VALUE`, `--api-key=VALUE`, and both as words of a list
_OPTION = re.compile(rf"({_OPTION_NAME}(?:=|[\"']?,?\s+[\"']?))[^\s\"',\]]+", re.IGNORECASE)


def has_password(text: str) -> bool:
    """Whether the text contains a URI that logs in, or an option whose value is a secret."""
    return masked(text) != text


def is_secret_option(word: str) -> bool:
    """Whether a word of a command line is an option whose value is a secret, with the value or before it."""
    return re.fullmatch(_OPTION_NAME, word.partition("=")[0], re.IGNORECASE) is not None


def masked(text: str) -> str:
    """The text with `***` in place of the login of every URI in it, and of the value of every secret option."""
    return _OPTION.sub(r"\1***", _PARAMETER.sub(r"\1***", _LOGIN.sub("//***@", text)))
