"""Which kind a recorded run is of: the one place where commands choose."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppo_repro.config.files import CONTROL, LANGUAGE, Kind
from ppo_repro.errors import UserError
from ppo_repro.records import manifest
from ppo_repro.runs.summary import SummaryKind
from ppo_repro.tracking.numbers import SUMMARIES

if TYPE_CHECKING:
    from ppo_repro.ranks import Ranks
    from ppo_repro.runs.kind import RunKind
    from ppo_repro.watcher import Watcher


@dataclass(frozen=True)
class RecordedKind:
    """What commands need of a kind: how its runs are summed up, and how they are executed, which imports torch."""

    name: Kind

    @property
    def summary(self) -> SummaryKind[Any]:
        return SUMMARIES[self.name]

    def executed_by(self, watcher: Watcher, ranks: Ranks) -> RunKind[Any, Any]:
        """How such a run is executed; UserError for several processes where the kind works in one."""
        if self.name == LANGUAGE:
            from ppo_repro.runs.language import LanguageKind

            return LanguageKind(watcher, ranks)
        if ranks.size > 1:
            raise UserError(f"a {self.name} run works in one process; start this command without torchrun")
        if self.name == CONTROL:
            from ppo_repro.control.kind import ControlKind  # gymnasium, which not everybody has

            return ControlKind(watcher)
        from ppo_repro.preferences.dpo.execution import DPOKind

        return DPOKind(watcher)


def kind_of(run_dir: Path) -> RecordedKind:
    """The kind of a recorded run, from its manifest; UserError where there is none."""
    return RecordedKind(manifest.load_head(run_dir).kind)
