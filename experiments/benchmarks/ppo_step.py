"""Compare a whole PPO step with TRL's PPOTrainer: rollout, scoring, advantages, 4 epochs of minibatches, optimizers.

`python -m experiments.benchmarks.ppo_step --peers DIR` makes an environment for `trl` in DIR (later calls use it
again), starts it as a process of its own and requests a step from each side in turn: TRL, both precisions of
deterministic numerics, native numerics. All begin with the same weights and prompts: 32 prompts of 16 tokens, 64
response tokens, 4 epochs of 4 minibatches, a separate value model, float32.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from experiments.benchmarks import timing, workload
from experiments.benchmarks.peers import environment, process
from experiments.benchmarks.timing import Cost, Measured
from experiments.benchmarks.workload import CONTEXT, EPOCHS, MINIBATCHES, PROMPT, RESPONSE, SEQUENCES, SIZES
from ppo_repro.base.ranks import ALONE, Ranks
from ppo_repro.base.watcher import Silent
from ppo_repro.buffers import Iteration
from ppo_repro.config.files import load_config
from ppo_repro.config.inputs import gather
from ppo_repro.config.kinds import LANGUAGE
from ppo_repro.config.run import RunConfig
from ppo_repro.loop import ppo_iterations
from ppo_repro.numerics import library
from ppo_repro.records import writer
from ppo_repro.records.columns import arrow_tables
from ppo_repro.runs.prepare import Prepared, prepare
from ppo_repro.sampling.built_in import BuiltInSampler

QUESTION, PEER = "PPO step", "TRL PPOTrainer"
CONFIG = Path(__file__).with_name("ppo_step.yaml")
PROMPTS = 256  # in the folder; every iteration takes SEQUENCES of them
SCRIPT = Path(__file__).parent / "peers" / "trl_ppo.py"
SIDES = {
    "highest": ("numerics.precision=highest",),
    "high": ("numerics.precision=high",),
    "native": ("numerics.mode=native",),
}


def config_of(folder: Path, side: str) -> RunConfig:
    """Return the configuration of the measured run, with the model and prompts in `folder`."""
    return load_config(
        CONFIG,
        [
            f"model.path={folder}",
            f"task.path={folder / 'prompts.jsonl'}",
            f"rollout.prompts_per_iteration={SEQUENCES}",
            f"rollout.max_response_tokens={RESPONSE}",
            f"ppo.epochs={EPOCHS}",
            f"ppo.minibatch_size={SEQUENCES // MINIBATCHES}",
            f"numerics.max_context={CONTEXT}",
            *SIDES[side],
        ],
    )


def without_stop(config: RunConfig, prepared: Prepared) -> Prepared:
    """Return the run with a sampler that no token stops, so that every response has the full length."""
    sampler = BuiltInSampler(
        prepared.state.policy,
        frozenset(),
        config.numerics.mode,
        config.numerics.max_context,
        config.layout.rollout_slots,
        config.layout.prefill_chunk,
    )
    return replace(prepared, sampler=sampler)


@dataclass(frozen=True)
class Own:
    """Our side of the comparison: a run that computes an iteration on request and writes its records."""

    config: RunConfig
    iterations: Iterator[Iteration]
    run_dir: Path | None  # None in a process that does not record

    def step(self, threads: int) -> Cost:
        """Compute one iteration on `threads` threads, write its records, and return its cost."""
        library.use_threads(threads, self.config.numerics.mode == "native")
        return timing.cost_of(self._step)

    def _step(self) -> None:
        item = next(self.iterations)
        assert int(item.rollout.lengths.sum()) == SEQUENCES * RESPONSE
        if self.run_dir is not None:
            writer.RunWriter(self.run_dir).append(item.index, arrow_tables(item, self.config))


def own(folder: Path, side: str = "highest", ranks: Ranks = ALONE) -> Own:
    """Return a run, one of SIDES, before its first iteration; the first of several processes records."""
    config = config_of(folder, side)
    prepared = without_stop(config, prepare(config, Silent(), ranks=ranks))
    run_dir = folder / f"run-{side}" if ranks.is_first else None
    if run_dir is not None:
        writer.publish_run(writer.lay_out_run(run_dir, gather(config), {}, config.digest(), LANGUAGE), run_dir)
    iterations = ppo_iterations(config, prepared.task, prepared.state, prepared.sampler, ranks)
    return Own(config, iterations, run_dir)


@contextmanager
def trl(python: Path, folder: Path) -> Iterator[Callable[[int], Cost]]:
    """Start a TRL process, and yield the function that requests one step on a number of threads."""
    numbers = (PROMPT, RESPONSE, SEQUENCES, EPOCHS, MINIBATCHES)
    with process.started([str(python), str(SCRIPT), str(folder), *map(str, numbers)], folder / "trl.log") as peer:
        yield peer.step


def measure(
    python: Path, sizes: Sequence[str], threads: Sequence[int], rounds: int, sides: Sequence[str] = tuple(SIDES)
) -> list[Measured]:
    """Measure every size with every number of threads; peer and runs of a size continue through all of them."""
    rows: list[Measured] = []
    for name in sizes:
        size = SIZES[name]
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            workload.write_folder(size, folder, PROMPTS)
            runs = {side: own(folder, side) for side in sides}
            with trl(python, folder) as peer:
                for count in threads:
                    candidates: dict[str, Callable[[], Cost]] = {PEER: partial(peer, count)}
                    for side, run in runs.items():
                        candidates[side] = partial(run.step, count)
                    costs = timing.interleaved(candidates, rounds)
                    rows += timing.compared(QUESTION, size.name, count, SEQUENCES * RESPONSE, costs, PEER)
    return rows


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="A whole PPO step here and in TRL 1.12.0.")
    parser.add_argument("--peers", type=Path, required=True, help="folder for the environment of the peer")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["small", "large"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    timing.add_options(parser, rounds=3)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=tuple(SIDES))
    arguments = parser.parse_args()
    python = environment.make(arguments.peers / "trl")
    rows = measure(python, arguments.sizes, arguments.threads, arguments.rounds, arguments.sides)
    timing.report(rows, arguments.json)


if __name__ == "__main__":
    main()
