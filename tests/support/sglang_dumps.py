"""Stock SGLang servers on the CPU, and dumps of theirs by experiments/guard_your_stack/sglang_dump.py.

`python -m tests.support.sglang_dumps` makes the dumps in tests/testing/audit/sglang again; PPO_REPRO_SGLANG_PYTHON
as in `sglang`. The committed dumps are of SGLang 0.5.21 (attention backend `torch_native`), with the log-probs of
transformers 5.12.1 and torch 2.13.0, and of the reference model of tests/support/small.yaml: 8 prompts, 12 tokens,
temperature 0.8. Servers sample without a seed, so new dumps have other tokens but the same verdicts. Make new dumps
after a change of the model's warm start.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ppo_repro.records.folder import FINAL, REFERENCE
from ppo_repro.sampling.sglang import server
from ppo_repro.sampling.sglang.command import server_environment
from tests.support.language import small_run
from tests.support.paths import ROOT
from tests.support.sglang import PYTHON

SCRIPT = ROOT / "experiments" / "guard_your_stack" / "sglang_dump.py"
FOLDER = ROOT / "tests" / "testing" / "audit" / "sglang"
PROMPTS = ("1+2=", "3+4=", "12+5=", "7+8=", "10+11=", "6+0=", "9+9=", "4+12=")
RAW = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}  # log-probs of logits that no temperature has divided


@dataclass(frozen=True)
class Made:
    """How one dump was made: the server's dtype and environment, weights of the trainer, options of the script."""

    name: str
    dtype: str
    raw: bool
    later: bool  # the trainer has made steps that the server has not heard of
    options: tuple[str, ...]


T = ("--temperature", "0.8")
BF16 = ("--dtype", "bfloat16")
DUMPS = (
    Made("float32", "float32", False, False, T),
    Made("float32_trainer_bfloat16", "float32", False, False, (*T, *BF16)),
    Made("float32_trainer_without_temperature", "float32", False, False, (*T, "--trainer-temperature", "1")),
    Made("float32_top_p", "float32", False, False, (*T, "--top-p", "0.9")),
    Made("float32_rescored", "float32", False, False, (*T, "--rescored")),
    Made("float32_stale", "float32", False, True, T),
    Made("bfloat16", "bfloat16", False, False, T),
    Made("bfloat16_trainer_bfloat16", "bfloat16", False, False, (*T, *BF16)),
    Made("bfloat16_trainer_without_temperature", "bfloat16", False, False, (*T, "--trainer-temperature", "1")),
    Made("float32_raw", "float32", True, False, T),
    Made("bfloat16_raw", "bfloat16", True, False, T),
)


@contextlib.contextmanager
def stock_server(model: Path, folder: Path, dtype: str, raw: bool) -> Iterator[str]:
    """A server with SGLang as it comes, on the CPU; its address."""
    port = server.free_port()
    words = f"--device cpu --attention-backend torch_native --dtype {dtype} --host 127.0.0.1 --port {port}"
    words += " --max-total-tokens 4096 --max-running-requests 4 --skip-tokenizer-init --sleep-on-idle"
    environment = {**server_environment(os.environ, 1), **(RAW if raw else {})}
    command = [PYTHON, "-m", "sglang.launch_server", "--model-path", str(model), *words.split()]
    started = server.start(command, environment, folder / f"{dtype}{'_raw' * raw}.log", port)
    try:
        server.wait_until_ready(started, 600, lambda seconds: None)
        yield started.url
    finally:
        server.end(started)


def dump(url: str, model: Path, out: Path, options: Sequence[str], prompts: Sequence[str] = PROMPTS) -> None:
    """What the server and transformers say about the prompts."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(prompts) + "\n")
        file.flush()
        # torch and transformers are those of the tests
        command = [sys.executable, str(SCRIPT), str(model), str(out), "--url", url, "--prompts", file.name]
        subprocess.run([*command, "--tokens", "12", *options], check=True, stdout=subprocess.DEVNULL)


def models(folder: Path) -> tuple[Path, Path]:
    """The reference of the small run, which all dumps are of, and its weights after an iteration."""
    run_dir = small_run(folder, "ppo.iterations=1", "checkpoints.every=1")
    return run_dir / REFERENCE, run_dir / FINAL


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reference, later = models(folder)
        FOLDER.mkdir(exist_ok=True)
        for dtype, raw in dict.fromkeys((made.dtype, made.raw) for made in DUMPS):
            with stock_server(reference, folder, dtype, raw) as url:
                for made in DUMPS:
                    if (made.dtype, made.raw) == (dtype, raw):
                        dump(url, later if made.later else reference, FOLDER / f"{made.name}.jsonl", made.options)


if __name__ == "__main__":
    main()
