"""Execute a notebook from top to bottom, and write it so that a diff shows only what changed."""

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
    """The notebook with its outputs, in a kernel of its own that starts in the notebook's folder.

    `variables` are environment variables of the kernel. No configuration of the user's IPython is read. UserError where
    a cell raises.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="python3",
        coalesce_streams=True,
        resources={"metadata": {"path": str(path.parent)}},
        startup_timeout=SECONDS,
        extra_arguments=["--log-level=ERROR"],  # it warns that code goes over a port of this machine
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
    """The same notebook without what differs by chance or by machine: ids, times, versions.

    `metadata.executed` is the digest of the code that the outputs are of.
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
    """SHA-256 of the code cells, in order."""
    sources = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()


def text_of(notebook: Any) -> str:
    """What the file holds."""
    return str(nbformat.writes(notebook)).rstrip("\n") + "\n"
