"""The files of one checkpoint: everything that decides the rest of a run, to the bit. Anything else is refused.

A folder holds safetensors files and `checkpoint.json`, which lists their SHA-256 and contains its own. Random
streams are functions of seed and iteration, so the iteration number is enough for them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from torch import Tensor, nn

from ppo_repro import __version__
from ppo_repro.buffers import Coefficients, ReturnStatistics
from ppo_repro.config.files import describe
from ppo_repro.disk.folder import whole_folder
from ppo_repro.errors import UserError
from ppo_repro.models.state import TrainState
from ppo_repro.numerics.arithmetic.grid import (
    GRADIENT_BITS,
    GRADIENT_INPUT_BITS,
    INPUT_BITS,
    LEFT_BITS,
    RIGHT_BITS,
    WEIGHT_BITS,
)
from ppo_repro.numerics.gradients import HEADROOM
from ppo_repro.numerics.optim.adamw import OptimizerState, copy_named
from ppo_repro.runs.tensor_file import write_tensors

FORMAT = 3
# the meaning of a gradient grid: with other numbers a checkpoint would continue as another run
NUMBERS = (
    f"linear layers of {INPUT_BITS} and {WEIGHT_BITS} bits, attention of {LEFT_BITS} and {RIGHT_BITS}, "
    f"gradients of {GRADIENT_BITS} and {GRADIENT_INPUT_BITS}, headroom {HEADROOM}"
)
INDEX_NAME = "checkpoint.json"
_DAMAGED = "the checkpoint was changed or damaged"
_POLICY, _VALUE_MODEL = "policy.safetensors", "value_model.safetensors"
_POLICY_OPTIMIZER, _VALUE_OPTIMIZER = "policy_optimizer.safetensors", "value_optimizer.safetensors"
NOTHING = OptimizerState({}, {}, {}, {}, 1.0, 1.0)


@dataclass(frozen=True)
class Origin:
    """What a run started from; equal in all its checkpoints."""

    task: str  # digest of prompts, answers and end tokens
    reference: Mapping[str, str]  # SHA-256 of every file of the reference folder


@dataclass(frozen=True)
class Checkpoint:
    """A run after `iteration` iterations. Tensors by parameter name."""

    iteration: int
    chain: str  # of the recorded iterations up to here
    policy: Mapping[str, Tensor]
    value_model: Mapping[str, Tensor]  # only the head if it is on the policy's trunk; empty without a value model
    policy_optimizer: OptimizerState
    value_optimizer: OptimizerState  # empty without a value model of its own
    coefficients: Coefficients
    origin: Origin


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class _OptimizerEntry(_Entry):
    grids: dict[str, int]
    steps: dict[str, int]
    beta1_power: str  # float.hex
    beta2_power: str


class _CoefficientsEntry(_Entry):
    """Numbers as float.hex."""

    kl_coef: str
    clip_range: str
    penalty_coef: str
    return_count: int
    return_mean: str
    return_squares: str


class _Index(_Entry):
    """Content of checkpoint.json, its own digest left out."""

    format: int
    ppo_repro: str
    numbers: str
    iteration: int = Field(ge=1)
    chain: str
    task: str
    reference: dict[str, str]
    policy_optimizer: _OptimizerEntry
    value_optimizer: _OptimizerEntry
    coefficients: _CoefficientsEntry
    files: dict[str, str]


def _weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def take(state: TrainState, chain: str, origin: Origin) -> Checkpoint:
    """The checkpoint of a state; its tensors are the live ones, so save it before the next step."""
    return Checkpoint(
        iteration=state.iteration,
        chain=chain,
        policy=_weights(state.policy),
        value_model={name: parameter.detach() for name, parameter in state.value_parameters().items()},
        policy_optimizer=state.policy_optimizer.state(),
        value_optimizer=NOTHING if state.value_optimizer is None else state.value_optimizer.state(),
        coefficients=state.coefficients,
        origin=origin,
    )


def restore(saved: Checkpoint, state: TrainState) -> None:
    """Load a checkpoint into `state`, which was made from the same configuration; ValueError where it does not fit."""
    copy_named(_weights(state.policy), saved.policy)
    copy_named({name: parameter.detach() for name, parameter in state.value_parameters().items()}, saved.value_model)
    state.policy_optimizer.load(saved.policy_optimizer)
    if state.value_optimizer is not None:
        state.value_optimizer.load(saved.value_optimizer)
    elif saved.value_optimizer != NOTHING:
        raise ValueError("it has an optimizer of a value model; the configuration has none")
    state.coefficients = saved.coefficients
    state.iteration = saved.iteration


def save(saved: Checkpoint, folder: Path) -> None:
    """Write a checkpoint; it appears whole and durable or not at all. UserError where writing fails."""
    tensors = {
        _POLICY: saved.policy,
        _VALUE_MODEL: saved.value_model,
        _POLICY_OPTIMIZER: _moments(saved.policy_optimizer),
        _VALUE_OPTIMIZER: _moments(saved.value_optimizer),
    }
    files = {}
    with whole_folder(folder) as temporary:
        for name, content in tensors.items():
            files[name] = write_tensors(temporary / name, content)
        index = _Index(
            format=FORMAT,
            ppo_repro=__version__,
            numbers=NUMBERS,
            iteration=saved.iteration,
            chain=saved.chain,
            task=saved.origin.task,
            reference=dict(saved.origin.reference),
            policy_optimizer=_entry(saved.policy_optimizer),
            value_optimizer=_entry(saved.value_optimizer),
            coefficients=_coefficients_entry(saved.coefficients),
            files=files,
        )
        (temporary / INDEX_NAME).write_text(_sealed(index.model_dump()), encoding="utf-8")


def load(folder: Path) -> Checkpoint:
    """Read and verify a checkpoint; UserError names the file that is missing, damaged or of another version."""
    index = _read_index(folder / INDEX_NAME)
    names = {_POLICY, _VALUE_MODEL, _POLICY_OPTIMIZER, _VALUE_OPTIMIZER}
    if set(index.files) != names:
        raise UserError(f"{folder / INDEX_NAME}: lists {', '.join(sorted(index.files))}; {_DAMAGED}")
    try:
        # file by file: the bytes of one are gone before the next is read
        tensors = {n: safetensors.torch.load(verified_bytes(folder / n, d)) for n, d in index.files.items()}
        return _assemble(index, tensors)
    except (ValueError, SafetensorError) as error:
        raise UserError(f"{folder}: {error}; {_DAMAGED}") from error


def _assemble(index: _Index, tensors: Mapping[str, Mapping[str, Tensor]]) -> Checkpoint:
    return Checkpoint(
        iteration=index.iteration,
        chain=index.chain,
        policy=tensors[_POLICY],
        value_model=tensors[_VALUE_MODEL],
        policy_optimizer=_optimizer_state(index.policy_optimizer, tensors[_POLICY_OPTIMIZER]),
        value_optimizer=_optimizer_state(index.value_optimizer, tensors[_VALUE_OPTIMIZER]),
        coefficients=_coefficients(index.coefficients),
        origin=Origin(index.task, index.reference),
    )


def verified_bytes(path: Path, digest: str) -> bytes:
    """The content of a file with this SHA-256; UserError where it is missing, unreadable or has another one."""
    content = _read(path)
    if hashlib.sha256(content).hexdigest() != digest:
        raise UserError(f"{path}: has another SHA-256 than when it was written; {_DAMAGED}")
    return content


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {_DAMAGED}") from error


def _sealed(tree: dict[str, Any]) -> str:
    """The text of checkpoint.json: a function of its content, with the SHA-256 of the text without it."""

    def text(content: dict[str, Any]) -> str:
        return json.dumps(content, indent=1, sort_keys=True) + "\n"

    return text({**tree, "sha256": hashlib.sha256(text(tree).encode()).hexdigest()})


def _read_index(path: Path) -> _Index:
    content = _read(path)
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is not valid JSON; {_DAMAGED}") from error
    if not isinstance(tree, dict) or "format" not in tree:
        raise UserError(f"{path}: is not the index of a checkpoint; {_DAMAGED}")
    current = {"format": FORMAT, "ppo_repro": __version__, "numbers": NUMBERS}
    for name, expected in current.items():
        if tree.get(name) != expected:
            advice = "resume with the version that wrote it"
            raise UserError(f"{path}: {name} = {tree.get(name)!r}, this ppo_repro has {expected!r}; {advice}")
    tree.pop("sha256", None)
    if _sealed(tree).encode() != content:
        raise UserError(f"{path}: does not match its own SHA-256; {_DAMAGED}")
    try:
        return _Index.model_validate(tree)
    except ValidationError as error:
        raise UserError(f"{path}: {describe(error, 'content')}; {_DAMAGED}") from error


def _moments(state: OptimizerState) -> dict[str, Tensor]:
    named = {"first": state.first, "second": state.second, "factors": state.factors}
    return {f"{moment}/{name}": tensor for moment, tensors in named.items() for name, tensor in tensors.items()}


def _entry(state: OptimizerState) -> _OptimizerEntry:
    return _OptimizerEntry(
        grids=dict(state.grids),
        steps=dict(state.steps),
        beta1_power=state.beta1_power.hex(),
        beta2_power=state.beta2_power.hex(),
    )


def _optimizer_state(entry: _OptimizerEntry, tensors: Mapping[str, Tensor]) -> OptimizerState:
    def of(moment: str) -> dict[str, Tensor]:
        return {n.removeprefix(moment + "/"): t for n, t in tensors.items() if n.startswith(moment + "/")}

    powers = float.fromhex(entry.beta1_power), float.fromhex(entry.beta2_power)
    return OptimizerState(of("first"), of("second"), entry.grids, entry.steps, *powers, of("factors"))


def _coefficients_entry(coefficients: Coefficients) -> _CoefficientsEntry:
    returns = coefficients.returns
    return _CoefficientsEntry(
        kl_coef=coefficients.kl_coef.hex(),
        clip_range=coefficients.clip_range.hex(),
        penalty_coef=coefficients.penalty_coef.hex(),
        return_count=returns.count,
        return_mean=returns.mean.hex(),
        return_squares=returns.squares.hex(),
    )


def _coefficients(entry: _CoefficientsEntry) -> Coefficients:
    number = float.fromhex
    returns = ReturnStatistics(entry.return_count, number(entry.return_mean), number(entry.return_squares))
    return Coefficients(number(entry.kl_coef), number(entry.clip_range), number(entry.penalty_coef), returns)
