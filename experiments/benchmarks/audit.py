"""How long does `ppo-repro audit` take on a model of usual size, and how much memory?

`python -m experiments.benchmarks.audit --folder DIR` makes a Qwen2 with random weights and the shape of Qwen2.5-0.5B,
and responses of random tokens, in DIR. Then it audits a dump of each outcome in a process of its own, and prints times
and the largest resident sets. Other options make the model smaller.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

Values = npt.NDArray[np.float64]
PROMPT = 32  # tokens
OUTCOMES: dict[str, Callable[[Values], Values]] = {
    "both right": lambda v: v,
    "a known cause": lambda v: v / np.log(2),
    "an unknown cause": lambda v: v + 0.3 * np.random.default_rng(1).standard_normal(len(v)),
}


def make_folder(folder: Path, layers: int, hidden: int, vocab_size: int) -> None:
    """Make a model folder; `hidden` 896, 24 layers and 151,936 tokens are the shape of Qwen2.5-0.5B."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    shape = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=hidden * 38 // 7,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(shape)
    with torch.no_grad():
        model.model.norm.weight.mul_(5.0)  # else all tokens are about equally likely
    model.save_pretrained(folder)


def scored(folder: Path, rows: pd.DataFrame) -> Values:
    """Return the log-probs (nats) of all response tokens by stock transformers in float32."""
    import torch
    from transformers import Qwen2ForCausalLM

    found, model = [], Qwen2ForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for prompt, response in zip(rows["prompt_ids"], rows["response_ids"], strict=True):
            ids = torch.tensor([[*prompt, *response]])
            hidden = model.model(ids).last_hidden_state[0, len(prompt) - 1 : -1]
            for x, targets in zip(hidden.split(64), ids[0, len(prompt) :].split(64), strict=True):
                logits = model.lm_head(x)
                found.append(logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1))
    return torch.cat(found).double().numpy()


def write_dump(path: Path, rows: pd.DataFrame, sampler: Values, trainer: Values) -> None:
    """Write prompts and responses as a dump; `sampler` and `trainer` have the log-probs of all tokens, concatenated."""
    ends = np.cumsum(rows["response_ids"].str.len())[:-1]
    sides = [pd.Series(np.split(values, ends)) for values in (sampler, trainer)]
    rows.assign(rollout_logprobs=sides[0], old_logprobs=sides[1]).to_parquet(path)


def measured(model: Path, dump: Path, threads: int) -> tuple[float, float, int, str]:
    """Audit a dump in a process of its own. Returns wall seconds, CPU seconds, peak memory in bytes, the verdict."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "ppo_repro", "audit", dump, "--model", model, "--threads", str(threads)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    said = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    verdict = said.strip().splitlines()[-1] if said else f"exit {process.returncode}"
    return time.perf_counter() - start, used.ru_utime + used.ru_stime, 1024 * used.ru_maxrss, verdict


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Time and memory of an audit.")
    parser.add_argument("--folder", type=Path, required=True, help="where the model and dumps are made")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--vocab-size", type=int, default=151_936)
    parser.add_argument("--responses", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=500, help="of each response")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--outcome", action="append", choices=list(OUTCOMES), help="all where none is given")
    arguments = parser.parse_args()
    model = arguments.folder / f"qwen2-{arguments.hidden}-{arguments.layers}-{arguments.vocab_size}"
    if not (model / "config.json").is_file():
        make_folder(model, arguments.layers, arguments.hidden, arguments.vocab_size)
    drawn = np.random.default_rng(0).integers(0, arguments.vocab_size, (arguments.responses, PROMPT + arguments.tokens))
    rows = pd.DataFrame({"prompt_ids": list(drawn[:, :PROMPT]), "response_ids": list(drawn[:, PROMPT:])})
    name = f"{arguments.responses}-{arguments.tokens}"
    dump, numbers = arguments.folder / f"{name}.parquet", arguments.folder / f"{name}.npy"
    if not numbers.is_file():
        np.save(numbers, scored(model, rows))
    right = np.load(numbers)
    print("| outcome | s | CPU s | GB | verdict |\n|---|---|---|---|---|")
    for outcome in arguments.outcome or OUTCOMES:
        write_dump(dump, rows, OUTCOMES[outcome](right), right)
        seconds, of_all, memory, verdict = measured(model, dump, arguments.threads)
        print(f"| {outcome} | {seconds:.0f} | {of_all:.0f} | {memory / 1e9:.2f} | {verdict} |", flush=True)


if __name__ == "__main__":
    main()
