"""Compare the built-in engine, SGLang with this package's plugin and stock SGLang, interleaved, on the same prompts.

`python -m experiments.benchmarks.sglang_servers --python .venv-sglang/bin/python` measures a Qwen3 of 4 layers with
random weights, 32 prompts, at most 128 new tokens, one thread for each program. The cache of a server is emptied before
each turn.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from experiments.benchmarks import timing
from experiments.benchmarks.timing import Cost, Measured
from ppo_repro.base.watcher import Silent
from ppo_repro.config.files import load_config
from ppo_repro.config.run import RunConfig
from ppo_repro.runs.prepare import prepare
from ppo_repro.sampler import Completion, Request, Sampling
from ppo_repro.sampling.sglang.client import Call
from ppo_repro.sampling.sglang.sampler import SGLangSampler

QUESTION = "SGLang"
BUILT_IN = "built-in engine, deterministic"
QUICKSTART = Path(__file__).parents[1] / "quickstart.yaml"
PROMPTS, RESPONSE = 32, 128
SAMPLING = Sampling(temperature=1.0, top_k=0, top_p=1.0, max_response_tokens=RESPONSE)
_TICKS = os.sysconf("SC_CLK_TCK")


def configuration(hidden: int, python: str, numerics: str) -> RunConfig:
    """Return the quickstart's configuration with a larger model and no warm start."""
    sets = [
        f"model.hidden_size={hidden}",
        "model.num_layers=4",
        f"model.num_attention_heads={hidden // 64}",
        "model.num_key_value_heads=2",
        f"model.intermediate_size={4 * hidden}",
        "model.warm_start_steps=0",
        "numerics.max_context=256",
        "rollout.engine.kind=sglang",
        f"rollout.engine.numerics={numerics}",
        f"rollout.engine.python={python}",
    ]
    return load_config(QUICKSTART, sets)


def processor_seconds(group: int) -> float:
    """Return the CPU seconds that the living processes of a process group have used."""
    total = 0.0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == group:
            total += (int(fields[11]) + int(fields[12])) / _TICKS
    return total


@contextmanager
def server(config: RunConfig, requests: Sequence[Request], folder: Path) -> Iterator[Callable[[], Cost]]:
    """Start a server, and yield the function that measures one turn, including the client."""
    prepared = prepare(config, Silent())
    policy, stops = prepared.state.policy, prepared.sampler.stop_ids
    with SGLangSampler(config, policy, stops, folder).running(lambda seconds: None) as engine:
        group = next(one.process.pid for one in engine.servers if one.process)
        yield lambda: turn_of(engine, requests, group)


def turn_of(engine: SGLangSampler, requests: Sequence[Request], group: int) -> Cost:
    """Sample once, and return wall seconds and the CPU seconds of server and client."""
    Call(engine.servers[0].url, "/flush_cache", 60, {})
    before, clock, own = processor_seconds(group), time.perf_counter(), time.process_time()
    engine.generate(requests, SAMPLING)
    wall, own = time.perf_counter() - clock, time.process_time() - own
    return Cost(wall, processor_seconds(group) - before + own)


def measure(hidden: int, python: str, rounds: int) -> list[Measured]:
    """Measure all three engines, interleaved."""
    config = configuration(hidden, python, "deterministic")
    prepared = prepare(config, Silent())
    prompts = sorted(prepared.task.prompt_ids.values())
    requests = [Request(prompts[i * 7 % len(prompts)], i) for i in range(PROMPTS)]
    completions: list[Completion] = []

    def built_in() -> Cost:
        def work() -> None:
            completions[:] = prepared.sampler.generate(requests, SAMPLING)

        return timing.cost_of(work)

    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        candidates = {BUILT_IN: built_in}
        for numerics in ("deterministic", "stock"):
            own = configuration(hidden, python, numerics)
            turn = stack.enter_context(server(own, requests, Path(folder) / numerics))
            candidates[f"SGLang, {numerics}"] = turn
        costs = timing.interleaved(candidates, rounds)
    tokens = sum(len(c.response_ids) for c in completions)
    return timing.compared(QUESTION, f"4 x {hidden}", 1, tokens, costs, BUILT_IN)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="The built-in engine, SGLang with the plugin and stock SGLang.")
    parser.add_argument("--python", required=True, help="interpreter of an environment made by .ci/server.sh")
    parser.add_argument("--hidden", type=int, nargs="+", default=[128, 896])
    timing.add_options(parser, rounds=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for hidden in arguments.hidden for row in measure(hidden, arguments.python, arguments.rounds)]
    timing.report(rows, arguments.json)


if __name__ == "__main__":
    main()
