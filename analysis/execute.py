"""Execute the notebooks and write them with their outputs: `python -m analysis.execute [NAME ...]`.

The program first records the runs that the notebooks show, in runs/notebooks, unless they are there: the quickstart in
deterministic and in native numerics, and a small grid. PPO_RUN, PPO_OTHER_RUN and PPO_GRID name other folders. Outputs
that differ by chance are left out.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from analysis.recorded import RECORDED, ROOT, RUNS, folder_of, recorded_for
from ppo_repro.base.errors import UserError
from ppo_repro.base.output import Parser, tell
from ppo_repro.base.program import program

HERE = Path(__file__).resolve().parent
NAMES = tuple(sorted(path.stem for path in HERE.glob("*.ipynb")))
SECONDS = 600  # for one cell
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def executed(path: Path, variables: Mapping[str, str]) -> Any:
    """Execute a notebook in a new kernel, in the notebook's folder, and return the notebook with its outputs.

    `variables` are environment variables of the kernel, which reads no configuration of the user's IPython. Raises
    UserError if a cell raises.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="python3",
        coalesce_streams=True,
        resources={"metadata": {"path": str(path.parent)}},
        startup_timeout=SECONDS,
        extra_arguments=["--log-level=ERROR"],  # no warning that code goes over a port of this machine
    )
    with TemporaryDirectory() as folder:
        own = {"IPYTHONDIR": folder, "JUPYTER_RUNTIME_DIR": folder}
        try:
            client.execute(env={**os.environ, **own, **variables})
        except CellExecutionError as error:
            print(error.traceback, file=sys.stderr)
            raise UserError(f"{path}: a cell ends with {error.ename}: {error.evalue}") from error
    return tidy(notebook)


def tidy(notebook: Any) -> Any:
    """Remove ids, times and versions, which differ by chance or machine, from a notebook, and return the notebook.

    `metadata.executed` becomes the digest of the code that made the outputs.
    """
    notebook.nbformat, notebook.nbformat_minor = 4, 4  # cells have ids from 4.5 on
    language = {"name": "python"}
    notebook.metadata = {"executed": sources_digest(notebook), "kernelspec": KERNEL, "language_info": language}
    for cell in notebook.cells:
        cell.pop("id", None)
        cell.metadata = {}
        for output in cell.get("outputs", []):
            if "metadata" in output:
                output.metadata = {}
    return notebook


def sources_digest(notebook: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the code cells, in order."""
    sources = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()


def text_of(notebook: Any) -> str:
    """Return the notebook as the text of its file."""
    return str(nbformat.writes(notebook)).rstrip("\n") + "\n"


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
    parser = Parser(prog="python -m analysis.execute", description="execute the notebooks")
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
