"""The states of a run, and of a cell of a grid: who writes them, and who reads them. Imports are few.

manifest.json has a `Status`:

| status | who writes it |
|---|---|
| running | `writer.lay_out_run` for a new run, and `runs/resume.py` |
| interrupted | `runs/run.py`, if Ctrl-C or SIGTERM ends a run with a complete iteration |
| failed | `runs/run.py`, if another error ends a run with a complete iteration, or if unequal bits end a run |
| complete | `writer.finish`, with the final results |

`runs/run.py` removes the folder of a run that ends without a complete iteration. A process that is killed writes
nothing, so the status stays `running`. `reader.open_manifest` refuses a run that is not `complete`, unless its caller
allows it. `resume` refuses a `complete` run.

Other states are in no manifest. These functions derive them from the files:

| state | who derives it | when |
|---|---|---|
| killed | `state_of`, for `show`, `verify`, `view` and `api/` | `running`, but no process writes the run |
| damaged | `show` of a folder of runs | a file that the list needs cannot be read |
| missing | `grids/cell.py` | the cell has no run, and no attempt at it has ended |
| interrupted | `grids/cell.py` | the last attempt ended and the run is `running`, or no run and no code 1 or 2 |
| failed | `grids/cell.py` | the last attempt ended with an error, without a run |

torchrun exits with 1 whatever the exit codes of its processes are, so a cell of several processes that a signal ends
without a run is `failed`. The next call of `grid` runs every cell that is not `complete`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from ppo_repro.base.lock import has_writer

Status = Literal["running", "interrupted", "failed", "complete"]
RunState = Literal["running", "interrupted", "failed", "complete", "killed"]
CellState = Literal["missing", "running", "interrupted", "failed", "complete"]


def state_of(run_dir: Path, status: Status) -> RunState:
    """Return the status of a manifest; `killed` if it is `running` but no process is writing the run."""
    return "killed" if status == "running" and not has_writer(run_dir) else status
