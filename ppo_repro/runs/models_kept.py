"""What a language run keeps beside its records: the reference, checkpoints, and at the end the trained models."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors.torch import load_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_repro.config.run import ModelFolder, RunConfig
from ppo_repro.errors import UserError
from ppo_repro.files import SUMS_NAME, check_sums, file_digest, whole_folder, write_sums
from ppo_repro.models.folders import (
    load_value_parameters,
    named_weights,
    save_adapter,
    save_reward_model,
    save_value_model,
    write_model,
)
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
from ppo_repro.runs import checkpoint
from ppo_repro.runs.checkpoint import Checkpoint
from ppo_repro.runs.kind import Start, Store
from ppo_repro.runs.prepare import Prepared

SMALL = 10_000_000  # parameters of a policy; a checkpoint is 24 bytes for each of them, 1 s and 240 MB at most
AUTO = 10  # iterations from one of its checkpoints to the next


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


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """A model and its tokenizer as a transformers folder; appears whole or not at all. UserError where that fails."""
    with whole_folder(folder) as temporary:
        write_model(model, temporary)
        tokenizer.save_pretrained(temporary)
        write_sums(temporary)


def listed(run_dir: Path, *folders: Path) -> dict[str, str]:
    """SHA-256 of the SHA256SUMS of folders by path below the run folder, as the manifest lists them."""
    sums = [folder / SUMS_NAME for folder in folders]
    return {path.relative_to(run_dir).as_posix(): file_digest(path) for path in sums}


@dataclass(frozen=True)
class ModelStore(Store):
    """Keeps models and checkpoints of one run; every method returns what the manifest then lists."""

    run_dir: Path
    config: RunConfig
    prepared: Prepared
    task: str

    def begin(self, files: Mapping[str, str]) -> dict[str, str]:
        """Keep the reference, which no step changes, once for all checkpoints."""
        folder = self.run_dir / REFERENCE
        if not self.every:
            return dict(files)
        if not folder.exists():
            save_model(self.prepared.state.reference, self.prepared.task.tokenizer, folder)
        return {**files, **listed(self.run_dir, folder)}

    @property
    def every(self) -> int:
        """Iterations from one checkpoint to the next; 0 for none."""
        every = self.config.checkpoints.every
        if every != "auto":
            return every
        is_small = sum(weights.numel() for weights in self.prepared.state.policy.parameters()) <= SMALL
        return AUTO if is_small and self.config.iterations > AUTO else 0

    def is_due(self, iteration: int) -> bool:
        return self.every > 0 and iteration % self.every == 0

    def save(self, head: Head, link: str) -> dict[str, str]:
        """Write a checkpoint; `link` is the last one in the chain. Only the newest ones are listed then."""
        state = self.prepared.state
        name = f"{CHECKPOINTS_NAME}/iteration-{state.iteration:06d}.safetensors"
        digest = checkpoint.save(checkpoint.take(state, link, self.task), self.run_dir / name)
        gc.collect()  # see quick_collections
        files = {**head.files, name: digest}
        numbered = checkpoints_of(head.model_copy(update={"files": files}))
        old = sorted(numbered)[: -self.config.checkpoints.keep]
        return {name: of for name, of in files.items() if name not in {numbered[n] for n in old}}

    def put_policy(self, folder: Path) -> bool:
        write_model(self.prepared.state.policy, folder)
        self.prepared.task.tokenizer.save_pretrained(folder)
        return True

    def finish(self, files: Mapping[str, str], link: str) -> dict[str, str]:
        """The trained policy and value model, the policy's adapter in peft's format, a reward model that was made here.

        And the optimizers' state, where no checkpoint of the last iteration has it.
        """
        prepared, state, folder = self.prepared, self.prepared.state, self.run_dir / FINAL
        made = [folder]
        save_model(state.policy, prepared.task.tokenizer, folder)
        if prepared.lora is not None:
            base = folder.with_name("base")
            if isinstance(self.config.model, ModelFolder):
                base = Path(self.config.model.path)
            else:
                save_model(state.reference, prepared.task.tokenizer, base)
                made.append(base)
            made.append(folder.with_name("adapter"))
            with whole_folder(made[-1]) as temporary:
                save_adapter(prepared.lora, temporary, str(base))
                write_sums(temporary)
        if prepared.reward_training is not None and prepared.task.reward_model is not None:
            made.append(folder.with_name("reward_model"))
            save_reward_model(prepared.task.reward_model, prepared.task.tokenizer, made[-1])
        if state.value_model is not None:
            made.append(self.run_dir / VALUE_MODEL)
            config = None if state.value_optimizer is None else state.value_model.trunk.config
            save_value_model(named_weights(state.own_value_module), config, made[-1])
        found = {**files, **listed(self.run_dir, *made)}
        if self.config.checkpoints.final_state and not self.is_due(state.iteration):
            saved = replace(checkpoint.take(state, link, self.task), policy={}, value_model={})
            found[FINAL_STATE] = checkpoint.save(saved, self.run_dir / FINAL_STATE)
        return found


def load_newest(run_dir: Path, recorded: Manifest) -> Start | None:
    """The newest checkpoint that is there, None without one; UserError where it or the reference is damaged.

    An older one is not taken instead: the user decides that, by removing what the message names.
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
    """What the checkpoint of this name below the run folder holds, None: what the run ended with.

    UserError where a file of it is damaged, or the end was not kept.
    """
    saved = _load_end(run_dir, recorded) if name is None else checkpoint.load(run_dir / name, recorded.files[name])
    kept = f"{REFERENCE}/{SUMS_NAME}" in recorded.files
    if kept:
        check_sums(run_dir / REFERENCE)
    return Start(saved, run_dir / REFERENCE if kept else None)


def _load_end(run_dir: Path, recorded: Manifest) -> Checkpoint:
    """The final state with the weights of the trained models."""
    path, policy, value = (run_dir / name for name in (FINAL_STATE, FINAL, VALUE_MODEL))
    if FINAL_STATE not in recorded.files:
        raise UserError(f"{path}: is not there; only runs with checkpoints.final_state that are finished have it")
    check_sums(policy)
    weights = {n: t for file in sorted(policy.glob("*.safetensors")) for n, t in load_file(file).items()}
    value_model = load_value_parameters(value) if value.is_dir() else {}
    return replace(checkpoint.load(path, recorded.files[FINAL_STATE]), policy=weights, value_model=value_model)


def go_on_from(start: Checkpoint, prepared: Prepared) -> None:
    """Bring the state of a run prepared from the reference folder to where `start` is; UserError if it does not fit."""
    if start.task not in ("", task_digest(prepared)):  # a fork may have other prompts
        raise UserError("prompts, answers or end tokens are not what they were when the run started; restore them")
    try:
        checkpoint.restore(start, prepared.state)
    except ValueError as error:
        raise UserError(f"the checkpoint of iteration {start.iteration} does not fit the model: {error}") from error
