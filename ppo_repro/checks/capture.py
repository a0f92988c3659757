"""What a policy computes per token on its two paths: cached decoding of known responses, and the training forward.

In native numerics these are inputs and outputs of every module of the trunk, in deterministic numerics the embeddings,
the outputs of the decoder layers and those of the last norm: the C kernels compute a layer as one. Then the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo_repro.config.run import RunConfig, TinyModel
from ppo_repro.config.section import LayoutConfig
from ppo_repro.config.tasks import TrainedRewardModel
from ppo_repro.models.batches import TokenBatch, lay_out
from ppo_repro.models.networks import policy_logits
from ppo_repro.numerics.families import MIXTURES, trunk_of
from ppo_repro.numerics.native import NativeNetwork, SlotCache
from ppo_repro.numerics.network import Cache, network_of
from ppo_repro.numerics.rows import Ragged, index
from ppo_repro.numerics.token_statistics import expand_kept, token_statistics
from ppo_repro.rollout.engine import Completion, Dialogue, Request, Sampling
from ppo_repro.rollout.torch_engine import Drawn, PrefixIndex, TorchEngine, _Active

Mode = Literal["deterministic", "native"]
MODES: tuple[Mode, ...] = ("deterministic", "native")
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


@dataclass(frozen=True)
class Captured:
    """Inputs and outputs [N, width] of each operation of the trunk in the order of execution, and what follows it."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    hidden: Tensor  # [n, H] of the n positions that predict response tokens
    logits: Tensor  # [n, V]
    logprobs: Tensor  # [n]


# sequences and positions [R, L] of the pass in progress, position -1 for padding
TokenGrid = Callable[[], tuple[Tensor, Tensor]]
# by operation, for each pass: keys [n] of the tokens, inputs and outputs [n, width]
Recorded = dict[str, list[tuple[Tensor, Tensor, Tensor]]]


def plain(config: RunConfig, mode: Mode) -> RunConfig:
    """The configuration in a mode and the plainest layout, without training before: promises hold for any weights."""
    model = config.model
    if isinstance(model, TinyModel):
        model = model.model_copy(update={"warm_start_steps": 0})
    small = {"num_pairs": 1, "pairs": None, "epochs": 1}
    terms = (t.model_copy(update=small) if isinstance(t, TrainedRewardModel) else t for t in config.reward.terms)
    reward = config.reward.model_copy(update={"terms": tuple(terms)})
    numerics = config.numerics.model_copy(update={"mode": mode})
    return config.model_copy(update={"model": model, "reward": reward, "numerics": numerics, "layout": LayoutConfig()})


def modules_of(policy: PreTrainedModel) -> dict[str, nn.Module]:
    """Every module inside the trunk but the parts of a mixture of experts, whose rows are not tokens."""
    trunk = trunk_of(policy)
    inside = {id(module) for module in trunk.modules()} - {id(trunk)}
    named = {name: m for name, m in policy.named_modules() if id(m) in inside}
    mixtures = tuple(f"{n}." for n, m in named.items() if type(m) in MIXTURES)
    return {n: m for n, m in named.items() if not isinstance(m, nn.ModuleList) and not n.startswith(mixtures)}


def _rows(x: Tensor, valid: Tensor) -> Tensor:
    """The valid rows [n, width] of a tensor [R, L, ..], or [1, L, ..] that holds for all R."""
    return x.detach().expand(*valid.shape, *x.shape[2:])[valid].reshape(int(valid.sum()), -1)


def tensors_of(out: Any) -> list[Tensor]:
    """The tensors among a module's output, which is a tensor or a tuple."""
    return [out] if isinstance(out, Tensor) else [x for x in out if isinstance(x, Tensor)]


