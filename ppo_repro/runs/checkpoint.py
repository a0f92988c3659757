"""Write and read checkpoints: the state of a language run in a safetensors file, to continue to the same bits.

The file appears complete or not at all, and the manifest lists its SHA-256. Random streams are functions of
seed and iteration, so a checkpoint stores only the iteration number for them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ppo_repro import __version__
from ppo_repro.base.errors import UserError
from ppo_repro.base.files import make_folder, whole_file
from ppo_repro.base.mode import Precision
from ppo_repro.buffers import Coefficients, ReturnStatistics
from ppo_repro.models.folders import named_weights, write_tensors
from ppo_repro.models.state import TrainState
from ppo_repro.numerics.adamw import OptimizerState
from ppo_repro.numerics.library import KNOWN_ANSWER, KNOWN_ANSWER_HIGH
from ppo_repro.numerics.optimizer import Optimizer
from ppo_repro.numerics.weights import copy_named
from ppo_repro.records.reader import check_file

FORMAT = "6"
# The known answer of the kernels that wrote a checkpoint, by the run's precision. With other kernels the run would
# continue with other bits.
_KERNELS: dict[Precision, str] = {
    "highest": f"known answer {KNOWN_ANSWER:016x}",
    "high": f"known answer {KNOWN_ANSWER_HIGH:016x}",
}
NO_STATE = OptimizerState(first={}, second={}, steps={})


@dataclass(frozen=True)
class Checkpoint:
    """A run after `iteration` iterations. Tensors are by parameter name. Adapted weights follow from their factors."""

    iteration: int
    chain: str  # of the recorded iterations up to here
    task: Mapping[str, str]  # digests by the name of their content: prompts, end tokens and others
    policy: Mapping[str, Tensor]
    value_model: Mapping[str, Tensor]  # only the head if it is on the policy's trunk; empty without a value model
    policy_optimizer: OptimizerState
    value_optimizer: OptimizerState  # empty without a value model of its own
    coefficients: Coefficients
    precision: Precision = "highest"  # of the run; in native numerics always the same
    versions: Mapping[str, Tensor] = field(default_factory=dict)  # older policies that the sampler needs


def take(state: TrainState, chain: str, task: Mapping[str, str], precision: Precision) -> Checkpoint:
    """Make the checkpoint of a state. It refers to the live tensors, so save it before the next step."""
    return Checkpoint(
        iteration=state.iteration,
        chain=chain,
        task=task,
        policy=state.policy_optimizer.weights_to_keep(state.policy),
        value_model=_value_weights(state),
        policy_optimizer=state.policy_optimizer.state(),
        value_optimizer=NO_STATE if state.value_optimizer is None else state.value_optimizer.state(),
        coefficients=state.coefficients,
        precision=precision,
        versions={} if state.versions is None else state.versions.tensors(),
    )


def _value_weights(state: TrainState) -> Mapping[str, Tensor]:
    module, optimizer = state.own_value_module, state.value_optimizer
    return named_weights(module) if optimizer is None else optimizer.weights_to_keep(module)


def _restore_weights(optimizer: Optimizer, module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Restore the weights that the optimizer's own state does not determine. A saved model has all weights."""
    targets = optimizer.weights_to_keep(module)
    copy_named(targets, {n: saved[n] for n in targets if n in saved} if optimizer.is_adapted else saved)


def restore(saved: Checkpoint, state: TrainState, task: Mapping[str, str]) -> None:
    """Load a checkpoint into `state`, made from the same configuration. Raises UserError if they do not fit.

    `task`: digests of the prompts and other inputs. A digest that the checkpoint also has must be equal.
    """
    if changed := [name for name, digest in saved.task.items() if task[name] != digest]:
        raise UserError(
            f"{' and '.join(changed)}: are not what the run had at iteration {saved.iteration}, and a run that goes on "
            "keeps them; restore them, or start a run of its own (model.path = RUN/checkpoints/final)"
        )
    try:
        _restore_weights(state.policy_optimizer, state.policy, saved.policy)
        if state.value_optimizer is None:
            copy_named(named_weights(state.own_value_module), saved.value_model)
        else:
            _restore_weights(state.value_optimizer, state.own_value_module, saved.value_model)
        state.policy_optimizer.load(saved.policy_optimizer)
        if state.value_optimizer is not None:
            state.value_optimizer.load(saved.value_optimizer)
        if state.versions is not None:
            state.versions.restore(saved.versions, saved.iteration)
    except ValueError as error:
        raise UserError(f"the checkpoint of iteration {saved.iteration} does not fit the model: {error}") from error
    state.coefficients, state.iteration = saved.coefficients, saved.iteration


