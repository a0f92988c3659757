"""Inputs and outputs of every module of a policy, per token: in cached decoding and in the training forward."""

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
from ppo_repro.numerics.families import MIXTURES, head_of, trunk_of
from ppo_repro.numerics.layers.experts import ExactMixture
from ppo_repro.numerics.token_statistics import expand_kept, token_statistics
from ppo_repro.rollout.engine import Completion, Request, Sampling

STRIDE = 1 << 32  # a token's key is sequence * STRIDE + position


@dataclass(frozen=True)
class Subject:
    """A policy in one mode, and responses sampled from it."""

    policy: PreTrainedModel
    mode: str
    max_context: int
    requests: tuple[Request, ...]
    completions: tuple[Completion, ...]
    sampling: Sampling


@dataclass
class Rows:
    """The rows [n, width] that one module has computed so far."""

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
TokenGrid = Callable[[], tuple[Tensor, Tensor]]


def modules_of(policy: PreTrainedModel) -> dict[str, nn.Module]:
    """Every module inside the trunk but the parts of a mixture of experts, whose rows are not tokens; and the head."""
    trunk, head = trunk_of(policy), head_of(policy)
    inside = {id(module) for module in trunk.modules()} - {id(trunk)}
    named = {name: m for name, m in policy.named_modules() if id(m) in inside or m is head}
    mixtures = tuple(f"{n}." for n, m in named.items() if isinstance(m, ExactMixture) or type(m) in MIXTURES)
    return {n: m for n, m in named.items() if not isinstance(m, nn.ModuleList) and not n.startswith(mixtures)}


def _input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The first tensor among the arguments of a module."""
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


def _rows(x: Tensor, valid: Tensor) -> Tensor:
    """The valid rows [n, width] of a tensor [R, L, ..], or [1, L, ..] that holds for all R."""
    return x.detach().expand(*valid.shape, *x.shape[2:])[valid].reshape(int(valid.sum()), -1)


def _kept(x: Tensor) -> Tensor:
    """A copy on the CPU."""
    return x.detach().to("cpu", copy=True)


def tensors_of(out: Any) -> list[Tensor]:
    """The tensors among a module's output, which is a tensor or a tuple."""
    return [out] if isinstance(out, Tensor) else [x for x in out if isinstance(x, Tensor)]


@contextmanager
def recording(policy: PreTrainedModel, tokens: TokenGrid, head_keys: Callable[[], Tensor]) -> Iterator[dict[str, Rows]]:
    """Record inputs and outputs of every module while the body runs."""
    recorded: dict[str, Rows] = {}
    head = head_of(policy)

    def add_hook(name: str, module: nn.Module) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            rows = recorded.setdefault(name, Rows())
            x = _input(args, kwargs)
            if module is head:
                keys, inputs, outputs = head_keys(), x, out
            else:
                sequences, positions = tokens()
                valid = positions >= 0
                keys = (sequences * STRIDE + positions)[valid]
                inputs = _rows(x if x.dim() > 1 else x[None], valid)
                outputs = torch.cat([_rows(y, valid) for y in tensors_of(out)], 1)
            rows.keys.append(keys)
            rows.inputs.append(_kept(inputs))
            rows.outputs.append(_kept(outputs))

        return module.register_forward_hook(hook, with_kwargs=True)

    handles = [add_hook(name, module) for name, module in modules_of(policy).items()]
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


def _in_token_order(recorded: dict[str, Rows], logprobs: Tensor) -> Captured:
    inputs, outputs = {}, {}
    for name, rows in recorded.items():
        order = torch.cat(rows.keys).argsort()
        inputs[name], outputs[name] = torch.cat(rows.inputs)[order], torch.cat(rows.outputs)[order]
    return Captured(inputs, outputs, logprobs)


@torch.no_grad()
def decoded(s: Subject) -> Captured:
    """The sampler's path: prefill, then one token at a time with the cache."""
    engine = Replay(s.policy, s.mode, s.max_context, len(s.requests), s.completions)

    def last_keys() -> Tensor:
        return engine.sequences[:, 0] * STRIDE + engine.positions.amax(1)

    with recording(s.policy, lambda: (engine.sequences, engine.positions), last_keys) as recorded:
        logprobs = engine.logprobs(s.requests, s.sampling)
    return _in_token_order(recorded, logprobs)


def batch_of(requests: Sequence[Request], completions: Sequence[Completion], padding: str) -> TokenBatch:
    """The sequences laid out for a training forward."""
    return lay_out([r.prompt_ids for r in requests], [c.response_ids for c in completions], padding)


def scored(
    policy: PreTrainedModel, mode: str, batch: TokenBatch, completions: Sequence[Completion], temperature: float
) -> Tensor:
    """Log-probs [n] float32 of the training forward."""
    logits = policy_logits(policy, batch)
    eligible = expand_kept(torch.cat([c.kept_tokens for c in completions]), logits.shape[-1], logits.device)
    return token_statistics(logits, batch.targets, temperature, eligible, mode)[0].cpu()


def token_grid(s: Subject) -> tuple[Tensor, Tensor]:
    """Sequences and positions [R, L] of right-padded rows, position -1 for padding."""
    pairs = zip(s.requests, s.completions, strict=True)
    lengths = torch.tensor([len(r.prompt_ids) + len(c.response_ids) - 1 for r, c in pairs])[:, None]
    columns = torch.arange(int(lengths.max())).expand(len(lengths), -1)
    return torch.arange(len(lengths))[:, None].expand_as(columns), torch.where(columns < lengths, columns, -1)


@torch.no_grad()
def trained(s: Subject, trainer: PreTrainedModel) -> Captured:
    """The trainer's path, computed by `trainer`: one forward over all sequences, padded on the right."""
    batch = batch_of(s.requests, s.completions, "right")
    sequences, positions = token_grid(s)
    keys = (sequences * STRIDE + positions).flatten()[batch.predictors]
    with recording(trainer, lambda: (sequences, positions), lambda: keys) as recorded:
        logprobs = scored(trainer, s.mode, batch, s.completions, s.sampling.temperature)
    return _in_token_order(recorded, logprobs)


@torch.no_grad()
def patched(s: Subject, trainer: PreTrainedModel, name: str, rows: Tensor) -> Tensor:
    """Log-probs of the trainer's path with the output of the module `name` replaced by `rows` [n, width]."""
    batch = batch_of(s.requests, s.completions, "right")
    valid = token_grid(s)[1] >= 0
    module = modules_of(trainer)[name]

    def replace(_: nn.Module, __: Any, out: Any) -> Any:
        remaining, replaced = rows.to(tensors_of(out)[0].device), list[Tensor]()
        if module is head_of(trainer):
            return remaining
        for x in tensors_of(out):
            width = x[0, 0].numel()
            full = x.expand(*valid.shape, *x.shape[2:]).clone()
            full[valid] = remaining[:, :width].reshape(-1, *x.shape[2:])
            remaining = remaining[:, width:]
            replaced.append(full)
        return replaced[0] if isinstance(out, Tensor) else (*replaced, *out[len(replaced) :])

    handle = module.register_forward_hook(replace)
    try:
        return scored(trainer, s.mode, batch, s.completions, s.sampling.temperature)
    finally:
        handle.remove()
