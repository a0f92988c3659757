"""Execute the notebooks and write them with their outputs: `python -m ppo_repro.analysis.notebooks [NAME ...]`.

The command first records the runs that the notebooks show, in runs/notebooks, unless they are there: the quickstart in
deterministic and in native numerics, and a small grid. PPO_RUN, PPO_OTHER_RUN and PPO_GRID name other folders.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ppo_repro.analysis.notebooks import RECORDED, RUNS, folder_of, recorded_for
from ppo_repro.analysis.notebooks.execute import executed, text_of
from ppo_repro.base.errors import UserError
from ppo_repro.base.output import Parser, tell
from ppo_repro.base.program import program

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NAMES = tuple(sorted(path.stem for path in HERE.glob("*.ipynb")))


def _record(variable: str) -> None:
    """Run the quickstart for a variable unless it is recorded, or the missing cells of the grid clip.yaml."""
    mode = RECORDED[variable]
    if variable == "PPO_GRID":
        workers = str(os.cpu_count() or 1)
        _command("grid", str(HERE / "clip.yaml"), "--workers", workers, "--keep-changed", "--out", str(RUNS))
    elif recorded_for(variable) is None:
        out = str(RUNS / mode)
        _command("run", "experiments/quickstart.yaml", "--set", f"numerics.mode={mode}", "--out", out)


def _command(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "ppo_repro", *arguments], cwd=ROOT, check=False)
    if done.returncode:
        raise UserError(f"ppo-repro {' '.join(arguments)}: ended with exit code {done.returncode}; see above")


def _variables(text: str) -> dict[str, str]:
    """Return the environment variables that a notebook reads; folders are relative, because the outputs show them."""
    found = {}
    for name in RECORDED:
        if name in text:
            if not os.environ.get(name):
                _record(name)
            folder = folder_of(name).resolve()
            if not folder.is_dir():
                raise UserError(f"{name} = {os.environ[name]}: must be a folder of records; name one, or unset it")
            found[name] = os.path.relpath(folder, HERE)
    return found


@program
def main(argv: Sequence[str] | None) -> None:
    """Execute and write the named notebooks, or all."""
    parser = Parser(prog="python -m ppo_repro.analysis.notebooks", description="execute the notebooks")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all of them by default")
    names = parser.parse_args(argv).names or NAMES
    for name in names:
        if name not in NAMES:
            raise UserError(f"{name}: is no notebook; there are {', '.join(NAMES)}")
    for name in names:
        path = HERE / f"{name}.ipynb"
        text = text_of(executed(path, _variables(path.read_text(encoding="utf-8"))))
        path.write_text(text, encoding="utf-8")
        tell(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    sys.exit(main())
