"""Checkpoints, safetensors files from which a run continues to the same bits; and saved models.

A checkpoint file appears complete or not at all, and the manifest lists its SHA-256. Random streams are functions of
seed and iteration, so a checkpoint stores only the iteration number for them.
"""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ppo_repro import __version__
from ppo_repro.base.errors import UserError
from ppo_repro.base.files import SUMS_NAME, check_sums, file_digest, make_folder, whole_file
from ppo_repro.base.mode import Precision
from ppo_repro.base.output import size
from ppo_repro.buffers import Coefficients, ReturnStatistics
from ppo_repro.config.run import ModelFolder, RunConfig
from ppo_repro.models.folders import load_value_parameters, named_weights, save_model, write_tensors
from ppo_repro.models.state import TrainState
from ppo_repro.numerics.adamw import OptimizerState
from ppo_repro.numerics.library import KNOWN_ANSWER, KNOWN_ANSWER_HIGH
from ppo_repro.numerics.optimizer import Optimizer
from ppo_repro.numerics.weights import copy_named
from ppo_repro.records.folder import (
    CHECKPOINTS_NAME,
    FINAL,
    FINAL_STATE,
    REFERENCE,
    VALUE_MODEL,
    checkpoints_of,
    starts_of,
)
from ppo_repro.records.manifest import Head, Manifest
from ppo_repro.records.reader import check_file

FORMAT = "6"
# of the kernels that wrote a checkpoint, by its run's precision; with another one it would continue as another run
_KERNELS: dict[Precision, str] = {
    "highest": f"known answer {KNOWN_ANSWER:016x}",
    "high": f"known answer {KNOWN_ANSWER_HIGH:016x}",
}
NOTHING = OptimizerState(first={}, second={}, steps={})
SMALL = 10_000_000  # parameters that a model trains; a checkpoint of two is 24 bytes for each, 1 s and 240 MB at most
AUTO = 10  # iterations from one of its checkpoints to the next
FLOAT, MOMENTS = 4, 8  # bytes of a number of float32, and of AdamW's two moments of a weight


@dataclass(frozen=True)
class Checkpoint:
    """A run after `iteration` iterations. Tensors are by parameter name; adapted weights follow from their factors."""

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


@dataclass(frozen=True)
class Start:
    """The state from which a run continues."""

    checkpoint: Checkpoint
    reference: Path | None  # the model that the run started as; None if its configuration makes or loads it


def take(state: TrainState, chain: str, task: Mapping[str, str], precision: Precision) -> Checkpoint:
    """Make the checkpoint of a state. It refers to the live tensors, so save it before the next step."""
    return Checkpoint(
        iteration=state.iteration,
        chain=chain,
        task=task,
        policy=state.policy_optimizer.weights_to_keep(state.policy),
        value_model=_value_weights(state),
        policy_optimizer=state.policy_optimizer.state(),
        value_optimizer=NOTHING if state.value_optimizer is None else state.value_optimizer.state(),
        coefficients=state.coefficients,
        precision=precision,
        versions={} if state.versions is None else state.versions.tensors(),
    )


def _value_weights(state: TrainState) -> Mapping[str, Tensor]:
    module, optimizer = state.own_value_module, state.value_optimizer
    return named_weights(module) if optimizer is None else optimizer.weights_to_keep(module)


