"""Real SGLang servers, and what is compared with them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ppo_repro.base.watcher import Silent
from ppo_repro.config.run import RunConfig
from ppo_repro.runs.prepare import Prepared, prepare
from ppo_repro.sampling.sglang.sampler import SGLangSampler
from tests.support.runs import small_config

CONTEXT = 600  # the servers' and of every deterministic run on them
PYTHON = os.environ.get("PPO_REPRO_SGLANG_PYTHON", "")
WARM = "model.warm_start_steps=0", f"numerics.max_context={CONTEXT}"


def config_of(*overrides: str) -> RunConfig:
    if not PYTHON:
        raise RuntimeError("PPO_REPRO_SGLANG_PYTHON is not set: the interpreter of an environment by .ci/server.sh")
    return small_config("rollout.engine.kind=sglang", f"rollout.engine.python={PYTHON}", *WARM, *overrides)


@dataclass(frozen=True)
class Subject:
    """Servers, and the model they are to hold."""

    config: RunConfig
    prepared: Prepared
    engine: SGLangSampler

    @property
    def urls(self) -> str:
        return "rollout.engine.urls=[" + ",".join(found.url for found in self.engine.servers) + "]"

    def forget(self) -> None:
        """Somebody else has used the servers: bring weights again."""
        self.engine._server_digests.update({found.url: "" for found in self.engine.servers})


@contextlib.contextmanager
def subject(folder: Path, *overrides: str) -> Iterator[Subject]:
    config = config_of(*overrides)
    prepared = prepare(config, Silent())
    policy, stops = prepared.state.policy, prepared.sampler.stop_ids
    with SGLangSampler(config, policy, stops, folder).running(lambda seconds: None) as engine:
        groups = [found.process.pid for found in engine.servers if found.process]
        yield Subject(config, prepared, engine)
    until = time.monotonic() + 10
    while any(members(group) for group in groups) and time.monotonic() < until:
        time.sleep(0.05)
    assert groups
    assert not any(members(group) for group in groups)


def members(group: int) -> list[int]:
    """Processes of a group that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                found.append(int(path.parent.name))
    return found
