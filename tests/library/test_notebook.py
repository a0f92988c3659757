"""`train` in a Jupyter kernel: what it shows, and what an interrupt leaves."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ppo_repro
from ppo_repro.library.progress import in_notebook
from tests.support.interrupts import hearing_ctrl_c
from tests.support.runs import small_config

SECONDS = 120.0  # for one message of a kernel


class Kernel:
    """A kernel, and what its cells showed."""

    def __init__(self, manager: Any, client: Any) -> None:
        self.manager, self.client = manager, client

    def messages(self, code: str) -> Iterator[dict[str, Any]]:
        """What a cell shows, until it is done."""
        number = self.client.execute(code)
        while True:
            message = self.client.get_iopub_msg(timeout=SECONDS)
            if message["parent_header"].get("msg_id") != number:
                continue
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                return
            yield message

    def text(self, code: str) -> str:
        """Text and errors that a cell shows."""
        found = []
        for message in self.messages(code):
            content = message["content"]
            found.append(
                content.get("text") or content.get("data", {}).get("text/plain") or content.get("evalue") or ""
            )
        return "\n".join(found)


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    manager_module = pytest.importorskip("jupyter_client.manager", reason="the extra [notebook] is not installed")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    with hearing_ctrl_c():
        arguments = {"startup_timeout": SECONDS, "cwd": str(tmp_path), "extra_arguments": ["--log-level=ERROR"]}
        manager, client = manager_module.start_new_kernel(**arguments)
    yield Kernel(manager, client)
    client.stop_channels()
    manager.shutdown_kernel(now=True)


@pytest.mark.slow
def test_a_run_shows_two_lines_and_an_interrupt_says_how_to_go_on(kernel: Kernel, tmp_path: Path) -> None:
    tree = small_config("ppo.iterations=400", "model.warm_start_steps=20").model_dump(mode="json")
    kernel.text(f"import ppo_repro; config = {tree!r}")
    shown, streams, error, interrupted = [], [], None, False
    for message in kernel.messages("run = ppo_repro.train(config)"):
        if message["msg_type"] in ("display_data", "update_display_data"):
            shown.append((message["msg_type"], message["content"]["data"]["text/plain"]))
            if shown[-1][1].startswith("PPO") and not interrupted:
                interrupted = True  # a second interrupt would hit IPython while it shows the first
                time.sleep(0.3)
                kernel.manager.interrupt_kernel()
        elif message["msg_type"] == "error":
            error = message["content"]
        elif message["msg_type"] == "stream":
            streams.append(message["content"]["text"])
    # tqdm, which transformers imports, says so where there are no widgets
    assert [text for text in streams if "TqdmWarning" not in text] == []
    assert [text.split()[0] for kind, text in shown if kind == "display_data"] == ["warm", "PPO"]
    assert re.search(r"PPO \d+/400: score .*", shown[-1][1])
    assert error is not None and error["ename"] == "KeyboardInterrupt"
    assert re.fullmatch(
        r"complete iterations are kept; go on with ppo_repro\.resume\('(runs/\S+)'\) or `ppo-repro resume \1`",
        error["evalue"],
    )
    assert len(error["traceback"]) < 8, "the way to go on is not lost below the frames of the run"
    assert "state interrupted" in kernel.text("ppo_repro.latest_run()")
    run = ppo_repro.latest_run(tmp_path / "runs")
    assert run.status == "interrupted" and 1 <= run.num_iterations < 400
    assert kernel.text("1 + 1") == "1 + 1\n2" or kernel.text("1 + 1").endswith("2")  # the kernel goes on to work


def test_a_run_says_what_it_is_at_a_prompt_and_in_a_notebook(deterministic_run: Path, tmp_path: Path) -> None:
    run = ppo_repro.open_run(deterministic_run)
    assert repr(run).startswith(
        f"<run {deterministic_run}; state complete, 3 iterations; experiment small, seed 7, deterministic"
    )
    assert f"fingerprint {run.fingerprint[:12]}>" in repr(run)
    table = run._repr_html_()
    assert f"<th>fingerprint</th><td>{run.fingerprint}</td>" in table and "eval_accuracy" in table
    nowhere = ppo_repro.Run(tmp_path / "<nowhere>")
    assert "cannot be read" in repr(nowhere) and "&lt;nowhere&gt;" in nowhere._repr_html_()


def test_progress_can_be_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not in_notebook()
    tree = small_config("ppo.iterations=1", "ppo.epochs=1", "model.warm_start_steps=10").model_dump(mode="json")
    ppo_repro.train({**tree, "seed": 1}, out=tmp_path, progress=False)
    assert capsys.readouterr().err == ""
    ppo_repro.train({**tree, "seed": 2}, out=tmp_path)
    assert "PPO 1/1: score" in capsys.readouterr().err
