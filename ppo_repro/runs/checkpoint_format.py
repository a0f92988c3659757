"""The files of one checkpoint: everything that decides the rest of a run, to the bit. Anything else is refused.

A folder holds safetensors files and `checkpoint.json`, which lists their SHA-256. Random
streams are functions of seed and iteration, so the iteration number is enough for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ppo_repro import __version__
from ppo_repro.buffers import Coefficients, ReturnStatistics
from ppo_repro.config.run import RunConfig
from ppo_repro.errors import UserError
from ppo_repro.files import whole_folder
from ppo_repro.models.folders import named_weights, write_tensors
from ppo_repro.models.state import TrainState
from ppo_repro.numerics.library import KNOWN_ANSWER
from ppo_repro.numerics.optimizer import OptimizerState, copy_named
from ppo_repro.runs.checkpoint_index import (
    DAMAGED,
    FORMAT,
    INDEX_NAME,
    POLICY,
    POLICY_OPTIMIZER,
    VALUE_MODEL,
    VALUE_OPTIMIZER,
    VERSIONS,
    CoefficientsEntry,
    Index,
    OptimizerEntry,
    read_index,
    sealed,
    verified_bytes,
)

# kernels with another known answer would continue as another run
LAW = f"known answer {KNOWN_ANSWER:016x}"
# what a checkpoint that is gone on with has in common with this process
_CURRENT = {"ppo_repro": __version__, "law": LAW}
NOTHING = OptimizerState({}, {}, {})


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
    versions: Mapping[str, Tensor] = field(default_factory=dict)  # older policies that the sampler needs


def _load_weights(module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Copy weights into a module; ValueError where they do not fit."""
    copy_named(named_weights(module), saved)


def take(state: TrainState, chain: str, origin: Origin) -> Checkpoint:
    """The checkpoint of a state; its tensors are the live ones, so save it before the next step."""
    return Checkpoint(
        iteration=state.iteration,
        chain=chain,
        policy=named_weights(state.policy),
        value_model=named_weights(state.own_value_module),
        policy_optimizer=state.policy_optimizer.state(),
        value_optimizer=NOTHING if state.value_optimizer is None else state.value_optimizer.state(),
        coefficients=state.coefficients,
        origin=origin,
        versions={} if state.versions is None else state.versions.tensors(),
    )


def restore(saved: Checkpoint, state: TrainState) -> None:
    """Load a checkpoint into `state`, which was made from the same configuration; ValueError where it does not fit."""
    _load_weights(state.policy, saved.policy)
    _load_weights(state.own_value_module, saved.value_model)
    state.policy_optimizer.load(saved.policy_optimizer)
    if state.value_optimizer is not None:
        state.value_optimizer.load(saved.value_optimizer)
    elif saved.value_optimizer != NOTHING:
        raise ValueError("it has an optimizer of a value model; the configuration has none")
    if state.versions is not None:
        state.versions.restore(saved.versions, saved.iteration)
    elif saved.versions:
        raise ValueError("it has older policies; the configuration has no lag")
    state.coefficients = saved.coefficients
    state.iteration = saved.iteration


def save(saved: Checkpoint, folder: Path) -> None:
    """Write a checkpoint; it appears whole and durable or not at all. UserError where writing fails."""
    files = {}
    with whole_folder(folder) as temporary:
        for name, content in _contents(saved).items():
            files[name] = write_tensors(temporary / name, content)
        index = Index(
            format=FORMAT,
            ppo_repro=__version__,
            law=LAW,
            iteration=saved.iteration,
            chain=saved.chain,
            task=saved.origin.task,
            reference=dict(saved.origin.reference),
            policy_optimizer=_entry(saved.policy_optimizer),
            value_optimizer=_entry(saved.value_optimizer),
            coefficients=_coefficients_entry(saved.coefficients),
            files=files,
        )
        (temporary / INDEX_NAME).write_text(sealed(index.model_dump()), encoding="utf-8")


