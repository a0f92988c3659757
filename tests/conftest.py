"""Shared settings: one thread unless a test says otherwise, no network, no telemetry."""

import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# threads that wait must not spin on cores that others need
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.browser import browser
from tests.support.cli import cli

__all__ = ["browser", "cli"]  # fixtures

gc.disable()  # while the files are collected: a fifth of the time of imports goes into looking for garbage

# the same cases every time; `make test-long` takes the profile `new`, which draws others and prints how to repeat them
settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=25)
settings.register_profile("new", deadline=None, derandomize=False, print_blob=True, max_examples=200)
settings.load_profile("repeatable")


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Runs set the threads of the whole process; every test begins with one."""
    from ppo_repro.numerics import library

    library.use_threads(1)
    yield


@pytest.fixture
def row_dependent() -> Iterator[None]:
    """Native numerics whose results depend on the number of rows on every processor."""
    from tests.support.row_dependent import row_dependent_linear

    with row_dependent_linear():
        yield


@pytest.fixture
def row_noise() -> Iterator[None]:
    """The same with differences as small as those of stock torch; `native_run` was recorded so."""
    from tests.support.row_dependent import NOISE, row_dependent_linear

    with row_dependent_linear(NOISE):
        yield


@pytest.fixture(scope="session")
def deterministic_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small but complete run in deterministic numerics, recorded once; tests must not change it."""
    from tests.support.language import small_run

    return small_run(tmp_path_factory.mktemp("deterministic"))


@pytest.fixture(scope="session")
def control_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A control run in deterministic numerics; tests must not change it."""
    from tests.support.control import run, small_control

    return run(small_control(), tmp_path_factory.mktemp("control"))[0]


@pytest.fixture(scope="session")
def native_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run in native numerics: the negative control. What computes it again needs `row_noise`."""
    from tests.support.language import small_run
    from tests.support.row_dependent import NOISE, row_dependent_linear

    with row_dependent_linear(NOISE):
        return small_run(tmp_path_factory.mktemp("native"), "numerics.mode=native")


@pytest.fixture(scope="session")
def parted_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The native run with larger steps: soon it samples other tokens than the other two."""
    from tests.support.language import small_run

    return small_run(tmp_path_factory.mktemp("parted"), "numerics.mode=native", "ppo.learning_rate=1e-2")
