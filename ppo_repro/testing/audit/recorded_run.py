"""Read the input of an audit from a recorded run: an iteration's responses, and the weights that sampled them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from transformers import PreTrainedModel

from ppo_repro.base.errors import UserError
from ppo_repro.config.kinds import LANGUAGE
from ppo_repro.config.model import ModelFolder
from ppo_repro.config.run import RunConfig
from ppo_repro.models.folders import named_weights
from ppo_repro.numerics.weights import copy_named
from ppo_repro.records import reader
from ppo_repro.records.folder import REFERENCE, load_recorded_config, starts_of
from ppo_repro.records.located import located_tree
from ppo_repro.runs.checkpoint import load


@dataclass(frozen=True)
class RunDump:
    """Responses of one iteration, and the settings and weights that sampled them."""

    iteration: int
    rows: pd.DataFrame  # a row per response, with the columns of the format `ppo_repro`
    model: Path  # folder of the weights that the run started with
    checkpoint: tuple[Path, str] | None  # the weights of the iteration, and their SHA-256; None: those of `model`
    config: RunConfig

    def weights(self, start: PreTrainedModel) -> PreTrainedModel:
        """Return the model that sampled; `start` is the model before training."""
        if self.checkpoint is None:
            return start
        model = copy.deepcopy(start)
        copy_named(named_weights(model), load(*self.checkpoint).policy)
        return model


def dump_of_run(run_dir: Path) -> RunDump:
    """Return the newest iteration of the run itself whose weights are in a checkpoint; else the first iteration.

    Raises UserError for a run without responses or without saved weights.
    """
    recorded = reader.open_manifest(run_dir, allow_incomplete=True)
    own = recorded.own_iterations
    if recorded.kind != LANGUAGE or not own:
        raise UserError(f"{run_dir}: has no responses of a language run to audit; give another run, or a dump")
    config = load_recorded_config(run_dir)
    if config.lora is not None and recorded.origin is not None:
        raise UserError(f"{run_dir}: forks a run with LoRA, and kept adapters alone; audit the run that was forked")
    # a checkpoint of an adapter is no whole model
    starts = starts_of(run_dir, recorded) if config.lora is None else {}
    kept = {number: name for number, name in starts.items() if number in own}
    iteration, model = max(kept, default=0), run_dir / REFERENCE
    if iteration not in own or (not model.is_dir() and (kept or not isinstance(config.model, ModelFolder))):
        raise UserError(f"{run_dir}: kept no weights that it sampled with; run it with checkpoints.every = 1")
    if not model.is_dir():
        model = Path(located_tree(run_dir, recorded)["model"]["path"])
    checkpoint = (run_dir / kept[iteration], recorded.files[kept[iteration]]) if kept else None
    return RunDump(iteration, _rows(run_dir, iteration), model, checkpoint, config)


def _rows(run_dir: Path, iteration: int) -> pd.DataFrame:
    sides = ["rollout_logprobs", "old_logprobs"]
    columns = ["sequence", *sides]
    tokens = reader.read_tokens(run_dir, iterations=[iteration], columns=columns, allow_incomplete=True)
    columns = ["prompt_ids", "response_ids", "episode_ids", "is_forced"]
    rows = reader.read_sequences(run_dir, iterations=[iteration], columns=columns, allow_incomplete=True)
    lists = tokens.groupby("sequence")[sides].agg(list)
    if rows["is_forced"].isna().all():
        return rows.assign(**{name: lists[name].to_list() for name in sides})
    # the environment's tokens are context, and have no log-probs
    drawn = [[not forced for forced in response] for response in rows["is_forced"]]
    wide = {
        name: [_spread(is_drawn, logprobs) for is_drawn, logprobs in zip(drawn, lists[name], strict=True)]
        for name in sides
    }
    rows = rows.assign(response_ids=rows["episode_ids"], mask=pd.Series(drawn, rows.index))
    return rows.assign(**{name: pd.Series(numbers, rows.index) for name, numbers in wide.items()})


def _spread(drawn: list[bool], logprobs: list[float]) -> list[float]:
    """Return one number for each token of an episode: its log-prob if it was drawn, else 0."""
    numbers = iter(logprobs)
    return [next(numbers) if is_drawn else 0.0 for is_drawn in drawn]
