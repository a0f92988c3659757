"""Which kind a recorded run is of: the one place where commands choose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppo_repro.config.files import CONTROL, DPO
from ppo_repro.errors import UserError
from ppo_repro.records import manifest
from ppo_repro.runs.summary import LANGUAGE_RUNS, SummaryKind

if TYPE_CHECKING:
    from ppo_repro.ranks import Ranks
    from ppo_repro.runs.kind import RunKind
    from ppo_repro.watcher import Watcher


@dataclass(frozen=True)
class RecordedKind:
    """What commands need of a kind: how its runs are summed up, and how they are executed, which imports torch."""

    summary: SummaryKind[Any]
    executed_by: Callable[[Watcher, Ranks], RunKind[Any, Any]]


def kind_of(run_dir: Path) -> RecordedKind:
    """The kind of a recorded run, from its manifest; UserError where there is none."""
    kind = manifest.load_head(run_dir).kind
    if kind == CONTROL:
        from ppo_repro.control.summary import CONTROL_RUNS

        return RecordedKind(CONTROL_RUNS, _control)
    if kind == DPO:
        from ppo_repro.preferences.dpo.summary import DPO_RUNS

        return RecordedKind(DPO_RUNS, _dpo)
    return RecordedKind(LANGUAGE_RUNS, _language)


def _language(watcher: Watcher, ranks: Ranks) -> RunKind[Any, Any]:
    from ppo_repro.runs.language import LanguageKind

    return LanguageKind(watcher, ranks)


def _control(watcher: Watcher, ranks: Ranks) -> RunKind[Any, Any]:
    if ranks.size > 1:
        raise UserError("a control run works in one process; start this command without torchrun")
    from ppo_repro.control.kind import ControlKind  # gymnasium, which not everybody has

    return ControlKind(watcher)


def _dpo(watcher: Watcher, ranks: Ranks) -> RunKind[Any, Any]:
    if ranks.size > 1:
        raise UserError("a DPO run works in one process; start this command without torchrun")
    from ppo_repro.preferences.dpo.execution import DPOKind

    return DPOKind(watcher)
