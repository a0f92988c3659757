"""One checkpoint: a safetensors file with everything that decides the rest of a run, to the bit.

The file appears whole or not at all, and the manifest lists its SHA-256. Random streams are functions of seed and
iteration, so the iteration number is enough for them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ppo_repro import __version__
from ppo_repro.buffers import Coefficients, ReturnStatistics
from ppo_repro.errors import UserError
from ppo_repro.files import sync
from ppo_repro.models.folders import named_weights, write_tensors
from ppo_repro.models.state import TrainState
from ppo_repro.numerics.library import KNOWN_ANSWER
from ppo_repro.numerics.optimizer import OptimizerState, copy_named
from ppo_repro.records.reader import check_file

# a checkpoint of another version, or of kernels with another known answer, would continue as another run
_WRITTEN_BY = {"format": "5", "ppo_repro": __version__, "law": f"known answer {KNOWN_ANSWER:016x}"}
NOTHING = OptimizerState({}, {}, {})


@dataclass(frozen=True)
class Checkpoint:
    """A run after `iteration` iterations. Tensors by parameter name."""

    iteration: int
    chain: str  # of the recorded iterations up to here
    task: str  # digest of prompts, answers and end tokens
    policy: Mapping[str, Tensor]
    value_model: Mapping[str, Tensor]  # only the head if it is on the policy's trunk; empty without a value model
    policy_optimizer: OptimizerState
    value_optimizer: OptimizerState  # empty without a value model of its own
    coefficients: Coefficients
    versions: Mapping[str, Tensor] = field(default_factory=dict)  # older policies that the sampler needs


def take(state: TrainState, chain: str, task: str) -> Checkpoint:
    """The checkpoint of a state; its tensors are the live ones, so save it before the next step."""
    return Checkpoint(
        iteration=state.iteration,
        chain=chain,
        task=task,
        policy=named_weights(state.policy),
        value_model=named_weights(state.own_value_module),
        policy_optimizer=state.policy_optimizer.state(),
        value_optimizer=NOTHING if state.value_optimizer is None else state.value_optimizer.state(),
        coefficients=state.coefficients,
        versions={} if state.versions is None else state.versions.tensors(),
    )


def restore(saved: Checkpoint, state: TrainState) -> None:
    """Load a checkpoint into `state`, which was made from the same configuration; ValueError where it does not fit."""
    copy_named(named_weights(state.policy), saved.policy)
    copy_named(named_weights(state.own_value_module), saved.value_model)
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


def save(saved: Checkpoint, path: Path) -> str:
    """Write a checkpoint, whole and durable or not at all; returns its SHA-256. UserError where writing fails."""
    optimizers = {"policy_optimizer": saved.policy_optimizer, "value_optimizer": saved.value_optimizer}
    groups = {"policy": saved.policy, "value_model": saved.value_model, "versions": saved.versions}
    for name, state in optimizers.items():
        groups |= {f"{name}.first": state.first, f"{name}.second": state.second, f"{name}.factors": state.factors}
    content = {
        "iteration": saved.iteration,
        "chain": saved.chain,
        "task": saved.task,
        "coefficients": _coefficients_tree(saved.coefficients),
        "steps": {name: dict(state.steps) for name, state in optimizers.items()},
    }
    tensors = {f"{group}:{name}": tensor for group, named in groups.items() for name, tensor in named.items()}
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(exist_ok=True)
        digest = write_tensors(temporary, tensors, {**_WRITTEN_BY, "checkpoint": json.dumps(content, sort_keys=True)})
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written ({error.strerror}); make room there") from error
    return digest


def load(path: Path, digest: str) -> Checkpoint:
    """Read a checkpoint with this SHA-256; UserError where it is missing, damaged or of another version."""
    check_file(path, digest)
    tensors: dict[str, dict[str, Tensor]] = {}
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            for key in file.keys():  # noqa: SIM118 (no mapping)
                group, _, name = key.partition(":")
                tensors.setdefault(group, {})[name] = file.get_tensor(key)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read ({' '.join(str(error).split())}); restore it") from error
    for name, expected in _WRITTEN_BY.items():
        if metadata[name] != expected:
            found = f"{name} = {metadata[name]!r}, this ppo_repro has {expected!r}"
            raise UserError(f"{path}: {found}; resume with the version that wrote it")
    content = json.loads(metadata["checkpoint"])

    def optimizer(name: str) -> OptimizerState:
        first, second, factors = (tensors.get(f"{name}.{of}", {}) for of in ("first", "second", "factors"))
        return OptimizerState(first, second, content["steps"][name], factors)

    return Checkpoint(
        iteration=content["iteration"],
        chain=content["chain"],
        task=content["task"],
        policy=tensors.get("policy", {}),
        value_model=tensors.get("value_model", {}),
        policy_optimizer=optimizer("policy_optimizer"),
        value_optimizer=optimizer("value_optimizer"),
        coefficients=_coefficients(content["coefficients"]),
        versions=tensors.get("versions", {}),
    )


def _coefficients_tree(coefficients: Coefficients) -> dict[str, Any]:
    """Numbers as float.hex."""
    returns = coefficients.returns
    numbers = (coefficients.kl_coef, coefficients.clip_range, coefficients.penalty_coef, returns.mean, returns.squares)
    return {"numbers": [number.hex() for number in numbers], "return_count": returns.count}


def _coefficients(tree: Mapping[str, Any]) -> Coefficients:
    kl_coef, clip_range, penalty_coef, mean, squares = map(float.fromhex, tree["numbers"])
    return Coefficients(kl_coef, clip_range, penalty_coef, ReturnStatistics(tree["return_count"], mean, squares))
