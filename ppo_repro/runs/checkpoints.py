"""The checkpoints of one run: when they are due, where they are, which stay, and the models at the end."""

from __future__ import annotations

import gc
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors.torch import load_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_repro.config.algorithm import SeparateValue
from ppo_repro.config.records import MODEL_FILE_BYTES
from ppo_repro.config.reward import RewardModelFolder
from ppo_repro.config.run import ModelFolder, RunConfig
from ppo_repro.errors import UserError
from ppo_repro.files import check_sums, file_digest, remove_folder, whole_folder, write_sums
from ppo_repro.models.folders import (
    load_value_parameters,
    named_weights,
    save_adapter,
    save_reward_model,
    save_value_adapter,
    save_value_model,
    write_model,
)
from ppo_repro.records.contents import (
    CHECKPOINT,
    checkpoint_folder,
    checkpoints_folder,
    final_folder,
    final_state_folder,
    reference_folder,
    sums_digest,
    value_folder,
)
from ppo_repro.records.manifest import Manifest
from ppo_repro.runs import checkpoint_format, checkpoint_index
from ppo_repro.runs.checkpoint_format import Checkpoint, Origin, is_due, keeps_final_state
from ppo_repro.runs.checkpoint_index import Outline
from ppo_repro.runs.prepare import Prepared


