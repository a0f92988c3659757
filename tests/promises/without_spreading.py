"""The program, deliberately broken: every rank keeps the weights that it stepped on for itself."""

from __future__ import annotations

from ppo_repro.commands import cli
from ppo_repro.numerics.shards import Shards

if __name__ == "__main__":
    Shards.spread = lambda self, flat: None  # type: ignore[method-assign]
    cli.main()