def save(saved: Checkpoint, path: Path) -> str:
    """Write a checkpoint completely or not at all, and return its SHA-256. Raises UserError if writing fails."""
    optimizers = {"policy_optimizer": saved.policy_optimizer, "value_optimizer": saved.value_optimizer}
    groups = {"policy": saved.policy, "value_model": saved.value_model, "versions": saved.versions}
    for name, state in optimizers.items():
        groups |= {f"{name}.first": state.first, f"{name}.second": state.second, f"{name}.factors": state.factors}
    now, returns = saved.coefficients, saved.coefficients.returns
    numbers = now.kl_coef, now.clip_range, now.penalty_coef, returns.mean, returns.squares
    content = {
        "iteration": saved.iteration,
        "chain": saved.chain,
        "task": dict(saved.task),
        "coefficients": {"numbers": [number.hex() for number in numbers], "return_count": returns.count},
        "steps": {name: dict(state.steps) for name, state in optimizers.items()},
    }
    tensors = {f"{group}:{name}": tensor for group, named in groups.items() for name, tensor in named.items()}
    # `law` is the hash of the kernels' known answer, by the name that it has in the folders of earlier runs
    written_by = {"format": FORMAT, "ppo_repro": __version__, "law": _KERNELS[saved.precision]}
    metadata = {**written_by, "checkpoint": json.dumps(content, sort_keys=True)}
    with whole_file(path) as temporary:
        make_folder(path.parent)
        digest = write_tensors(temporary, tensors, metadata)
    return digest


def load(path: Path, digest: str) -> Checkpoint:
    """Read the checkpoint with this SHA-256.

    Raises UserError if it is missing or damaged, or if another version or kernels of other bits wrote it.
    """
    tensors: dict[str, dict[str, Tensor]] = {}
    with _opened(path, digest) as file:
        metadata, content = file.metadata(), _content(path, file)
        for key in file.keys():  # noqa: SIM118 (no mapping)
            group, _, name = key.partition(":")
            tensors.setdefault(group, {})[name] = file.get_tensor(key)
    if metadata["ppo_repro"] != __version__:
        versions = f"version {metadata['ppo_repro']} of ppo_repro wrote it, and this is version {__version__}"
        raise UserError(f"{path}: {versions}; resume with the version that wrote it")
    precision = next((name for name, kernels in _KERNELS.items() if kernels == metadata["law"]), None)
    if precision is None:
        raise UserError(
            f"{path}: the kernels of this ppo_repro give other bits than the kernels that wrote it; resume with the "
            "version that wrote it"
        )
    optimizers = {
        name: OptimizerState(
            first=tensors.get(f"{name}.first", {}),
            second=tensors.get(f"{name}.second", {}),
            steps=steps,
            factors=tensors.get(f"{name}.factors", {}),
        )
        for name, steps in content["steps"].items()
    }
    return Checkpoint(
        iteration=content["iteration"],
        chain=content["chain"],
        task=content["task"],
        policy=tensors.get("policy", {}),
        value_model=tensors.get("value_model", {}),
        policy_optimizer=optimizers["policy_optimizer"],
        value_optimizer=optimizers["value_optimizer"],
        coefficients=_coefficients(content),
        precision=precision,
        versions=tensors.get("versions", {}),
    )


def load_coefficients(path: Path, digest: str) -> Coefficients:
    """Read only the coefficients, which are the same numbers to every version that reads the format.

    Raises UserError if the file is missing or damaged, or has another format.
    """
    with _opened(path, digest) as file:
        return _coefficients(_content(path, file))


@contextmanager
def _opened(path: Path, digest: str) -> Iterator[safe_open]:
    check_file(path, digest)
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read ({' '.join(str(error).split())}); restore it") from error


def _content(path: Path, file: safe_open) -> dict[str, Any]:
    """Return all of a checkpoint but its tensors. Raises UserError for another format."""
    metadata = file.metadata()
    if metadata["format"] != FORMAT:
        formats = f"has format {metadata['format']}, and this ppo_repro reads format {FORMAT}"
        raise UserError(f"{path}: {formats}; use the version that wrote it")
    content: dict[str, Any] = json.loads(metadata["checkpoint"])
    return content


def _coefficients(content: Mapping[str, Any]) -> Coefficients:
    kl_coef, clip_range, penalty_coef, mean, squares = map(float.fromhex, content["coefficients"]["numbers"])
    returns = ReturnStatistics(content["coefficients"]["return_count"], mean, squares)
    return Coefficients(kl_coef, clip_range, penalty_coef, returns)
