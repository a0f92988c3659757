"""The model of the runs that judge texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.chat import make_chat_folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_folder(tmp_path_factory.mktemp("chat"))
