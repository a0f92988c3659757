"""How the file of an audit's page begins, which says who wrote it. Never imports torch."""

from __future__ import annotations

from ppo_repro.files import OwnKind

BEGINNING = (
    '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/><meta name="generator" content="ppo-repro audit"/>'
)
PAGE = OwnKind("page of an audit", (BEGINNING.encode(),))