def is_due(config: RunConfig, iteration: int) -> bool:
    """Whether there is a checkpoint after `iteration` iterations."""
    every = config.checkpoints.every
    return every > 0 and iteration % every == 0


def keeps_final_state(config: RunConfig, iteration: int) -> bool:
    """Whether the optimizers' state is kept at the end, where no checkpoint has it."""
    return config.checkpoints.final_state and not is_due(config, iteration)


def _contents(saved: Checkpoint) -> dict[str, Mapping[str, Tensor]]:
    """The tensors of each file."""
    moments = {POLICY_OPTIMIZER: _moments(saved.policy_optimizer), VALUE_OPTIMIZER: _moments(saved.value_optimizer)}
    versions = {VERSIONS: saved.versions} if saved.versions else {}
    return {POLICY: saved.policy, VALUE_MODEL: saved.value_model, **moments, **versions}


def load(folder: Path) -> Checkpoint:
    """Read and verify a checkpoint; UserError names the file that is missing, damaged or of another version."""
    index = read_index(folder)
    for name, expected in _CURRENT.items():
        if getattr(index, name) != expected:
            found = f"{name} = {getattr(index, name)!r}, this ppo_repro has {expected!r}"
            raise UserError(f"{folder / INDEX_NAME}: {found}; resume with the version that wrote it")
    try:
        # file by file: the bytes of one are gone before the next is read
        tensors = {n: safetensors.torch.load(verified_bytes(folder / n, d)) for n, d in index.files.items()}
        return _assemble(index, tensors)
    except (ValueError, SafetensorError) as error:
        raise UserError(f"{folder}: {error}; {DAMAGED}") from error


def _assemble(index: Index, tensors: Mapping[str, Mapping[str, Tensor]]) -> Checkpoint:
    return Checkpoint(
        iteration=index.iteration,
        chain=index.chain,
        policy=tensors[POLICY],
        value_model=tensors[VALUE_MODEL],
        policy_optimizer=_optimizer_state(index.policy_optimizer, tensors[POLICY_OPTIMIZER]),
        value_optimizer=_optimizer_state(index.value_optimizer, tensors[VALUE_OPTIMIZER]),
        coefficients=_coefficients(index.coefficients),
        origin=Origin(index.task, index.reference),
        versions=tensors.get(VERSIONS, {}),
    )


def _moments(state: OptimizerState) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {f"factors/{name}": tensor for name, tensor in state.factors.items()}
    for moment, tensors in (("first", state.first), ("second", state.second)):
        for name, tensor in tensors.items():
            found[f"{moment}/{name}"] = tensor
    return found


def _entry(state: OptimizerState) -> OptimizerEntry:
    return OptimizerEntry(steps=dict(state.steps))


def _optimizer_state(entry: OptimizerEntry, tensors: Mapping[str, Tensor]) -> OptimizerState:
    def of(moment: str) -> dict[str, Tensor]:
        return {n.removeprefix(moment + "/"): t for n, t in tensors.items() if n.startswith(moment + "/")}

    return OptimizerState(of("first"), of("second"), entry.steps, of("factors"))


def _coefficients_entry(coefficients: Coefficients) -> CoefficientsEntry:
    returns = coefficients.returns
    return CoefficientsEntry(
        kl_coef=coefficients.kl_coef.hex(),
        clip_range=coefficients.clip_range.hex(),
        penalty_coef=coefficients.penalty_coef.hex(),
        return_count=returns.count,
        return_mean=returns.mean.hex(),
        return_squares=returns.squares.hex(),
    )


def _coefficients(entry: CoefficientsEntry) -> Coefficients:
    number = float.fromhex
    returns = ReturnStatistics(entry.return_count, number(entry.return_mean), number(entry.return_squares))
    return Coefficients(number(entry.kl_coef), number(entry.clip_range), number(entry.penalty_coef), returns)
