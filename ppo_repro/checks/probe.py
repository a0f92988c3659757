"""Check every promise on this machine, for one model and configuration.

Each promise is checked twice. In deterministic numerics no bit may differ. Native numerics are the negative control:
cached decoding and the full forward pass must differ there, or the check could not find a difference at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import pandas as pd
import torch
from torch import Tensor

from ppo_repro.base.mode import MODES, Mode, is_deterministic_mode
from ppo_repro.base.seeding import sample_seed
from ppo_repro.base.watcher import Silent
from ppo_repro.config.layout import LayoutConfig
from ppo_repro.config.run import RunConfig, TinyModel
from ppo_repro.config.tasks import TrainedRewardModel
from ppo_repro.models.batches import TokenBatch, lay_out
from ppo_repro.models.networks import checkpoint_gradients, policy_logits, value_predictions
from ppo_repro.numerics import library
from ppo_repro.numerics.adamw import AdamWSettings
from ppo_repro.numerics.families import trunk_of
from ppo_repro.numerics.optimizer import SLOTS, Optimizer
from ppo_repro.numerics.sequences import slots_of
from ppo_repro.numerics.token_statistics import expand_kept, token_statistics
from ppo_repro.records.columns import unequal_bits
from ppo_repro.records.folder import Accuracy
from ppo_repro.rollout.engine import Completion, Request
from ppo_repro.rollout.torch_engine import TorchEngine
from ppo_repro.runs.accuracy import policy_accuracy
from ppo_repro.runs.prepare import Prepared, prepare
from ppo_repro.stages.rollout import require_undisturbed, sampling_of

SEQUENCES = 24
MICRO_BATCHES = (1, 5)
CONTROL = "decode = full forward"
Progress = Callable[[str, int, int], None]  # the finished check, its number, the number of all checks
# promise, condition, and a function that returns the numbers compared and the numbers that differ in any bit
Check = tuple[str, str, Callable[[], tuple[int, int]]]


def plain(config: RunConfig, mode: Mode) -> RunConfig:
    """Return the configuration in a mode, with its device, the default layout, and no warm start."""
    model = config.model
    if isinstance(model, TinyModel):
        model = model.model_copy(update={"warm_start_steps": 0})
    small = {"num_pairs": 1, "pairs": None, "epochs": 1}
    terms = (t.model_copy(update=small) if isinstance(t, TrainedRewardModel) else t for t in config.reward.terms)
    reward = config.reward.model_copy(update={"terms": tuple(terms)})
    numerics = config.numerics.model_copy(update={"mode": mode})
    layout = LayoutConfig(device=config.layout.device)
    return config.model_copy(update={"model": model, "reward": reward, "numerics": numerics, "layout": layout})


@dataclass(frozen=True)
class CheckResult:
    """One promise under one condition: how many numbers were compared, and how many differ in each mode."""

    promise: str
    condition: str
    compared: int
    unequal_deterministic: int
    unequal_native: int


@dataclass(frozen=True)
class Probed:
    """Result of a probe: one row per check."""

    rows: list[CheckResult]
    accuracy: Accuracy | None  # of the deterministic log-probs; None if it was not measured


@dataclass(frozen=True)
class _SampledRun:
    """Prepared run in one mode, with its responses sampled in the default layout."""

    config: RunConfig
    prepared: Prepared
    requests: tuple[Request, ...]
    completions: tuple[Completion, ...]

    @property
    def logprobs(self) -> Tensor:
        return torch.cat([c.logprobs for c in self.completions])


def _generate(
    config: RunConfig, prepared: Prepared, requests: Sequence[Request], seats: int, chunk: int, prefix_cache: bool
) -> list[Completion]:
    policy, stop_ids, numerics = prepared.state.policy, prepared.engine.stop_ids, config.numerics
    engine = TorchEngine(policy, stop_ids, numerics.mode, numerics.max_context, seats, chunk, prefix_cache)
    return engine.generate(requests, sampling_of(config))


def _sampled_run(config: RunConfig, mode: Mode) -> _SampledRun:
    config = plain(config, mode)
    prepared = prepare(config, Silent())
    # two samples of each prompt, so that the prefix cache is used
    keys = sorted(prepared.task.prompt_ids)[: SEQUENCES // 2]
    requests = tuple(
        Request(prepared.task.prompt_ids[k], sample_seed(config.seed, 0, k, index)) for k in keys for index in (0, 1)
    )
    completions = tuple(_generate(config, prepared, requests, SEQUENCES, 0, True))
    return _SampledRun(config, prepared, requests, completions)


def _differing(a: Sequence[Completion], b: Sequence[Completion]) -> int:
    """Count tokens whose id or log-prob bits differ; if any id differs, all tokens of the response count."""
    total = 0
    for left, right in zip(a, b, strict=True):
        if left.response_ids != right.response_ids:
            total += max(len(left.response_ids), len(right.response_ids))
        else:
            total += unequal_bits(left.logprobs, right.logprobs)
    return total


def _batches(run: _SampledRun, size: int) -> Iterator[tuple[TokenBatch, Tensor]]:
    """Yield the sequences of one minibatch in batches of `size`, each with the bit sets of its kept tokens."""
    for i in range(0, len(run.requests), size):
        requests, completions = run.requests[i : i + size], run.completions[i : i + size]
        slots = slots_of(range(i, i + len(requests)), len(run.requests), SLOTS)
        batch = lay_out([r.prompt_ids for r in requests], [c.response_ids for c in completions], slots=slots)
        yield batch, torch.cat([c.kept_tokens for c in completions])


def _score(run: _SampledRun, batch: TokenBatch, kept_tokens: Tensor) -> Tensor:
    logits = policy_logits(run.prepared.state.policy, batch)
    eligible = expand_kept(kept_tokens, logits.shape[-1])
    mode, temperature = run.config.numerics.mode, run.config.rollout.temperature
    return token_statistics(logits, batch.targets, temperature, eligible, mode)[0]


@torch.no_grad()
def _forward(run: _SampledRun, size: int) -> Tensor:
    return torch.cat([_score(run, batch, kept_tokens) for batch, kept_tokens in _batches(run, size)])


@torch.no_grad()
def _values(run: _SampledRun, size: int) -> Tensor:
    value_model = run.prepared.state.value_model
    if value_model is None:
        return torch.empty(0)
    return torch.cat([value_predictions(value_model, batch) for batch, _ in _batches(run, size)])


def _weights_after_step(run: _SampledRun, size: int) -> Tensor:
    """Return all policy weights after one optimizer step on the sampled tokens, and restore the policy."""
    policy = run.prepared.state.policy
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    settings = AdamWSettings(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, max_grad_norm=1.0)
    optimizer = Optimizer(policy, settings, run.config.numerics.mode, SLOTS)

    def backward() -> None:
        for batch, kept_tokens in _batches(run, size):
            logprobs = _score(run, batch.into(optimizer.sink), kept_tokens)
            torch.autograd.backward(-logprobs, torch.full_like(logprobs, 1.0 / len(run.logprobs)))

    optimizer.step(backward)
    after = torch.cat([p.detach().reshape(-1).clone() for _, p in policy.named_parameters()]).cpu()
    with torch.no_grad():
        for name, p in policy.named_parameters():
            p.copy_(before[name])
    return after


def _with_two_threads(compute: Callable[[], Tensor]) -> Tensor:
    library.use_threads(2, torch_computes=True)
    try:
        return compute()
    finally:
        library.use_threads(1)


def _checks(run: _SampledRun) -> list[Check]:
    """Return all checks in the order of execution; the last check changes the policy."""
    forward, weights, values = _forward(run, SEQUENCES), _weights_after_step(run, SEQUENCES), _values(run, SEQUENCES)

    def resampled(seats: int, chunk: int = 0, prefix_cache: bool = True, step: int = 1) -> tuple[int, int]:
        again = _generate(run.config, run.prepared, run.requests[::step], seats, chunk, prefix_cache)[::step]
        return len(run.logprobs), _differing(run.completions, again)

    def compared(expected: Tensor, compute: Callable[[], Tensor]) -> tuple[int, int]:
        return len(expected), unequal_bits(expected, compute())

    def checkpointed() -> Tensor:
        checkpoint_gradients(trunk_of(run.prepared.state.policy))
        return _weights_after_step(run, SEQUENCES)

    whole = partial(_forward, run, SEQUENCES)
    step = partial(_weights_after_step, run, SEQUENCES)
    return [
        (CONTROL, "all at once", lambda: compared(run.logprobs, lambda: forward)),
        *(("rollout slots", str(n), partial(resampled, n)) for n in (1, 3, 16)),
        *(("prefill chunk", str(n), partial(resampled, SEQUENCES, n)) for n in (1, 3)),
        ("prefix cache", "off", lambda: resampled(SEQUENCES, prefix_cache=False)),
        ("prefix cache", "warm, 2 slots", lambda: resampled(2)),
        ("request order", "reversed, 5 slots", lambda: resampled(5, step=-1)),
        *(("forward", f"{n} a batch", partial(compared, forward, partial(_forward, run, n))) for n in MICRO_BATCHES),
        *(
            ("values", f"{n} a batch", partial(compared, values, partial(_values, run, n)))
            for n in MICRO_BATCHES
            if len(values)
        ),
        *(
            ("optimizer step", f"{n} a micro-batch", partial(compared, weights, partial(_weights_after_step, run, n)))
            for n in MICRO_BATCHES
        ),
        ("forward", "2 threads", lambda: compared(forward, partial(_with_two_threads, whole))),
        ("optimizer step", "2 threads", lambda: compared(weights, partial(_with_two_threads, step))),
        ("optimizer step", "gradient checkpointing", lambda: compared(weights, checkpointed)),
    ]


def probe(config: RunConfig, progress: Progress) -> Probed:
    """Check every promise for the model and prompts of `config`, in both modes.

    `progress` is called after every check with its name, its number from 1, and the number of all checks. Raises
    UserError if `require_undisturbed` does.
    """
    require_undisturbed(config)
    found: dict[str, list[tuple[str, str, int, int]]] = {}
    accuracy = None
    for before, mode in enumerate(MODES):
        subject = _sampled_run(config, mode)
        if is_deterministic_mode(mode):
            policy = subject.prepared.state.policy
            accuracy = policy_accuracy(subject.config, subject.prepared.task.prompt_ids, policy)
        checks, found[mode] = _checks(subject), []
        for done, (promise, condition, count) in enumerate(checks, before * len(checks) + 1):
            found[mode].append((promise, condition, *count()))
            progress(f"{mode}: {promise}, {condition}", done, len(MODES) * len(checks))
    pairs = zip(found["deterministic"], found["native"], strict=True)
    return Probed([CheckResult(*row, control[3]) for row, control in pairs], accuracy)


def failures(rows: Sequence[CheckResult]) -> list[str]:
    """Return a sentence for each promise that does not hold."""
    broken = [
        f"{r.promise} ({r.condition}): {r.unequal_deterministic} of {r.compared} differ in deterministic numerics"
        for r in rows
        if r.unequal_deterministic
    ]
    if not any(r.unequal_native for r in rows if r.promise == CONTROL):
        broken.append(f"{CONTROL}: native numerics show no difference either, so this check proves nothing here")
    return broken


def render(rows: Sequence[CheckResult]) -> str:
    """Return the rows as a text table."""
    heads = {"unequal_deterministic": "unequal, deterministic", "unequal_native": "unequal, native"}
    return str(pd.DataFrame(rows).rename(columns=heads).to_string(index=False))
