"""What every module of a policy is given and gives, token by token: in cached decoding and in the training forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo_repro.checks.replay import Replay
from ppo_repro.models.batches import TokenBatch, lay_out
from ppo_repro.models.networks import policy_logits
from ppo_repro.numerics.layers.families import head_of, trunk_of
from ppo_repro.numerics.logprobs import expand_kept, token_statistics
from ppo_repro.rollout.engine import Completion, Request, Sampling

STRIDE = 1 << 32  # a token's key is sequence * STRIDE + position


@dataclass
class Seen:
    """Rows [n, width] of one module, joined by `joined`."""

    keys: list[Tensor] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Captured:
    """Inputs and outputs [n, width] of each module in the order of execution, tokens in order; and the log-probs."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    logprobs: Tensor


# sequences and positions [R, L] of the pass in progress, position -1 for padding
Place = Callable[[], tuple[Tensor, Tensor]]


def modules_of(policy: PreTrainedModel) -> dict[str, nn.Module]:
    """Every module inside the trunk, and the head."""
    trunk, head = trunk_of(policy), head_of(policy)
    inside = {id(module) for module in trunk.modules()} - {id(trunk)}
    named = {name: m for name, m in policy.named_modules() if id(m) in inside or m is head}
    return {name: m for name, m in named.items() if not isinstance(m, nn.ModuleList)}


def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The first tensor that a module is called with."""
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


def _rows(x: Tensor, valid: Tensor) -> Tensor:
    """[n, width] of a tensor [R, L, ..], or [1, L, ..] for all rows."""
    return x.detach().expand(*valid.shape, *x.shape[2:])[valid].reshape(int(valid.sum()), -1)


def tensors_of(out: Any) -> list[Tensor]:
    """The tensors that a module gives: itself, or those of its tuple."""
    return [out] if isinstance(out, Tensor) else [x for x in out if isinstance(x, Tensor)]


@contextmanager
def watched(policy: PreTrainedModel, place: Place, head_keys: Callable[[], Tensor]) -> Iterator[dict[str, Seen]]:
    """Record every module while the body runs."""
    seen: dict[str, Seen] = {}
    head = head_of(policy)

    def watch(name: str, module: nn.Module) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            entry = seen.setdefault(name, Seen())
            given = _given(args, kwargs)
            if module is head:
                keys, inputs, outputs = head_keys(), given, out
            else:
                sequences, positions = place()
                valid = positions >= 0
                keys = (sequences * STRIDE + positions)[valid]
                inputs = _rows(given if given.dim() > 1 else given[None], valid)
                outputs = torch.cat([_rows(x, valid) for x in tensors_of(out)], 1)
            entry.keys.append(keys)
            entry.inputs.append(inputs.detach().clone())
            entry.outputs.append(outputs.detach().clone())

        return module.register_forward_hook(hook, with_kwargs=True)

    handles = [watch(name, module) for name, module in modules_of(policy).items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _joined(seen: dict[str, Seen], logprobs: Tensor) -> Captured:
    inputs, outputs = {}, {}
    for name, entry in seen.items():
        order = torch.cat(entry.keys).argsort()
        inputs[name], outputs[name] = torch.cat(entry.inputs)[order], torch.cat(entry.outputs)[order]
    return Captured(inputs, outputs, logprobs)


@torch.no_grad()
def decoded(
    policy: PreTrainedModel,
    mode: str,
    max_context: int,
    requests: Sequence[Request],
    completions: Sequence[Completion],
    sampling: Sampling,
) -> Captured:
    """The sampler's path: prefill, then one token at a time with the cache."""
    engine = Replay(policy, mode, max_context, len(requests), completions)

    def last_keys() -> Tensor:
        return engine.sequences[:, 0] * STRIDE + engine.positions.amax(1)

    with watched(policy, lambda: (engine.sequences, engine.positions), last_keys) as seen:
        logprobs = engine.logprobs(requests, sampling)
    return _joined(seen, logprobs)


def batch_of(requests: Sequence[Request], completions: Sequence[Completion], padding: str) -> TokenBatch:
    """The sequences laid out for a training forward."""
    return lay_out([r.prompt_ids for r in requests], [c.response_ids for c in completions], padding)


def scored(
    policy: PreTrainedModel, mode: str, batch: TokenBatch, completions: Sequence[Completion], temperature: float
) -> Tensor:
    """Log-probs [n] float32 of the training forward."""
    logits = policy_logits(policy, batch)
    eligible = expand_kept(torch.cat([c.kept_tokens for c in completions]), logits.shape[-1])
    return token_statistics(logits, batch.targets, temperature, eligible, mode)[0]


def places_of(requests: Sequence[Request], completions: Sequence[Completion]) -> tuple[Tensor, Tensor]:
    """Sequences and positions [R, L] of right-padded rows, position -1 for padding."""
    pairs = zip(requests, completions, strict=True)
    lengths = torch.tensor([len(r.prompt_ids) + len(c.response_ids) - 1 for r, c in pairs])[:, None]
    columns = torch.arange(int(lengths.max())).expand(len(lengths), -1)
    return torch.arange(len(lengths))[:, None].expand_as(columns), torch.where(columns < lengths, columns, -1)


@torch.no_grad()
def trained(
    policy: PreTrainedModel,
    mode: str,
    requests: Sequence[Request],
    completions: Sequence[Completion],
    temperature: float,
) -> Captured:
    """The trainer's path: one forward over all sequences, padded on the right."""
    batch = batch_of(requests, completions, "right")
    sequences, positions = places_of(requests, completions)
    keys = (sequences * STRIDE + positions).flatten()[batch.predictors]
    with watched(policy, lambda: (sequences, positions), lambda: keys) as seen:
        logprobs = scored(policy, mode, batch, completions, temperature)
    return _joined(seen, logprobs)


@torch.no_grad()
def patched(
    policy: PreTrainedModel,
    mode: str,
    requests: Sequence[Request],
    completions: Sequence[Completion],
    temperature: float,
    name: str,
    rows: Tensor,
) -> Tensor:
    """Log-probs of the training forward with `rows` [n, width] in place of what the module `name` gives."""
    batch = batch_of(requests, completions, "right")
    valid = places_of(requests, completions)[1] >= 0
    module = modules_of(policy)[name]

    def replace(_: nn.Module, __: Any, out: Any) -> Any:
        if module is head_of(policy):
            return rows
        parts, made = rows, []
        for x in tensors_of(out):
            width = x[0, 0].numel()
            full = x.expand(*valid.shape, *x.shape[2:]).clone()
            full[valid] = parts[:, :width].reshape(-1, *x.shape[2:])
            parts = parts[:, width:]
            made.append(full)
        return made[0] if isinstance(out, Tensor) else (*made, *out[len(made) :])

    handle = module.register_forward_hook(replace)
    try:
        return scored(policy, mode, batch, completions, temperature)
    finally:
        handle.remove()
