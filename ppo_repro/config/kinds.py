"""Name the kinds of runs, the configuration of each kind, and the fields by which a file shows its kind."""

from __future__ import annotations

from typing import Final, Literal

from ppo_repro.config.control import ControlConfig
from ppo_repro.config.dpo import DPOConfig
from ppo_repro.config.run import RunConfig

Kind = Literal["language", "control", "dpo"]
LANGUAGE: Final = "language"  # PPO on a language model
CONTROL: Final = "control"  # PPO on Gymnasium environments
DPO: Final = "dpo"  # DPO on preference pairs

AnyConfig = RunConfig | ControlConfig | DPOConfig
CONFIGS: dict[Kind, type[AnyConfig]] = {LANGUAGE: RunConfig, CONTROL: ControlConfig, DPO: DPOConfig}
# fields by which a kind of file is known, because no other kind has them
GRID: Final = "grid"
KIND_OF_FIELD = {"rollout": LANGUAGE, "environment": CONTROL, "dpo": DPO, "axes": GRID, "base": GRID}


def kind_of(tree: object) -> Kind:
    """Return the kind of run of a parsed file, by its fields; LANGUAGE if they do not decide."""
    return next((kind for kind in CONFIGS if kind == kind_of_file(tree)), LANGUAGE)


def kind_of_file(tree: object) -> str | None:
    """Return the kind of a parsed file, by its fields; None if they do not decide."""
    kinds = {KIND_OF_FIELD[name] for name in KIND_OF_FIELD if isinstance(tree, dict) and name in tree}
    return kinds.pop() if len(kinds) == 1 else None
