"""Find the operation that makes sampler and trainer differ, for the model, prompts and sampling of a run.

The sampler decodes with a cache; the trainer computes one forward pass over the same token ids. The origin of a
difference is the first operation with equal input bits and unequal output bits on the two paths: later operations only
pass a difference on. In native numerics an operation is a module of the trunk; in deterministic numerics it is the
embeddings, a decoder layer (which the C kernels compute as one) or the last norm. Head and log-probs follow.
"""

from __future__ import annotations

import math
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo_repro.base.errors import UserError
from ppo_repro.base.files import atomic_write, check_sums
from ppo_repro.base.mode import MODES, Mode
from ppo_repro.base.seeding import sample_seed
from ppo_repro.base.watcher import Silent
from ppo_repro.checks.probe import plain
from ppo_repro.config.files import load_config
from ppo_repro.config.run import RunConfig
from ppo_repro.models.batches import TokenBatch, lay_out
from ppo_repro.models.networks import policy_logits
from ppo_repro.numerics.families import MIXTURES, head_of, trunk_of
from ppo_repro.numerics.native import NativeNetwork
from ppo_repro.numerics.network import network_of
from ppo_repro.numerics.sequences import Ragged, index
from ppo_repro.numerics.token_statistics import expand_kept, token_statistics
from ppo_repro.records.folder import FINAL, UNEQUAL, UNEQUAL_TOKENS, load_recorded_config
from ppo_repro.rollout.engine import Completion, Request, Sampling
from ppo_repro.rollout.torch_engine import TorchEngine
from ppo_repro.runs.prepare import prepare
from ppo_repro.stages.rollout import choose_prompts, require_undisturbed, sampling_of

