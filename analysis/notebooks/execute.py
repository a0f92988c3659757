"""Execute a notebook from top to bottom, without the outputs that differ by chance."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from ppo_repro.base.errors import UserError

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