@contextmanager
def quick_collections() -> Iterator[None]:
    """Hide the objects that exist now from the garbage collector, so that `gc.collect` is quick inside the block.

    safetensors and json leave cycles of objects behind with every checkpoint. The collector looks at all objects only
    when there are a quarter more of them, or 70,000: thousands of iterations, over which memory would grow.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def task_digest(prepared: Prepared) -> str:
    """SHA-256 of the whole task: problems in order, token ids of the prompts, the tokens that end a response."""
    task = prepared.task
    splits = task.problems.train, task.problems.held_out
    asked = [[(p.key, p.prompt, p.answer, task.prompt_ids[p.key]) for p in problems] for problems in splits]
    content = json.dumps([asked, sorted(prepared.engine.stop_ids)])
    return hashlib.sha256(content.encode()).hexdigest()


def save_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, file_bytes: int = MODEL_FILE_BYTES
) -> None:
    """A model and its tokenizer as a transformers folder; appears whole or not at all. UserError where that fails."""
    with whole_folder(folder) as temporary:
        write_model(model, temporary, file_bytes)
        tokenizer.save_pretrained(temporary)
        write_sums(temporary)


def save_reference(run_dir: Path, prepared: Prepared, file_bytes: int) -> dict[str, str]:
    """Save the reference, which no step changes, once for all checkpoints; returns SHA-256 by file name."""
    folder = reference_folder(run_dir)
    save_model(prepared.state.reference, prepared.task.tokenizer, folder, file_bytes)
    return {name: file_digest(path) for name, path in _files(folder).items()}


@dataclass(frozen=True)
class ModelStore:
    """What a language run keeps beside its records: checkpoints on the way, and the trained models."""

    run_dir: Path
    config: RunConfig
    prepared: Prepared
    origin: Origin

    @property
    def files(self) -> dict[str, str]:
        return sums_digest(self.run_dir, reference_folder(self.run_dir)) if self.origin.reference else {}

    def is_due(self, iteration: int) -> bool:
        return is_due(self.config, iteration)

    def save(self, link: str) -> None:
        """Write a checkpoint, then remove all but the newest ones; UserError where that fails."""
        saved = checkpoint_format.take(self.prepared.state, link, self.origin)
        checkpoint_format.save(saved, checkpoint_folder(self.run_dir, saved.iteration))
        _remove_old(self.run_dir, self.config.checkpoints.keep)
        del saved
        gc.collect()  # see quick_collections

    def put_policy(self, folder: Path) -> None:
        write_model(self.prepared.state.policy, folder, self.config.checkpoints.file_bytes)
        self.prepared.task.tokenizer.save_pretrained(folder)

    def finish(self, link: str) -> dict[str, str]:
        """The trained policy and value model, adapters in peft's format, a reward model that was made here.

        And the optimizers' state, where no checkpoint of the last iteration has it. Returns the digest of the list of
        files of each folder.
        """
        prepared, folder = self.prepared, final_folder(self.run_dir)
        made = [folder]
        tokenizer, file_bytes = prepared.task.tokenizer, self.config.checkpoints.file_bytes
        save_model(prepared.state.policy, tokenizer, folder, file_bytes)
        policy_base, value_base = self._bases()
        made_here = not isinstance(self.config.model, ModelFolder)
        adapted = [
            b for b, lora in ((policy_base, prepared.lora), (value_base, prepared.value_lora)) if lora is not None
        ]
        if made_here and policy_base in adapted:
            save_model(prepared.state.reference, tokenizer, policy_base, file_bytes)
            made.append(policy_base)
        if prepared.lora is not None:
            made.append(folder.with_name("adapter"))
            with whole_folder(made[-1]) as temporary:
                save_adapter(prepared.lora, temporary, str(policy_base))
                write_sums(temporary)
        if prepared.value_lora is not None and prepared.state.value_model is not None:
            made.append(folder.with_name("value_adapter"))
            with whole_folder(made[-1]) as temporary:
                save_value_adapter(prepared.value_lora, prepared.state.value_model, temporary, str(value_base))
                write_sums(temporary)
        if prepared.reward_training is not None and prepared.task.reward_model is not None:
            made.append(folder.with_name("reward_model"))
            save_reward_model(prepared.task.reward_model, tokenizer, made[-1])
        state = prepared.state
        if state.value_model is not None:
            made.append(value_folder(self.run_dir))
            config = None if state.value_optimizer is None else state.value_model.trunk.config
            save_value_model(named_weights(state.own_value_module), config, made[-1])
        files = {name: digest for model in made for name, digest in sums_digest(self.run_dir, model).items()}
        if keeps_final_state(self.config, state.iteration):
            files |= self._keep_state(link)
        return files

    def _keep_state(self, link: str) -> dict[str, str]:
        """What a checkpoint has beside the weights; returns the digest of its index."""
        folder = final_state_folder(self.run_dir)
        saved = checkpoint_format.take(self.prepared.state, link, self.origin)
        checkpoint_format.save(replace(saved, policy={}, value_model={}), folder)
        index = folder / checkpoint_index.INDEX_NAME
        return {index.relative_to(self.run_dir).as_posix(): file_digest(index)}

    def _bases(self) -> tuple[Path, Path]:
        """Folders of the models that policy and value model started as."""
        model, value, term = self.config.model, self.config.value, self.config.reward.model
        beside = checkpoints_folder(self.run_dir)
        policy = Path(model.path) if isinstance(model, ModelFolder) else beside / "base"
        if not isinstance(value, SeparateValue) or value.init == "policy":
            return policy, policy
        return policy, Path(term.path) if isinstance(term, RewardModelFolder) else beside / "reward_model"


def open_store(run_dir: Path, config: RunConfig, prepared: Prepared, start: Checkpoint | None) -> ModelStore:
    """The store of a prepared run, whose state is where `start` is."""
    if start is None:
        reference = save_reference(run_dir, prepared, config.checkpoints.file_bytes) if config.checkpoints.every else {}
        return ModelStore(run_dir, config, prepared, Origin(task_digest(prepared), reference))
    _remove_old(run_dir, config.checkpoints.keep)
    return ModelStore(run_dir, config, prepared, start.origin)


def go_on_from(start: Checkpoint, prepared: Prepared) -> None:
    """Bring the state of a run prepared from the reference folder to where `start` is; UserError if it does not fit."""
    if task_digest(prepared) != start.origin.task:
        raise UserError("prompts, answers or end tokens are not what they were when the run started; restore them")
    try:
        checkpoint_format.restore(start, prepared.state)
    except ValueError as error:
        raise UserError(f"the checkpoint of iteration {start.iteration} does not fit the model: {error}") from error


def _remove_old(run_dir: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints, and what killed processes left behind."""
    try:
        for _, folder in _checkpoints(run_dir)[:-keep]:
            remove_folder(folder)
        for leftover in checkpoints_folder(run_dir).glob("iteration-*.*"):
            shutil.rmtree(leftover)
    except OSError as error:
        raise UserError(f"{checkpoints_folder(run_dir)}: cannot be changed ({error.strerror})") from error


