"""The operation that makes sampler and trainer differ, for the model, prompts and sampling of a run.

Both paths compute the same token ids. The origin of a difference is the first operation, in the order of execution,
whose inputs have equal bits on both paths and whose outputs have not: all later ones only pass a difference on.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.checks.capture import MODES, Captured, Mode, Subject, decoded, patched, plain, scored, trained
from ppo_repro.config.files import load_config
from ppo_repro.config.run import RunConfig
from ppo_repro.errors import UserError
from ppo_repro.files import atomic_write, check_sums
from ppo_repro.numerics.families import head_of
from ppo_repro.records.folder import FINAL, UNEQUAL, UNEQUAL_TOKENS, load_recorded_config
from ppo_repro.rollout.engine import Request
from ppo_repro.rollout.torch_engine import TorchEngine
from ppo_repro.runs.prepare import prepare
from ppo_repro.seeding import sample_seed
from ppo_repro.stages.rollout import choose_prompts, require_undisturbed, sampling_of

SEQUENCES = 16  # the outputs of every operation for all their tokens are in memory at once, for both paths
LOG_PROBS = "log_probs"


@dataclass(frozen=True)
class Response:
    """A response of a run."""

    iteration: int
    sequence: int


@dataclass(frozen=True)
class Op:
    """One row of `mismatch_op.parquet`: an operation of the policy in one mode, on both paths."""

    mode: str  # of numerics: deterministic or native
    order: int  # position in the order of execution, from 0
    layer: int  # decoder layer, -1 outside of them
    op: str  # native: module within the layer; deterministic: embeddings, layer, last_norm, head; then log_probs
    tokens: int  # positions compared
    max_abs: float  # largest |cached decode - training forward| of its output
    mean_abs: float
    rel_l2: float  # norm of the difference over the norm of the training forward's output
    cos: float  # cosine of the two outputs
    ulp_p99: float  # 99th percentile of the distance in float32 units in the last place
    frac_bitwise_equal: float  # share of the output's numbers with the same bits
    inputs_equal: bool  # both paths gave the operation the same bits
    outputs_equal: bool  # the operation gave the same bits
    amplification: float | None  # rel_l2 of output over input; None for equal inputs
    # share of mean |delta| of the log-probs that goes away if the training forward is given the decoded output of this
    # operation; None where no log-prob differs, and before the head in deterministic numerics
    explained: float | None


@dataclass(frozen=True)
class Bisection:
    """The result; `first_divergent_op` is by mode, empty where no bit differs."""

    folder: str
    first_divergent_op: dict[str, str]
    ops: tuple[Op, ...]


def make_subject(config: RunConfig, mode: Mode, start_folder: Path | None, response: Response | None = None) -> Subject:
    """The policy of a configuration, or of a folder where it was saved, with `SEQUENCES` responses.

    With `response` it and those that follow it in its iteration, from the beginning again after the last, sampled as
    they were there.
    """
    config = plain(config, mode)
    prepared = prepare(config, lambda step, total, loss: None, start_folder)
    if response is None:
        task = prepared.task
        keys = sorted(task.prompt_ids)[:SEQUENCES]
        requests = [Request(task.prompt_ids[k], sample_seed(config.seed, 0, k, 0)) for k in keys]
    else:
        prompts = choose_prompts(config, prepared.task, response.iteration)
        requests = [Request(ids, seed) for ids, seed in zip(prompts.prompt_ids, prompts.seeds, strict=True)]
        requests = [*requests[response.sequence :], *requests[: response.sequence]][:SEQUENCES]
    policy, context, sampling = prepared.state.policy, config.numerics.max_context, sampling_of(config)
    engine = TorchEngine(policy, prepared.engine.stop_ids, mode, context, len(requests), 0, False)
    policy.requires_grad_(False)
    completions = engine.generate(requests, sampling)
    return Subject(policy, mode, context, tuple(requests), tuple(completions), sampling)


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def ulps(a: Tensor, b: Tensor) -> Tensor:
    """Distances of float32 numbers in units in the last place, int64; 0.0 and -0.0 are equal here."""
    left, right = (torch.where(x < 0, -(x & 0x7FFFFFFF), x) for x in (_bits(a).long(), _bits(b).long()))
    return (left - right).abs()


def _layer_and_op(name: str) -> tuple[int, str]:
    """The decoder layer of a module and its name within it; layer -1 outside of them."""
    match = re.search(r"\.(\d+)(?:\.|$)", name)
    return (int(match.group(1)), name[match.end() :] or "layer") if match else (-1, name)


def _rel_l2(a: Tensor, b: Tensor) -> float:
    wide, other = a.to(torch.float64), b.to(torch.float64)
    norm = float(other.norm())
    return float((wide - other).norm()) / norm if norm > 0 else math.nan


def _compare(s: Subject, name: str, order: int, inputs: tuple[Tensor, Tensor], outputs: tuple[Tensor, Tensor]) -> Op:
    """One operation: its inputs and its outputs on the decoding path and in the training forward."""
    a, b = (x.to(torch.float64) for x in outputs)
    difference, equal = (a - b).abs(), _bits(outputs[0]) == _bits(outputs[1])
    inputs_equal = torch.equal(*map(_bits, inputs))
    norms = float(a.norm()) * float(b.norm())
    input_difference = 0.0 if inputs_equal else _rel_l2(*inputs)
    layer, op = _layer_and_op(name)
    return Op(
        mode=s.mode,
        order=order,
        layer=layer,
        op=op,
        tokens=len(a),
        max_abs=float(difference.max()),
        mean_abs=float(difference.mean()),
        rel_l2=_rel_l2(*outputs),
        cos=float((a * b).sum()) / norms if norms > 0 else math.nan,
        ulp_p99=float(torch.quantile(ulps(*outputs).flatten()[: 1 << 24].to(torch.float64), 0.99)),
        frac_bitwise_equal=float(equal.to(torch.float64).mean()),
        inputs_equal=inputs_equal,
        outputs_equal=bool(equal.all()),
        amplification=_rel_l2(*outputs) / input_difference if input_difference > 0 else None,
        explained=None,
    )


def _explained(left: Captured, right: Captured, logprobs: Tensor) -> float | None:
    """The share of the mean |difference| of log-probs that vanishes when the trainer's are `logprobs`."""
    whole = float((left.logprobs.double() - right.logprobs.double()).abs().mean())
    if whole == 0.0:
        return None
    return 1.0 - float((left.logprobs.double() - logprobs.double()).abs().mean()) / whole