@contextmanager
def recording(policy: PreTrainedModel, tokens: TokenGrid) -> Iterator[Recorded]:
    """Record what the trunk computes while the body runs."""
    recorded: Recorded = {}
    network = network_of(trunk_of(policy))

    def add(name: str, inputs: Tensor, outputs: Tensor) -> None:
        sequences, positions = tokens()
        keys = (sequences * STRIDE + positions)[positions >= 0]
        rows = (x.detach().to("cpu", copy=True) for x in (keys, inputs, outputs))
        recorded.setdefault(name, []).append(tuple(rows))  # type: ignore[arg-type]

    def hook_of(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            x = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
            valid = tokens()[1] >= 0
            outputs = torch.cat([_rows(y, valid) for y in tensors_of(out)], 1)
            add(name, _rows(x if x.dim() > 1 else x[None], valid), outputs)

        return hook

    def watch(batch: Ragged, layers: Tensor, hidden: Tensor) -> None:
        inputs = torch.from_numpy(batch.ids)[:, None]
        names = ("embeddings", *(f"layers.{i}" for i in range(len(layers) - 1)), "last_norm")
        for name, outputs in zip(names, (*layers, hidden), strict=True):
            add(name, inputs, outputs)
            inputs = outputs

    if not isinstance(network, NativeNetwork):
        network.watch = watch
        try:
            yield recorded
        finally:
            network.watch = None
        return
    modules = modules_of(policy).items()
    handles = [module.register_forward_hook(hook_of(name), with_kwargs=True) for name, module in modules]
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


class Replay(TorchEngine):
    """Decodes `completions` again; `sequences` and `positions` [R, L] are those of the pass in progress."""

    def __init__(
        self, policy: PreTrainedModel, mode: str, max_context: int, slots: int, completions: Sequence[Completion]
    ) -> None:
        # no token ends a response: it ends where the known one does
        super().__init__(policy, frozenset(), mode, max_context, slots, prefill_chunk=0, prefix_cache=False)
        self.completions = completions
        self.sequences, self.positions = torch.empty(0), torch.empty(0)
        self.logits: list[list[Tensor]] = [[] for _ in completions]  # [V] of each token
        self._owner: dict[int, int] = {}

    def _prefill(self, cache: Cache | SlotCache, prefixes: PrefixIndex, turn: list[_Active]) -> Tensor:
        self._owner.update({item.slot: item.index for item in turn})
        return super()._prefill(cache, prefixes, turn)

    def _forward(
        self, cache: Cache | SlotCache, slots: list[int], pieces: Sequence[tuple[int, ...]], starts: list[int]
    ) -> Tensor:
        width = max(len(piece) for piece in pieces)
        lengths = torch.tensor([len(piece) for piece in pieces])[:, None]
        columns = torch.arange(width)
        self.sequences = torch.tensor([self._owner[slot] for slot in slots])[:, None].expand(-1, width)
        self.positions = torch.where(columns < lengths, torch.tensor(starts)[:, None] + columns, -1)
        return super()._forward(cache, slots, pieces, starts)

    def _sample(self, turn: list[_Active], found: Tensor, sampling: Sampling) -> None:
        next_tokens = [(self.completions[item.index], len(item.tokens)) for item in turn]
        tokens = torch.tensor([c.response_ids[position] for c, position in next_tokens])
        kept_tokens = torch.stack([c.kept_tokens[position] for c, position in next_tokens])
        found = found.to("cpu", torch.float32)
        eligible = expand_kept(kept_tokens, found.shape[-1])
        logprobs, _ = token_statistics(found, tokens, sampling.temperature, eligible, self.mode)
        mass = torch.stack([c.log_kept_mass[position] for c, position in next_tokens])
        drawn = Drawn(*(x.numpy() for x in (logprobs, mass, kept_tokens)))
        for row, (item, token) in enumerate(zip(turn, tokens.tolist(), strict=True)):
            item.add(token, drawn, row)
            self.logits[item.index].append(found[row])

    def _finish_reason(self, item: _Active, sampling: Sampling, dialogue: Dialogue | None) -> str:
        known = self.completions[item.index]
        return known.finish_reason if len(item.tokens) == len(known.response_ids) else ""


def _captured(s: Subject, recorded: Recorded, logits: Tensor, logprobs: Tensor) -> Captured:
    """The rows in the order of tokens."""
    inputs, outputs = {}, {}
    for name, passes in recorded.items():
        keys, inputs[name], outputs[name] = (torch.cat(rows) for rows in zip(*passes, strict=True))
        order = keys.argsort()
        inputs[name], outputs[name] = inputs[name][order], outputs[name][order]
    hidden = list(outputs.values())[-1][index(batch_of(s).predictors)]
    return Captured(inputs, outputs, hidden, logits.cpu(), logprobs)


@torch.no_grad()
def decoded(s: Subject) -> Captured:
    """The sampler's path: prefill, then one token at a time with the cache."""
    engine = Replay(s.policy, s.mode, s.max_context, len(s.requests), s.completions)
    with recording(s.policy, lambda: (engine.sequences, engine.positions)) as recorded:
        logprobs = torch.cat([c.logprobs for c in engine.generate(s.requests, s.sampling)])
    return _captured(s, recorded, torch.stack([row for rows in engine.logits for row in rows]), logprobs)


def batch_of(s: Subject) -> TokenBatch:
    """The sequences laid out for a training forward."""
    return lay_out([r.prompt_ids for r in s.requests], [c.response_ids for c in s.completions])


def scored(logits: Tensor, mode: str, completions: Sequence[Completion], temperature: float) -> Tensor:
    """Log-probs [n] float32 of the responses from their logits [n, V]."""
    eligible = expand_kept(torch.cat([c.kept_tokens for c in completions]), logits.shape[-1])
    targets = torch.tensor([token for c in completions for token in c.response_ids])
    return token_statistics(logits.cpu(), targets, temperature, eligible, mode)[0]


def token_grid(s: Subject) -> tuple[Tensor, Tensor]:
    """Sequences and positions [R, L] of right-padded rows, position -1 for padding."""
    pairs = zip(s.requests, s.completions, strict=True)
    lengths = torch.tensor([len(r.prompt_ids) + len(c.response_ids) - 1 for r, c in pairs])[:, None]
    columns = torch.arange(int(lengths.max())).expand(len(lengths), -1)
    return torch.arange(len(lengths))[:, None].expand_as(columns), torch.where(columns < lengths, columns, -1)


@torch.no_grad()
def trained(s: Subject, trainer: PreTrainedModel) -> Captured:
    """The trainer's path, computed by `trainer`: one forward over all sequences, padded on the right."""
    with recording(trainer, lambda: token_grid(s)) as recorded:
        logits = policy_logits(trainer, batch_of(s))
    return _captured(s, recorded, logits, scored(logits, s.mode, s.completions, s.sampling.temperature))


@torch.no_grad()
def patched(s: Subject, trainer: PreTrainedModel, name: str, rows: Tensor) -> Tensor:
    """Log-probs of the trainer's path with the output of the module `name` replaced by `rows` [N, width]; native."""
    valid = token_grid(s)[1] >= 0

    def replace(_: nn.Module, __: Any, out: Any) -> Any:
        remaining, replaced = rows.to(tensors_of(out)[0].device), list[Tensor]()
        for x in tensors_of(out):
            width = x[0, 0].numel()
            full = x.expand(*valid.shape, *x.shape[2:]).clone()
            full[valid] = remaining[:, :width].reshape(-1, *x.shape[2:])
            remaining = remaining[:, width:]
            replaced.append(full)
        return replaced[0] if isinstance(out, Tensor) else (*replaced, *out[len(replaced) :])

    handle = modules_of(trainer)[name].register_forward_hook(replace)
    try:
        logits = policy_logits(trainer, batch_of(s))
        return scored(logits, s.mode, s.completions, s.sampling.temperature)
    finally:
        handle.remove()
