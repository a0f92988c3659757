"""Where the checkout is, and the small configurations the tests run."""

from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parents[1]
TINY, SMALL = SUPPORT / "tiny.yaml", SUPPORT / "small.yaml"
SMALL_CONTROL, TINY_GRID = SUPPORT / "small_control.yaml", SUPPORT / "tiny_grid.yaml"