def _restore_weights(optimizer: Optimizer, module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Restore the weights that the optimizer's own state does not determine; a saved model has all weights."""
    targets = optimizer.weights_to_keep(module)
    copy_named(targets, {n: saved[n] for n in targets if n in saved} if optimizer.is_adapted else saved)


def restore(saved: Checkpoint, state: TrainState, task: Mapping[str, str]) -> None:
    """Load a checkpoint into `state`, made from the same configuration. Raises UserError if they do not fit.

    `task`: digests of the prompts and other inputs; a digest that the checkpoint also has must be equal.
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
        found = f"version {metadata['ppo_repro']} of ppo_repro wrote it, and this is version {__version__}"
        raise UserError(f"{path}: {found}; resume with the version that wrote it")
    precision = next((name for name, kernels in _KERNELS.items() if kernels == metadata["law"]), None)
    if precision is None:
        raise UserError(
            f"{path}: the kernels of this ppo_repro give other bits than the kernels that wrote it; resume with the "
            "version that wrote it"
        )

    def optimizer(name: str) -> OptimizerState:
        first, second, factors = (tensors.get(f"{name}.{of}", {}) for of in ("first", "second", "factors"))
        return OptimizerState(first=first, second=second, steps=content["steps"][name], factors=factors)

    return Checkpoint(
        iteration=content["iteration"],
        chain=content["chain"],
        task=content["task"],
        policy=tensors.get("policy", {}),
        value_model=tensors.get("value_model", {}),
        policy_optimizer=optimizer("policy_optimizer"),
        value_optimizer=optimizer("value_optimizer"),
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
        found = f"has format {metadata['format']}, and this ppo_repro reads format {FORMAT}"
        raise UserError(f"{path}: {found}; use the version that wrote it")
    content: dict[str, Any] = json.loads(metadata["checkpoint"])
    return content


def _coefficients(content: Mapping[str, Any]) -> Coefficients:
    kl_coef, clip_range, penalty_coef, mean, squares = map(float.fromhex, content["coefficients"]["numbers"])
    returns = ReturnStatistics(content["coefficients"]["return_count"], mean, squares)
    return Coefficients(kl_coef, clip_range, penalty_coef, returns)


def load_newest(run_dir: Path, recorded: Manifest) -> Start | None:
    """Load the newest checkpoint; None if there is none. Raises UserError if it or the reference is damaged.

    An older checkpoint is never loaded instead: the user decides that by removing the files that the message names.
    """
    there = starts_of(run_dir, recorded)
    if not there:
        return None
    newest = max(there)
    before = [number for number in there if number < newest]
    otherwise = f"resume from iteration {max(before)}" if before else "start from the beginning"
    try:
        start = load_start(run_dir, recorded, there[newest])
    except UserError as error:
        raise UserError(f"{error}; or remove {run_dir / there[newest]} to {otherwise}") from error
    if start.checkpoint.chain != recorded.iterations[newest - 1].chain:
        raise UserError(f"{run_dir / there[newest]}: is not of this run; remove it to {otherwise}")
    return start


def load_start(run_dir: Path, recorded: Manifest, name: str | None) -> Start:
    """Load the checkpoint `name` below the run folder; None loads the state in which the run ended.

    Raises UserError if one of its files is damaged.
    """
    if name is None:
        check_sums(run_dir / FINAL)
        files, value = sorted((run_dir / FINAL).glob("*.safetensors")), run_dir / VALUE_MODEL
        policy = {name: tensor for file in files for name, tensor in load_file(file).items()}
        value_model = load_value_parameters(value) if value.is_dir() else {}
        state = load(run_dir / FINAL_STATE, recorded.files[FINAL_STATE])
        saved = replace(state, policy=policy, value_model=value_model)
    else:
        saved = load(run_dir / name, recorded.files[name])
    is_kept = f"{REFERENCE}/{SUMS_NAME}" in recorded.files
    if is_kept:
        check_sums(run_dir / REFERENCE)
    return Start(saved, run_dir / REFERENCE if is_kept else None)


def start_files(run_dir: Path, recorded: Manifest, name: str | None) -> list[Path]:
    """Return the files that `load_start` reads."""
    folders = [run_dir / REFERENCE] if f"{REFERENCE}/{SUMS_NAME}" in recorded.files else []
    if name is None:
        folders += [run_dir / FINAL, run_dir / VALUE_MODEL]
    inside = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return [run_dir / (name or FINAL_STATE), *inside]


def parameter_bytes(module: nn.Module) -> int:
    """Return the bytes of a module's parameters; tied parameters count once."""
    return sum(parameter.nbytes for parameter in module.parameters())


def listed(run_dir: Path, *folders: Path) -> dict[str, str]:
    """Return the digest of each folder's SHA256SUMS, by path relative to the run folder."""
    sums = [folder / SUMS_NAME for folder in folders]
    return {path.relative_to(run_dir).as_posix(): file_digest(path) for path in sums}


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a language run: when they are due, what they need beside them, and which stay."""

    config: RunConfig
    state: TrainState
    tokenizer: PreTrainedTokenizerBase
    task: Mapping[str, str]  # its digests
    is_adapted: bool  # whether the policy has adapters

    @cached_property
    def every(self) -> int:
        """Return the number of iterations between checkpoints; 0 if there are none."""
        every = self.config.checkpoints.every
        if every != "auto":
            return every
        return AUTO if max(self._trained) <= SMALL and self.config.iterations > AUTO else 0

    @property
    def keeps_reference(self) -> bool:
        """Return whether checkpoints need a copy of the reference.

        The reference of an adapted model folder is loaded again.
        """
        return self.every > 0 and not (self.is_adapted and isinstance(self.config.model, ModelFolder))

    @property
    def keeps_final_state(self) -> bool:
        """Return whether the optimizers' state at the end is saved, because no checkpoint has it."""
        return self.config.checkpoints.final_state and not self.is_due(self.config.iterations)

    @property
    def _trained(self) -> list[int]:
        optimizers = self.state.policy_optimizer, self.state.value_optimizer
        return [optimizer.trained_count for optimizer in optimizers if optimizer is not None]

    def _take(self, link: str) -> Checkpoint:
        return take(self.state, link, self.task, self.config.numerics.precision)

    def is_due(self, iteration: int) -> bool:
        """Return whether a checkpoint is saved after `iteration` iterations."""
        return self.every > 0 and iteration % self.every == 0

    def bytes_to_keep(self) -> int:
        """Return a lower bound for the bytes of reference, checkpoints and final state in a complete run folder."""
        count, keep = self.config.iterations // self.every if self.every else 0, self.config.checkpoints.keep
        if keep != "all":  # a new one is written before an old one is removed
            count = min(keep + 1, count)
        of_weight = count * (FLOAT + MOMENTS) + self.keeps_final_state * MOMENTS
        return self.keeps_reference * parameter_bytes(self.state.reference) + sum(self._trained) * of_weight

    def keep_start(self, run_dir: Path) -> dict[str, str]:
        """Save the reference, which no step changes, once for all checkpoints; return its digests."""
        folder = run_dir / REFERENCE
        if not self.keeps_reference:
            return {}
        if not folder.exists():
            save_model(self.state.reference, self.tokenizer, folder)
        return listed(run_dir, folder)

    def give_moments(self) -> None:
        """Send the first process what it lacks for a checkpoint; every other process calls this when it saves one."""
        self._take("")

    def save(self, run_dir: Path, head: Head, link: str) -> dict[str, str]:
        """Save the present state, and return the run's files with their digests, of checkpoints only the newest ones.

        `link`: last link of the records' chain.
        """
        name = f"{CHECKPOINTS_NAME}/iteration-{self.state.iteration:06d}.safetensors"
        digest = save(self._take(link), run_dir / name)
        gc.collect()  # quick, because `language` hides all older objects from it
        files, keep = {**head.files, name: digest}, self.config.checkpoints.keep
        numbered = checkpoints_of(head.model_copy(update={"files": files}))
        old = [] if keep == "all" else sorted(numbered)[:-keep]
        return {path: of for path, of in files.items() if path not in {numbered[n] for n in old}}

    def save_final(self, run_dir: Path, link: str) -> dict[str, str]:
        """Save the optimizers' state at the end if no checkpoint has it; return its digest."""
        if not self.keeps_final_state:
            return {}
        saved = replace(self._take(link), policy={}, value_model={})
        return {FINAL_STATE: save(saved, run_dir / FINAL_STATE)}


def require_room(run_dir: Path, to_keep: int) -> None:
    """Raise UserError if the disk lacks room for `to_keep` bytes of models and checkpoints.

    Models and checkpoints that an earlier process of the run left count as written.
    """
    kept = sum(path.stat().st_size for path in (run_dir / CHECKPOINTS_NAME).rglob("*") if path.is_file())
    missing, free = to_keep - kept, shutil.disk_usage(run_dir).free
    if missing > free:
        raise UserError(
            f"{run_dir}: not enough room: models and checkpoints need at least {size(missing)} more, and "
            f"{size(free)} are free; make room there or choose another --out"
        )
