"""Read the samples of recorded iterations, for a run that is resumed or repeated.

The user's class promises no bits, so it cannot sample the same tokens again. The run reads the samples from the
records, and computes again everything that follows from the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ppo_repro.base.errors import UserError
from ppo_repro.base.ranks import Ranks
from ppo_repro.models.state import TrainState
from ppo_repro.records import reader
from ppo_repro.sampler import Completion, Request, Sampler, Sampling


@dataclass(frozen=True)
class Recorded:
    """The recorded iterations of a run, from 0."""

    run_dir: Path
    iterations: int


@dataclass(frozen=True)
class RecordedSampler:
    """Returns the recorded samples of recorded iterations, and samples with `sampler` after them."""

    recorded: Recorded
    state: TrainState  # has the number of the present iteration
    sampler: Sampler
    ranks: Ranks  # the first process reads the records

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        if sampling.greedy or self.state.iteration >= self.recorded.iterations:
            return self.sampler.generate(requests, sampling)
        by_seed = self.ranks.first(_recorded_completions, self.recorded.run_dir, self.state.iteration)
        try:
            return [by_seed[request.seed, request.prompt_ids] for request in requests]
        except KeyError as error:
            where = f"{self.recorded.run_dir}: iteration {self.state.iteration}"
            raise UserError(f"{where} has no response to a prompt of this run; restore its prompts") from error


def _recorded_completions(run_dir: Path, iteration: int) -> dict[tuple[int, tuple[int, ...]], Completion]:
    """Return the completions of an iteration by seed and prompt."""
    columns = ["seed", "prompt_ids", "response_ids", "finish_reason"]
    rows = reader.read_sequences(run_dir, iterations=[iteration], columns=columns, allow_incomplete=True)
    tokens = reader.read_tokens(run_dir, iterations=[iteration], columns=["rollout_logprobs"], allow_incomplete=True)
    logprobs, start, by_seed = tokens["rollout_logprobs"].to_numpy(), 0, {}
    for seed, prompt_ids, ids, reason in zip(*(rows[name] for name in columns), strict=True):
        end = start + len(ids)
        by_seed[seed, tuple(prompt_ids.tolist())] = Completion.uncut(ids.tolist(), logprobs[start:end].tolist(), reason)
        start = end
    return by_seed