def compare_ops(s: Subject, trainer: PreTrainedModel) -> Iterator[Op]:
    """Every operation on both paths; `trainer` computes the training forward.

    In native numerics each module's output on the decoding path is also put in its place in the training forward.
    """
    left, right = decoded(s), trained(s, trainer)
    for order, name in enumerate(right.outputs):
        inputs, outputs = (left.inputs[name], right.inputs[name]), (left.outputs[name], right.outputs[name])
        op = _compare(s, name, order, inputs, outputs)
        if s.mode == "native":
            op = replace(op, explained=_explained(left, right, patched(s, trainer, name, left.outputs[name])))
        yield op
    count = len(right.outputs)
    head = next(name for name, module in trainer.named_modules() if module is head_of(trainer))
    op = _compare(s, head, count, (left.hidden, right.hidden), (left.logits, right.logits))
    exchanged = scored(left.logits, s.mode, s.completions, s.sampling.temperature)
    yield replace(op, explained=_explained(left, right, exchanged))
    logprobs = left.logprobs[:, None], right.logprobs[:, None]
    yield _compare(s, LOG_PROBS, count + 1, (left.logits, right.logits), logprobs)


def first_divergent_op(ops: Sequence[Op]) -> str:
    """The first op with equal inputs and unequal outputs, as `layer 0 self_attn`; empty if there is none."""
    for op in ops:
        if op.inputs_equal and not op.outputs_equal:
            return f"layer {op.layer} {op.op}" if op.layer >= 0 else op.op
    return ""


def first_unequal(run_dir: Path) -> Response | None:
    """The first response with unequal bits, None where a run has none; UserError where the file is damaged."""
    path = run_dir / UNEQUAL / UNEQUAL_TOKENS
    if not path.is_file():
        return None
    check_sums(path.parent)
    row = pq.read_table(path, columns=["iteration", "sequence"]).slice(0, 1).to_pylist()[0]
    return Response(row["iteration"], row["sequence"])


def _source(path: Path, overrides: Sequence[str]) -> tuple[RunConfig, Path | None, Response | None]:
    """The configuration; if `path` is a run, the folder of its policy, and the response that ended it, if one did."""
    if not path.is_dir():
        return load_config(path, overrides), None, None
    if overrides:
        raise UserError(f"--set {overrides[0]}: {path} is a recorded run; --set goes with a configuration only")
    config = load_recorded_config(path)  # first: it says so where the folder is no run
    if (path / FINAL).is_dir():
        return config, path / FINAL, None
    response = first_unequal(path)
    if response is None:
        raise UserError(f"{path}: has no checkpoints/final; finish it with `ppo-repro resume {path}`")
    return config, path / UNEQUAL, response


def bisect(path: Path, overrides: Sequence[str], out: Path) -> Bisection:
    """Compare both paths of a configuration's policy, or of a run's final one, in both modes, and write the table.

    Of a run that ended because bits were unequal it is the policy as it was then, with the responses beside that token.
    The table goes to OUT/<experiment>/<config digest> and replaces that of an earlier call.
    """
    config, folder, response = _source(path, overrides)
    require_undisturbed(config)
    ops: list[Op] = []
    first: dict[str, str] = {}
    for mode in MODES:
        subject = make_subject(config, mode, folder, response)
        ops_of_mode = list(compare_ops(subject, subject.policy))
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
    """The result as text: the ops whose outputs differ, the origin."""
    ops = pd.DataFrame(bisection.ops)
    columns = ["mode", "layer", "op", "inputs_equal", "frac_bitwise_equal", "max_abs", "rel_l2", "explained"]
    table = ops.loc[~ops["outputs_equal"], columns].to_string(index=False, float_format="{:.2g}".format)
    origins = (
        f"{mode}: " + (f"the paths first differ at {op}" if op else "no op gives other bits for equal inputs")
        for mode, op in bisection.first_divergent_op.items()
    )
    return [*str(table).splitlines(), *origins, f"table   {bisection.folder}"]
