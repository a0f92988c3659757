"""The MLflow store that copies go to: checked, made whole or not at all, waited for some seconds only."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient
from sqlalchemy.exc import SQLAlchemyError

from ppo_repro.errors import UserError
from ppo_repro.output import masked

# MLflow's defaults retry for minutes; what the user has in the environment goes first
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "databricks")


@contextmanager
def answering(uri: str) -> Iterator[MlflowClient]:
    """A client of the store; UserError where it does not answer. The password of a URI is never said."""
    for name, value in PATIENCE.items():
        os.environ.setdefault(name, value)
    for name in ("alembic", "mlflow", "urllib3"):
        logging.getLogger(name).setLevel(logging.ERROR)
    _check(uri)
    try:
        client = _client(uri)
    except Exception as error:  # MLflow's, SQLAlchemy's, requests', of a missing driver: all mean no first contact
        raise _unwritable(uri, error) from error
    try:
        yield client
    except (MlflowException, SQLAlchemyError, OSError) as error:
        raise _unwritable(uri, error) from error


def _check(uri: str) -> None:
    scheme, separator, rest = uri.partition("://")
    if scheme.partition("+")[0] not in SCHEMES or not separator:
        if uri != "databricks":
            raise UserError(f"--uri {masked(uri)!r}: must begin with one of {', '.join(SCHEMES)} and ://")
    elif scheme == "sqlite" and not rest.removeprefix("/"):
        raise UserError(f"--uri {uri}: keeps nothing; name a file, such as sqlite:///mlflow.db")


def _client(uri: str) -> MlflowClient:
    """A client whose store has answered. A SQLite database that is not there appears with all of its tables."""
    path = Path(uri.removeprefix("sqlite:///"))
    if uri.startswith("sqlite:///") and "?" not in uri and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{path.name}.", dir=path.parent) as folder:
            MlflowClient(f"sqlite:///{folder}/new.db").search_experiments(max_results=1)
            with suppress(FileExistsError):  # another process was quicker
                os.link(Path(folder) / "new.db", path)
    client = MlflowClient(uri)
    client.search_experiments(max_results=1)
    return client


def _unwritable(uri: str, error: Exception) -> UserError:
    reason = masked(" ".join(str(error).split()))[:200]
    text = f"--uri {masked(uri)}: cannot be written ({reason}); the records are not affected"
    if uri.startswith("sqlite:") and not isinstance(error, OSError):
        text += "; a database that is damaged, or of another kind, has to be moved away first"
    return UserError(text)
