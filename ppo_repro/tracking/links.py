"""Where a copy is: the address of a run in MLflow's pages. Passwords are never part of it."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from ppo_repro.output import masked

WORKFLOW = "?workflowType=machine_learning"  # else MLflow 3 takes the run for an evaluation of prompts
LOCAL_PAGES = "http://127.0.0.1:5000"  # where `mlflow ui` shows them unless told otherwise


@dataclass(frozen=True)
class Place:
    """A run in an MLflow store."""

    experiment_id: str
    run_id: str

    @property
    def path(self) -> str:
        """The part of the address after that of the server."""
        return f"/#/experiments/{self.experiment_id}/runs/{self.run_id}{WORKFLOW}"


def lines(uri: str, place: Place) -> list[str]:
    """How to look at a run: its address, and before it the command that serves it where nothing does yet."""
    if uri.startswith("databricks"):
        return [f"MLflow      run {place.run_id} of experiment {place.experiment_id} in {masked(uri)}"]
    if _is_served(uri):
        return [f"MLflow      {address(uri, place)}"]
    return [
        f"MLflow      {address(uri, place)}",
        f"served by   mlflow ui --backend-store-uri {shlex.quote(masked(_from_anywhere(uri)))}",
    ]


def fields(uri: str, place: Place) -> dict[str, str]:
    """The same for JSON."""
    return {"uri": masked(uri), **asdict(place), "url": "" if uri.startswith("databricks") else address(uri, place)}


def address(uri: str, place: Place) -> str:
    """The page of a run, on the server that the URI names or on the one that `mlflow ui` starts."""
    if not _is_served(uri):
        return LOCAL_PAGES + place.path
    parts = urlsplit(uri)
    server = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"), "", ""))
    return server + place.path


def _is_served(uri: str) -> bool:
    return uri.startswith(("http://", "https://"))


def _from_anywhere(uri: str) -> str:
    """The URI with the absolute path of a SQLite file, so that the command works in every folder."""
    path = uri.removeprefix("sqlite:///")
    return f"sqlite:///{Path(path).absolute()}" if path != uri and not path.startswith("/") else uri
