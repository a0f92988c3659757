"""Compare the memory of a run of a large model with the estimate of `ppo-repro plan`.

`python -m experiments.benchmarks.peak --folder DIR` makes a Qwen3 with random weights and the shape of Qwen3-0.6B in
DIR. Then it runs PPO in a process of its own for each case, and prints the largest resident set beside the plan.
`--layers` and `--vocab-size` make it smaller.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

CONFIG = Path(__file__).with_name("peak.yaml")
INTERVAL = 0.02  # seconds between two looks; the largest phases last longer
LORA = "{rank: 8, alpha: 16.0}"
SEPARATE = ("advantages={kind: gae}", "kl={placement: loss}")
CASES: dict[str, tuple[str, ...]] = {
    "lora, group advantages": (f"lora={LORA}",),
    "lora, lora value model": (
        *SEPARATE,
        f"lora={LORA}",
        f"value={{kind: separate, learning_rate: 1e-5, lora: {LORA}}}",
    ),
    "lora value model": (*SEPARATE, f"value={{kind: separate, learning_rate: 1e-5, lora: {LORA}}}"),
    "lora, value model": (*SEPARATE, f"lora={LORA}", "value={kind: separate, learning_rate: 1e-5}"),
    "value head": (*SEPARATE, "value={kind: head}"),
    "sampler in bfloat16": ("mismatch.sampler.precision={weights: bfloat16, activations: bfloat16}",),
}

# the same operands and sums with as little work as there can be: two steps on one sequence each
SHORT = (
    "ppo.iterations=1",
    "ppo.minibatch_size=1",
    "rollout.prompts_per_iteration=1",
    "rollout.max_response_tokens=6",
    "numerics.max_context=14",
    "task.num_eval_prompts=1",
)


@dataclass(frozen=True)
class Peak:
    """Result of one case: memory in bytes, and seconds of the whole run."""

    case: str
    measured: int  # the largest resident set
    anonymous: int  # the largest of it without mapped files, which the system takes back when memory is short
    planned: int
    seconds: float


def make_folder(folder: Path, layers: int, vocab_size: int, hidden: int) -> None:
    """Write a model folder with random weights; 28 layers, `hidden` 1024 and 151,936 tokens are Qwen3-0.6B's shape."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from ppo_repro.config.files import load_config
    from ppo_repro.models.tiny import make_tokenizer
    from ppo_repro.tasks.problems import load_source

    tokenizer = make_tokenizer(load_source(load_config(CONFIG).task, 7).problems.train, 64)
    torch.manual_seed(0)
    shape = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def planned(overrides: list[str]) -> int:
    """Return the planned peak memory in bytes."""
    from ppo_repro.config.files import load_config
    from ppo_repro.runs.plan import plan_run

    return plan_run(load_config(CONFIG, overrides)).peak


def anonymous_bytes(process: int) -> int:
    """Return the resident memory of a process in bytes, without mapped files; 0 if it has ended, and nobody waited."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def measure(case: str, folder: Path, overrides: list[str]) -> Peak:
    """Run a case in a process of its own. Raises CalledProcessError if the run fails."""
    sets = [*CASES[case], f"model.path={folder}", *overrides]
    with tempfile.TemporaryDirectory(dir=folder.parent) as out:
        arguments = [part for override in sets for part in ("--set", override)]
        command = [sys.executable, "-m", "ppo_repro", "run", str(CONFIG), "--out", out, *arguments]
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        anonymous, ended = 0, 0
        while not ended:
            anonymous = max(anonymous, anonymous_bytes(process.pid))
            time.sleep(INTERVAL)
            ended, status, used = os.wait4(process.pid, os.WNOHANG)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
    return Peak(case, 1024 * used.ru_maxrss, anonymous, planned(sets), seconds)


def markdown(peaks: list[Peak]) -> str:
    """Return a Markdown table with one row per case, in gigabytes (10^9 bytes)."""
    lines = [
        "| case | measured GB | without files GB | planned GB | planned / measured | s |",
        "|---|---|---|---|---|---|",
    ]
    for p in peaks:
        ratio = f"{p.planned / p.measured:.3f}"
        sizes = " | ".join(f"{count / 1e9:.2f}" for count in (p.measured, p.anonymous, p.planned))
        lines.append(f"| {p.case} | {sizes} | {ratio} | {p.seconds:.0f} |")
    return "\n".join(lines)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Largest resident set of a run beside the plan.")
    parser.add_argument("--folder", type=Path, required=True, help="where the model is made, and runs are written")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--case", action="append", choices=list(CASES), help="all where none is given")
    parser.add_argument("--short", action="store_true", help="one iteration of two steps on a sequence each")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="as of `ppo-repro run`")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()
    model = arguments.folder / f"qwen3-{arguments.hidden}-{arguments.layers}-{arguments.vocab_size}"
    if not (model / "config.json").is_file():
        make_folder(model, arguments.layers, arguments.vocab_size, arguments.hidden)
    peaks = []
    for case in arguments.case or CASES:
        peaks.append(measure(case, model, [*(SHORT if arguments.short else ()), *arguments.set]))
        print(markdown(peaks[-1:]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(peak) for peak in peaks], indent=1) + "\n")


if __name__ == "__main__":
    main()
