"""How the file of an audit's page begins, which says who wrote it. Never imports torch."""

from __future__ import annotations

from ppo_repro.files import OwnKind

_START = '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
BEGINNING = f'{_START}<meta name="generator" content="ppo-repro audit"/>'
# of pages before they named who wrote them; the rest of the policy was another in every version
_EARLIER = (
    f'{_START}<meta name="viewport" content="width=device-width, initial-scale=1"/>'
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'sha256-"
)
PAGE = OwnKind("page of an audit", (BEGINNING.encode(), _EARLIER.encode()))
