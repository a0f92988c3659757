"""Passwords in URIs: found, and masked wherever one could be shown or recorded."""

from __future__ import annotations

import re

# `user:password@` or `token@`; people write passwords with slashes too, but digits and a slash are a port and a path
_LOGIN = re.compile(r"(?<=\w:)//(?:[^\s/]{1,500}|[^\s/@:]{0,500}:(?!\d+/)\S{1,500})@")
_PARAMETER = re.compile(r"([?&;](?:password|passwd|pwd|secret|token|access_token|api_key)=)[^\s&;]+", re.IGNORECASE)


def has_password(text: str) -> bool:
    """Whether the text contains a URI that logs in."""
    return masked(text) != text


def masked(text: str) -> str:
    """The text with `***` in place of the login of every URI in it."""
    return _PARAMETER.sub(r"\1***", _LOGIN.sub("//***@", text))
