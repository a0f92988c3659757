"""Preference pairs of a recorded run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ppo_repro.errors import UserError
from ppo_repro.preferences.pairs import Preference
from ppo_repro.records import reader


def _ids(values: Iterable[int]) -> tuple[int, ...]:
    """Python integers, as prompts and responses have them."""
    return tuple(int(value) for value in values)


def pairs_from_run(run_dir: Path) -> list[Preference]:
    """Every two responses of one iteration to one prompt with different scores, the higher score preferred.

    In the order of the records; equal pairs of one prompt and iteration count once. UserError where the run is damaged,
    incomplete or has no such pair.
    """
    recorded = len(reader.open_manifest(run_dir).iterations)
    columns = ["iteration", "prompt_key", "prompt_ids", "response_ids", "scores"]
    rows = reader.read_sequences(run_dir, columns=columns, iterations=range(recorded))
    pairs: dict[tuple[str, Preference], None] = {}  # in the order in which they are found
    for (iteration, key), group in rows.groupby(["iteration", "prompt_key"], sort=False):
        entries = [(_ids(ids), float(score)) for ids, score in zip(group["response_ids"], group["scores"], strict=True)]
        prompt = _ids(group["prompt_ids"].iloc[0])
        for chosen, high in entries:
            for rejected, low in entries:
                if high > low:
                    pairs[(str(iteration), Preference(str(key), prompt, chosen, rejected))] = None
    if not pairs:
        raise UserError(
            f"{run_dir}: has no two responses to one prompt with different scores in one iteration; "
            "record a run with rollout.samples_per_prompt of 2 or more"
        )
    return [pair for _, pair in pairs]
