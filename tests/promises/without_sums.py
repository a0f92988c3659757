"""The program, deliberately broken: every rank uses its own gradients."""

from __future__ import annotations

from ppo_repro.base.ranks import Ranks
from ppo_repro.commands import cli
from ppo_repro.numerics.shards import Shards

if __name__ == "__main__":
    Shards.add_up = lambda self, flat: None  # type: ignore[method-assign]
    Ranks.add_up = lambda self, tensors: None  # type: ignore[method-assign,attr-defined]
    cli.main()
