"""JSON files that end with their own SHA-256, so that a change of any byte is noticed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

OWN_DIGEST = "sha256"


def sealed(tree: Mapping[str, Any]) -> str:
    """JSON with the SHA-256 of the JSON without it as its last field: a function of the content, to the byte."""
    return _text({**tree, OWN_DIGEST: hashlib.sha256(_text(tree).encode()).hexdigest()})


def is_sealed(tree: Any) -> bool:
    """Whether what was read has a digest of its own."""
    return isinstance(tree, dict) and OWN_DIGEST in tree


def is_whole(text: str, tree: Mapping[str, Any]) -> bool:
    """Whether `text`, which was read as `tree`, is to the byte what `sealed` made."""
    return sealed({name: value for name, value in tree.items() if name != OWN_DIGEST}) == text


def _text(tree: Mapping[str, Any]) -> str:
    return json.dumps(tree, indent=1, ensure_ascii=False) + "\n"
