"""Servers as processes: started, watched, and gone when the run is, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from ppo_repro.base.errors import UserError
from ppo_repro.sampler import Request, Sampling
from ppo_repro.sampling.sglang.sampler import NOTES, SGLangSampler
from ppo_repro.sampling.sglang.server import free_port
from tests.sampling.sglang.fake_sglang import fake_python
from tests.support.cli import sets
from tests.support.interrupts import hearing_ctrl_c
from tests.support.models import source_model
from tests.support.paths import ROOT, SMALL
from tests.support.runs import small_config
from tests.support.waiting import lives, require_ended, until

PACKAGE = ROOT / "ppo_repro"
REQUESTS = [Request((2, 4, index), 1000 + index) for index in range(5)]
PLAIN = Sampling(1.0, 0, 1.0, 6)


@pytest.fixture()
def policy() -> PreTrainedModel:
    model = source_model("qwen3")
    model.config.vocab_size = 20  # of the stand-in
    return model


@contextmanager
def started(
    folder: Path, policy: PreTrainedModel, *misbehave: str, timeout: int = 20, count: int = 1, high: bool = False
) -> Iterator[SGLangSampler]:
    python = fake_python(folder, PACKAGE, *misbehave)
    servers = f"rollout.engine.servers={count}", f"rollout.engine.timeout_s={timeout}"
    sets = *servers, f"numerics.precision={'high' if high else 'highest'}"
    config = small_config("rollout.engine.kind=sglang", f"rollout.engine.python={python}", *sets)
    with SGLangSampler(config, policy, frozenset({1}), folder / "sglang").running(lambda seconds: None) as opened:
        yield opened


def written(path: Path) -> str:
    """The content of a file, once it has some."""
    return str(until(lambda: path.exists() and path.read_text(), str(path)))


@pytest.mark.skipif(sys.platform != "linux", reason="reads the system's range of client ports")
def test_no_program_that_connects_takes_the_port_of_a_server_that_starts() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = {free_port() for _ in range(8)}
    assert len(ports) > 1
    assert max(ports) + 1000 < first, "SGLang takes further ports up to 1,000 above its own"


def test_servers_are_started_in_the_precision_of_the_run(policy: PreTrainedModel, tmp_path: Path) -> None:
    with started(tmp_path, policy, high=True):
        pass
    assert "PpoReproHighForCausalLM" in (tmp_path / "sglang" / NOTES).read_text()


def test_servers_end_with_the_block_and_with_all_their_processes(policy: PreTrainedModel, tmp_path: Path) -> None:
    with started(tmp_path, policy, "has a child", count=2) as engine:
        assert len(engine.generate(REQUESTS, PLAIN)) == 5
        pids = [int((tmp_path / "child").read_text()), int((tmp_path / "serving").read_text())]
        pids += [found.process.pid for found in engine.servers if found.process]
        assert all(map(lives, pids))
    require_ended(*pids)
    assert "starting" in (tmp_path / "sglang" / "server-1.log").read_text()


def test_a_server_that_dies_at_the_start_is_reported_with_its_last_lines(
    policy: PreTrainedModel, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with (
        pytest.raises(UserError, match=r"exit code 7 \(RuntimeError: not enough memory .*did not start"),
        started(tmp_path, policy, "dies"),
    ):
        pass
    assert "    starting\n" in capfd.readouterr().err


def test_a_port_that_another_program_took_stops_no_later_start(
    policy: PreTrainedModel, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="another program took this port"), started(tmp_path, policy, "port taken"):
        pass
    with pytest.raises(UserError, match="exit code 7"), started(tmp_path, policy, "dies"):
        pass
    assert "address already in use" not in capfd.readouterr().err, "lines of an earlier start"
    with started(tmp_path, policy) as engine:
        assert len(engine.generate(REQUESTS, PLAIN)) == 5
    assert "address already in use" in (tmp_path / "sglang" / "server-0.log").read_text()


def test_a_server_that_never_gets_ready(policy: PreTrainedModel, tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=r"did not start within rollout.engine.timeout_s = 1"),
        started(tmp_path, policy, "never ready", timeout=1),
    ):
        pass
    require_ended(int((tmp_path / "serving").read_text()))


def test_a_server_that_dies_ends_the_rollout_with_its_last_words(policy: PreTrainedModel, tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=r"exit code 9 \(Fatal error: killed in generate\)"),
        started(tmp_path, policy, "dies in generate") as engine,
    ):
        engine.generate(REQUESTS, PLAIN)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
def test_no_server_outlives_the_run(number: signal.Signals, tmp_path: Path) -> None:
    python = fake_python(tmp_path, PACKAGE, "hangs in generate", "has a child")
    command = [sys.executable, "-m", "ppo_repro", "run", str(SMALL), "--out", str(tmp_path / "runs")]
    changed = sets("rollout.engine.kind=sglang", f"rollout.engine.python={python}", "model.warm_start_steps=0")
    with hearing_ctrl_c():
        run = subprocess.Popen([*command, *changed], cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        pids = [int(written(tmp_path / name)) for name in ("serving", "child")]
        time.sleep(0.5)
        os.kill(run.pid, number)
        code = run.wait(30)
    finally:
        run.kill()
    if number == signal.SIGKILL:  # a server's own processes end with it, as SGLang's do; the stand-in's child does not
        os.kill(pids.pop(), signal.SIGKILL)
    assert code == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    require_ended(*pids)