SEQUENCES = 16  # all outputs for all their tokens are in memory at once, for both paths
STRIDE = 1 << 32  # a token's key is sequence * STRIDE + position
# by operation, in the order of execution: inputs and outputs [n, width]
Captured = dict[str, tuple[Tensor, Tensor]]
Recorded = dict[str, list[tuple[Tensor, Tensor, Tensor]]]  # for each pass: keys [n] of the tokens, inputs and outputs
# sequences and positions [R, L] of the pass in progress, position -1 for padding
TokenGrid = Callable[[], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class ResponseIndex:
    """Iteration and index of a response in a run."""

    iteration: int
    sequence: int


@dataclass(frozen=True)
class Op:
    """One row of `mismatch_op.parquet`: an operation of the policy in one mode, compared on both paths."""

    mode: Mode  # of numerics: deterministic or native
    order: int  # position in the order of execution, from 0
    layer: int  # decoder layer, -1 outside of them
    op: str  # native: module within the layer; deterministic: embeddings, layer, last_norm, head; then log_probs
    max_abs: float  # largest |cached decode - training forward| of its output
    rel_l2: float  # norm of the difference over the norm of the training forward's output
    frac_bitwise_equal: float  # share of the output's numbers with the same bits
    inputs_equal: bool  # both paths gave the operation the same bits
    outputs_equal: bool  # the operation gave the same bits


@dataclass(frozen=True)
class Bisection:
    """Result of a bisection; `folder` holds the table of `ops`.

    `first_divergent_op` maps each mode to the first operation that gives other bits in the cached decode than in the
    training forward although its inputs are equal; "" if no operation does.
    """

    folder: str
    first_divergent_op: dict[str, str]
    ops: tuple[Op, ...]


@dataclass(frozen=True)
class SamplerTrace:
    """Policy in one mode, its sampled responses, and the inputs and outputs of its operations during sampling."""

    policy: PreTrainedModel
    mode: Mode
    requests: Sequence[Request]
    completions: Sequence[Completion]
    sampling: Sampling
    decoded: Captured


class SampledTokens:
    """Observer of sampling: records the tokens of each pass and, by request, the logits [V] of each sampled token."""

    def __init__(self) -> None:
        self.grid = torch.empty(0), torch.empty(0)
        self.logits: dict[int, list[Tensor]] = defaultdict(list)

    def before_pass(self, requests: list[int], starts: list[int], lengths: list[int]) -> None:
        self.grid = _grid(torch.tensor(requests), torch.tensor(starts), torch.tensor(lengths))

    def before_sampling(self, requests: list[int], logits: Tensor) -> None:
        for request, row in zip(requests, logits, strict=True):
            self.logits[request].append(row.cpu())


def _grid(sequences: Tensor, starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return sequences and positions [R, L] of right-padded rows, position -1 for padding."""
    columns = torch.arange(int(lengths.max()))
    positions = torch.where(columns < lengths[:, None], starts[:, None] + columns, -1)
    return sequences[:, None].expand_as(positions), positions


@contextmanager
def recording(policy: PreTrainedModel, tokens: TokenGrid) -> Iterator[Recorded]:
    """Record the inputs and outputs of the trunk's operations while the block runs."""
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
            outputs = [out] if isinstance(out, Tensor) else [y for y in out if isinstance(y, Tensor)]
            add(name, _rows(x if x.dim() > 1 else x[None], valid), torch.cat([_rows(y, valid) for y in outputs], 1))

        return hook

    def watch(batch: Ragged, layers: Sequence[Tensor], hidden: Tensor) -> None:
        inputs = torch.from_numpy(batch.ids)[:, None]
        names = ("embeddings", *(f"layers.{i}" for i in range(len(layers) - 1)), "last_norm")
        for name, outputs in zip(names, (*layers, hidden), strict=True):
            add(name, inputs, outputs)
            inputs = outputs

    handles = []
    if isinstance(network, NativeNetwork):
        modules = modules_of(policy).items()
        handles = [module.register_forward_hook(hook_of(name), with_kwargs=True) for name, module in modules]
    else:
        network.watch = watch
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()
        if not isinstance(network, NativeNetwork):
            network.watch = None


def modules_of(policy: PreTrainedModel) -> dict[str, nn.Module]:
    """Return every module inside the trunk, but no part of a mixture of experts, whose rows are not tokens."""
    trunk = trunk_of(policy)
    inside = {id(module) for module in trunk.modules()} - {id(trunk)}
    named = {name: m for name, m in policy.named_modules() if id(m) in inside}
    mixtures = tuple(f"{n}." for n, m in named.items() if type(m) in MIXTURES)
    return {n: m for n, m in named.items() if not isinstance(m, nn.ModuleList) and not n.startswith(mixtures)}


def _rows(x: Tensor, valid: Tensor) -> Tensor:
    """Return the valid rows [n, width] of a tensor [R, L, ..]; a tensor [1, L, ..] is first repeated for all R."""
    return x.detach().expand(*valid.shape, *x.shape[2:])[valid].reshape(int(valid.sum()), -1)


def _captured(
    policy: PreTrainedModel, batch: TokenBatch, recorded: Recorded, logits: Tensor, logprobs: Tensor
) -> Captured:
    """Return inputs and outputs of every operation; the rows are in the order of tokens.

    The rows after the trunk are the n positions that predict response tokens.
    """
    captured = {}
    for name, passes in recorded.items():
        keys, inputs, outputs = (torch.cat(rows) for rows in zip(*passes, strict=True))
        order = keys.argsort()
        captured[name] = inputs[order], outputs[order]
    hidden = list(captured.values())[-1][1][index(batch.predictors)]
    head = next(name for name, module in policy.named_modules() if module is head_of(policy))
    return {**captured, head: (hidden, logits), "log_probs": (logits, logprobs[:, None])}


def sample(
    policy: PreTrainedModel,
    stop_ids: frozenset[int],
    mode: Mode,
    max_context: int,
    requests: Sequence[Request],
    sampling: Sampling,
) -> SamplerTrace:
    """Sample responses with a cache, and record the inputs and outputs of every operation.

    Args:
        policy: the model that samples.
        stop_ids: end tokens.
        mode: numerics, `deterministic` or `native`.
        max_context: tokens of the longest prompt and response together.
        requests: prompts and seeds, sampled at once.
        sampling: temperature and cuts.
    """
    seen = SampledTokens()
    engine = TorchEngine(policy, stop_ids, mode, max_context, len(requests), 0, prefix_cache=False, observer=seen)
    with recording(policy, lambda: seen.grid) as recorded:
        completions = engine.generate(requests, sampling)
    logits = torch.stack([row for i in range(len(requests)) for row in seen.logits[i]])
    batch, logprobs = _batch(requests, completions), torch.cat([c.logprobs for c in completions])
    decoded = _captured(policy, batch, recorded, logits, logprobs)
    return SamplerTrace(policy, mode, requests, completions, sampling, decoded)


def _batch(requests: Sequence[Request], completions: Sequence[Completion]) -> TokenBatch:
    return lay_out([r.prompt_ids for r in requests], [c.response_ids for c in completions])


@torch.no_grad()
def trained(trace: SamplerTrace, trainer: PreTrainedModel) -> Captured:
    """Record the operations of one forward pass of `trainer` over all sequences, padded on the right."""
    pairs = zip(trace.requests, trace.completions, strict=True)
    lengths = torch.tensor([len(r.prompt_ids) + len(c.response_ids) - 1 for r, c in pairs])
    grid = _grid(torch.arange(len(lengths)), torch.zeros_like(lengths), lengths)
    batch = _batch(trace.requests, trace.completions)
    with recording(trainer, lambda: grid) as recorded:
        logits = policy_logits(trainer, batch).cpu()
    eligible = expand_kept(torch.cat([c.kept_tokens for c in trace.completions]), logits.shape[-1])
    logprobs, _ = token_statistics(logits, batch.targets.cpu(), trace.sampling.temperature, eligible, trace.mode)
    return _captured(trainer, batch, recorded, logits, logprobs)


def compare_ops(trace: SamplerTrace, trainer: PreTrainedModel) -> list[Op]:
    """Compare every operation of the sampler with the same operation in a forward pass of `trainer`."""
    return [
        _compare(trace.mode, order, name, trace.decoded[name], right)
        for order, (name, right) in enumerate(trained(trace, trainer).items())
    ]


def _compare(mode: Mode, order: int, name: str, left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> Op:
    (inputs, outputs), equal = zip(left, right, strict=True), _bits(left[1]) == _bits(right[1])
    a, b = (x.to(torch.float64) for x in outputs)
    layer = re.search(r"\.(\d+)(?:\.|$)", name)
    return Op(
        mode=mode,
        order=order,
        layer=int(layer.group(1)) if layer else -1,
        op=name[layer.end() :] or "layer" if layer else name,
        max_abs=float((a - b).abs().max()),
        rel_l2=float((a - b).norm() / b.norm()) if b.norm() > 0 else math.nan,
        frac_bitwise_equal=float(equal.to(torch.float64).mean()),
        inputs_equal=torch.equal(*map(_bits, inputs)),
        outputs_equal=bool(equal.all()),
    )


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def first_divergent_op(ops: Sequence[Op]) -> str:
    """Return the first operation with equal inputs and unequal outputs, for example `layer 0 self_attn`, or ""."""
    for op in ops:
        if op.inputs_equal and not op.outputs_equal:
            return f"layer {op.layer} {op.op}" if op.layer >= 0 else op.op
    return ""


def trace_sampler(
    config: RunConfig, mode: Mode, start_folder: Path | None, response: ResponseIndex | None = None
) -> SamplerTrace:
    """Sample SEQUENCES responses of a configuration, and record the operations of the sampler.

    Args:
        config: the run; its deliberate faults are left out.
        mode: numerics, `deterministic` or `native`.
        start_folder: folder of the saved policy; None: the configuration makes or loads the policy.
        response: the response to sample first, before the next responses of its iteration; None: sample responses to
            the first prompts by key.
    """
    config = plain(config, mode)
    prepared = prepare(config, Silent(), start_folder)
    if response is None:
        task = prepared.task
        keys = sorted(task.prompt_ids)[:SEQUENCES]
        requests = [Request(task.prompt_ids[k], sample_seed(config.seed, 0, k, 0)) for k in keys]
    else:
        prompts = choose_prompts(config, prepared.task, response.iteration)
        requests = [Request(ids, seed) for ids, seed in zip(prompts.prompt_ids, prompts.seeds, strict=True)]
        requests = [*requests[response.sequence :], *requests[: response.sequence]][:SEQUENCES]
    policy, stop_ids, context = prepared.state.policy, prepared.engine.stop_ids, config.numerics.max_context
    policy.requires_grad_(False)
    return sample(policy, stop_ids, mode, context, requests, sampling_of(config))


def first_unequal(run_dir: Path) -> ResponseIndex | None:
    """Return the first response with unequal bits, None if a run has none. Raises UserError if the file is damaged."""
    path = run_dir / UNEQUAL / UNEQUAL_TOKENS
    if not path.is_file():
        return None
    check_sums(path.parent)
    row = pq.read_table(path, columns=["iteration", "sequence"]).slice(0, 1).to_pylist()[0]
    return ResponseIndex(row["iteration"], row["sequence"])


def _source(path: Path, overrides: Sequence[str]) -> tuple[RunConfig, Path | None, ResponseIndex | None]:
    """Return the configuration, a run's policy folder, and the response that ended the run by unequal bits, if any."""
    if not path.is_dir():
        return load_config(path, overrides), None, None
    if overrides:
        raise UserError(f"--set {overrides[0]}: {path} is a recorded run; --set goes with a configuration only")
    config = load_recorded_config(path)  # first: it reports a folder without a run
    if (path / FINAL).is_dir():
        return config, path / FINAL, None
    response = first_unequal(path)
    if response is None:
        raise UserError(f"{path}: has no checkpoints/final; finish it with `ppo-repro resume {shlex.quote(str(path))}`")
    return config, path / UNEQUAL, response


def bisect(path: Path, overrides: Sequence[str], out: Path) -> Bisection:
    """Compare the operations of sampler and trainer in both modes, and write the table.

    The policy is the configuration's policy or a run's final policy. If unequal bits ended the run, the policy is the
    one at that moment. The table goes to OUT/<experiment>/<config digest> and replaces an earlier table.
    """
    config, folder, response = _source(path, overrides)
    require_undisturbed(config)
    ops: list[Op] = []
    first: dict[str, str] = {}
    for mode in MODES:
        trace = trace_sampler(config, mode, folder, response)
        ops_of_mode = compare_ops(trace, trace.policy)
        first[mode] = first_divergent_op(ops_of_mode)
        ops += ops_of_mode
    target = out / config.experiment / config.digest()
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{target}: cannot be made ({error.strerror}); choose another --out") from error
    table: bytes = pd.DataFrame([asdict(op) for op in ops]).to_parquet(index=False)
    atomic_write(target / "mismatch_op.parquet", table)
    return Bisection(str(target), first, tuple(ops))


def lines(bisection: Bisection) -> list[str]:
    """Return the printed lines: the operations whose outputs differ, and the origin."""
    ops = pd.DataFrame(bisection.ops)
    columns = ["mode", "layer", "op", "inputs_equal", "frac_bitwise_equal", "max_abs", "rel_l2"]
    table = ops.loc[~ops["outputs_equal"], columns].to_string(index=False, float_format="{:.2g}".format)
    origins = (
        f"{mode}: " + (f"the paths first differ at {op}" if op else "no op gives other bits for equal inputs")
        for mode, op in bisection.first_divergent_op.items()
    )
    return [*str(table).splitlines(), *origins, f"table   {bisection.folder}"]