def load_newest(run_dir: Path, recorded: Manifest) -> Checkpoint | None:
    """The newest checkpoint, verified against the records, or None; UserError where any or the reference is damaged.

    An older one is not taken instead: the user decides that, by removing what the message names.
    """
    folders = _checkpoints(run_dir)
    if not folders:
        return None
    number, folder = folders[-1]
    try:
        saved = checkpoint_format.load(folder)
        _require_of_run(saved, number, folder, recorded)
    except UserError as error:
        otherwise = f"resume from iteration {folders[-2][0]}" if len(folders) > 1 else "start from the beginning"
        raise UserError(f"{error}; remove {folder} to {otherwise}") from error
    for number, older in folders[:-1]:
        try:
            _require_of_run(checkpoint_index.check(older), number, older, recorded)
        except UserError as error:
            raise UserError(f"{error}; remove {older} to resume from iteration {saved.iteration} without it") from error
    try:
        _require_reference(reference_folder(run_dir), saved.origin.reference)
    except UserError as error:
        raise UserError(f"{error}; remove {checkpoints_folder(run_dir)} to start from the beginning") from error
    return saved


def load_final(run_dir: Path, recorded: Manifest) -> Checkpoint:
    """The state a finished run ended with, as a checkpoint; UserError where it is damaged or was not kept."""
    folder = checkpoint_folder(run_dir, recorded.num_iterations)
    if folder.is_dir():
        saved = checkpoint_format.load(folder)
        _require_of_run(saved, recorded.num_iterations, folder, recorded)
        return saved
    state, policy, value = final_state_folder(run_dir), final_folder(run_dir), value_folder(run_dir)
    if not state.is_dir():
        raise UserError(f"{state}: is not there; only runs with checkpoints.final_state that are finished have it")
    saved = checkpoint_format.load(state)
    _require_of_run(saved, recorded.num_iterations, state, recorded)
    check_sums(policy)
    weights = {n: t for file in sorted(policy.glob("*.safetensors")) for n, t in load_file(file).items()}
    value_model = load_value_parameters(value) if value.is_dir() else {}
    return replace(saved, policy=weights, value_model=value_model)


def check_all(run_dir: Path, recorded: Manifest) -> int:
    """Verify every checkpoint and the reference; returns their number. UserError names the damaged file."""
    state = final_state_folder(run_dir)
    if state.is_dir():
        _require_of_run(checkpoint_index.check(state), recorded.num_iterations, state, recorded)
    folders = _checkpoints(run_dir)
    for number, folder in folders:
        saved = checkpoint_index.check(folder)
        _require_of_run(saved, number, folder, recorded)
        _require_reference(reference_folder(run_dir), saved.reference)
    return len(folders)


def _checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """Number and folder of every checkpoint, oldest first."""
    folder = checkpoints_folder(run_dir)
    entries = folder.iterdir() if folder.is_dir() else ()
    named = [(CHECKPOINT.fullmatch(path.name), path) for path in entries]
    return sorted((int(name[1]), path) for name, path in named if name)


def _files(folder: Path) -> dict[str, Path]:
    """Every file by its path below the folder."""
    return {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}


def _require_of_run(saved: Checkpoint | Outline, number: int, folder: Path, recorded: Manifest) -> None:
    if saved.iteration != number:
        raise UserError(f"{folder}: holds iteration {saved.iteration}; the folder was renamed")
    count = len(recorded.iterations)
    if number > count:
        raise UserError(f"{folder}: the run has {count} recorded iterations; the checkpoint is not of this run")
    if saved.chain != recorded.iterations[number - 1].chain:
        raise UserError(f"{folder}: follows other records than this run's; the checkpoint is not of this run")


def _require_reference(folder: Path, expected: Mapping[str, str]) -> None:
    # an additional file could change what is loaded as much as a changed one
    for name in sorted(set(_files(folder)) - set(expected)):
        raise UserError(f"{folder / name}: was not there when the run started; the reference was changed")
    for name, digest in expected.items():
        checkpoint_index.check_file(folder / name, digest)
