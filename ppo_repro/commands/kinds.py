"""How a run of each kind is executed: the one place that chooses."""

from __future__ import annotations

from typing import Any

from ppo_repro.config.files import CONTROL, LANGUAGE, Kind
from ppo_repro.errors import UserError
from ppo_repro.ranks import Ranks
from ppo_repro.runs.kind import RunKind
from ppo_repro.watcher import Watcher


def executed_by(kind: Kind, watcher: Watcher, ranks: Ranks) -> RunKind[Any, Any]:
    """How a run of this kind is executed; UserError for several processes if the kind works in one."""
    if kind == LANGUAGE:
        from ppo_repro.runs.language import LanguageKind

        return LanguageKind(watcher, ranks)
    if ranks.size > 1:
        raise UserError(f"a {kind} run works in one process; start this command without torchrun")
    if kind == CONTROL:
        from ppo_repro.control.kind import ControlKind  # gymnasium, which not everybody has

        return ControlKind(watcher)
    from ppo_repro.preferences.dpo.execution import DPOKind

    return DPOKind(watcher)
