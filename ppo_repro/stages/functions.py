"""Load the user's functions that the loop calls, once when a run is prepared or repeated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from ppo_repro.base.user_file import load_callable
from ppo_repro.buffers import Rollout
from ppo_repro.config.run import RunConfig
from ppo_repro.config.section import CheckedFunction
from ppo_repro.ppo.own_functions import (
    Own,
    OwnAdvantages,
    OwnEstimator,
    OwnObjective,
    OwnPlacement,
    require_settings,
    settings_of_process,
)

OwnT = TypeVar("OwnT", bound=Own)


@dataclass(frozen=True)
class Functions:
    """The user's functions; None if the configuration names a method of the package."""

    objective: OwnObjective | None = None
    advantages: OwnAdvantages | None = None
    estimator: OwnEstimator | None = None
    placement: OwnPlacement | None = None


BUILT_IN = Functions()


def about_tokens(rollout: Rollout, tokens: Tensor) -> dict[str, Tensor]:
    """Return the fields of `own_batches.Tokens` for n tokens of whole responses, [n] int64 each."""
    responses = rollout.sequence_of_token()[tokens]
    return {
        "responses": responses,
        "groups": rollout.groups()[responses],
        "positions": tokens - rollout.starts()[responses],
        "lengths": rollout.lengths[responses],
    }


def load_functions(config: RunConfig) -> Functions:
    """Execute the files of the user's functions. Raises UserError, naming field, file and line, for unusable ones."""
    own = config.functions
    return Functions(
        objective=_loaded(OwnObjective, "ppo.objective", own, ["batch"]),
        advantages=_loaded(OwnAdvantages, "advantages", own, ["batch"]),
        estimator=_loaded(OwnEstimator, "kl.estimator", own, ["logprobs", "ref_logprobs"]),
        placement=_loaded(OwnPlacement, "reward.placement", own, ["batch"]),
    )


def _loaded(kind: type[OwnT], field: str, own: Mapping[str, CheckedFunction], positions: Sequence[str]) -> OwnT | None:
    """Load the function of a field; None if the field names a method of the package."""
    if field not in own:
        return None
    parameters, before = own[field].parameters, settings_of_process()
    function = load_callable(f"{field}.path", own[field].path, positions, parameters)
    require_settings(function, before)
    return kind(function, parameters)
