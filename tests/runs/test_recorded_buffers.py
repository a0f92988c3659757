"""Every field of every stage is a column, with the bits that the loop held."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor

from ppo_repro.base.watcher import Silent
from ppo_repro.buffers import (
    Advantages,
    ForwardPass,
    Iteration,
    MinibatchUpdate,
    PolicyUpdate,
    Prompts,
    Rewards,
    Rollout,
    Spans,
    ValueUpdate,
    WeightDigests,
)
from ppo_repro.config.files import load_config
from ppo_repro.ppo.corrections import correction_names
from ppo_repro.ppo.objectives import flag_names
from ppo_repro.records import digests, schema
from ppo_repro.runs.language import LanguageKind
from tests.support.paths import TINY
from tests.support.turns import turns_config

COLUMNS = {(table.name, column.name): column for table in schema.TABLES for column in table.columns}
Tables = dict[str, pa.Table]
# the tables of each stage, and its columns that have another name than their field
WHERE: dict[type, tuple[tuple[str, ...], dict[str, str]]] = {
    Prompts: (("sequences",), {}),
    Spans: (("tokens",), {}),
    Rollout: (
        ("tokens", "sequences"),
        {"response_ids": "token_id", "lengths": "response_length", "routes": "rollout_routes"},
    ),
    ForwardPass: (("tokens", "sequences"), {"routes": "policy_routes"}),
    Rewards: (("tokens", "sequences"), {}),
    Advantages: (("tokens",), {}),
    PolicyUpdate: (
        ("updates", "steps"),
        {"clip_flags": "clip_flag", "losses": "policy_losses", "corrections": "correction", "loss": "policy_loss"},
    ),
    ValueUpdate: (
        ("updates", "steps"),
        {name: f"value_{name}" for name in ("clipped", "losses", "loss", "clip_fraction", "grad_norm")},
    ),
    MinibatchUpdate: (("steps", "updates"), {}),
    WeightDigests: (("steps",), {}),
}
# other stages, functions of the configuration, and what is recorded in several columns
ELSEWHERE = {"prompts", "spans", "episodes", "temperature", "in_losses", "policy", "value", "tokens"}


def ids_of(kept_tokens: Tensor) -> list[list[int]] | None:
    """The eligible tokens of each position, one bit after the other."""
    if kept_tokens.shape[1] == 0:
        return None
    return [[i for i in range(8 * len(row)) if row[i // 8] >> (7 - i % 8) & 1] for row in kept_tokens.tolist()]


ENCODED: dict[str, Callable[[Any], Any]] = {
    "kept_tokens": ids_of, "clip_flags": flag_names,
    "corrections": lambda changes: None if changes is None else correction_names(changes),
}  # fmt: skip


def bits(kind: str, value: Any) -> Any:
    """One value so that it equals another one exactly when all bits do."""
    if value is None or kind == "string":
        return value
    dtype = np.dtype(digests.ELEMENTS.get(kind, kind))
    array = value.numpy() if isinstance(value, Tensor) else np.asarray(value)
    assert not isinstance(value, Tensor) or array.dtype.kind != "f" or array.dtype == dtype, "recorded in its own type"
    return np.atleast_1d(array.astype(dtype)).tobytes()


def recorded_rows(table: pa.Table, column: schema.Column) -> list[Any]:
    found = table.column(column.name)
    if column.kind in digests.ELEMENTS:
        return [bits(column.kind, item.values.to_numpy()) if item.is_valid else None for item in found]
    return [bits(column.kind, item.as_py()) for item in found]


def unequal(item: Iteration, tables: Tables) -> set[str]:
    """The fields whose recorded values are not those of the buffers; a field without a column is an error."""
    r, updates = item.rollout, item.updates
    parts: list[tuple[type, Sequence[Any]]] = [
        *((Prompts, [r.prompts]), (Spans, r.spans), (Rollout, [r]), (ForwardPass, [item.forward])),
        *((Rewards, [item.rewards]), (Advantages, [item.advantages]), (MinibatchUpdate, updates)),
        (WeightDigests, item.digests),
        *((PolicyUpdate, [u.policy for u in updates]), (ValueUpdate, [u.value for u in updates])),
    ]
    wrong = set()
    for stage, instances in parts:
        names, renamed = WHERE[stage]
        for field in (field.name for field in dataclasses.fields(stage) if field.name not in ELSEWHERE):
            name = renamed.get(field, field)
            table = next(table for table in names if (table, name) in COLUMNS)
            column, held = COLUMNS[table, name], list[Any]()
            if column.only_with is not None and name not in tables[table].column_names:
                assert getattr(instances[0], field) is None
                continue
            for index, instance in enumerate(instances):
                value = None if instance is None else ENCODED.get(field, lambda x: x)(getattr(instance, field))
                if table == "steps":
                    held.append(value)
                elif value is None or (isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] == 0):
                    rows = len(updates[index].tokens) if table == "updates" else tables[table].num_rows
                    held += [False if column.kind == "bool" else None] * rows
                else:
                    held += list(value)
            if [bits(column.kind, value) for value in held] != recorded_rows(tables[table], column):
                wrong.add(f"{stage.__name__}.{field}")
    return wrong


COMMON = ("ppo.iterations=2", "records.level=deep")
OPTIONS = {
    "separate value": (
        *("rollout.top_p=0.9", "rollout.temperature=1.2", "model.warm_start_steps=3", "reward.whiten=full"),
        *(
            "kl.estimator=exact",
            "kl.direction=reference_policy",
            "advantages.whiten=full",
            "rollout.mismatch_sigma=0.3",
        ),
        *("value.normalize_returns=true", "value.clip_range=0.2", "value.epochs=3", "ppo.ratio_anchor=old"),
        "ppo.importance_weights={kind: truncated, level: token}",
        "ppo.objective={kind: kl_penalty, penalty_coef: 0.5, target_kl: 0.01}",
    ),
    "value head": (
        *("rollout.top_k=5", "value={kind: head}", "kl={placement: loss, estimator: exact}"),
        "ppo.objective={kind: adaptive_clip, target_kl: 0.01}",
    ),
    "encoded again": (
        *("model.warm_start_steps=0", "model.vocab_size=40", "mismatch.trainer.retokenize=1"),
        "mismatch.sampler.lag=1",
    ),
    "turns": (),
}


@dataclass(frozen=True)
class Recorded:
    """Iterations of a run and their tables."""

    items: tuple[Iteration, ...]
    tables: tuple[Tables, ...]


@pytest.fixture(scope="module", params=OPTIONS)
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder: Path = tmp_path_factory.mktemp("run")
    options = [*COMMON, *OPTIONS[request.param]]
    config = turns_config(folder, *options) if request.param == "turns" else load_config(TINY, options)
    with LanguageKind(Silent()).open(config, None) as execution:
        items = tuple(execution.iterations())
        return Recorded(items, tuple(execution.tables(item) for item in items))


def test_what_is_recorded_is_what_the_loop_held(recorded: Recorded) -> None:
    for item, tables in zip(recorded.items, recorded.tables, strict=True):
        assert unequal(item, tables) == set()
        places = np.cumsum(item.rollout.lengths.numpy()) - item.rollout.lengths.numpy()
        of_updates = places[tables["updates"].column("sequence").to_numpy()]
        tokens = of_updates + tables["updates"].column("position").to_numpy()
        assert tokens.tolist() == torch.cat([u.tokens for u in item.updates]).tolist()
        for name, values in (("kl_penalty_sum", item.rewards.kl_penalties), ("reward_sum", item.rewards.rewards)):
            sums = [math.fsum(part.tolist()) for part in values.split(item.rollout.lengths.tolist())]
            assert tables["sequences"].column(name).to_pylist() == sums
        for policy in filter(None, (u.policy for u in item.updates)):  # whatever the anchor of the ratio is
            ratios = policy.ratios.double()
            assert policy.approx_kl == pytest.approx((ratios - 1 - ratios.log()).mean().item(), rel=1e-3, abs=1e-9)
        (row,) = tables["iterations"].to_pylist()
        assert (row["kl_coef"], row["clip_range"] or 0.0) == (item.coefficients.kl_coef, item.coefficients.clip_range)


def test_a_buffer_with_another_bit_is_noticed(recorded: Recorded) -> None:
    item, tables, checked = recorded.items[1], recorded.tables[1], 0

    def other(value: Tensor) -> Tensor:
        changed = value.clone()
        last = changed.view(-1)[-1]
        changed.view(-1)[-1] = (
            ~last if value.dtype == torch.bool else last + 1 if last.is_floating_point() else 1 - last
        )
        return changed

    for stage in ("rollout", "forward", "rewards", "advantages"):
        held = getattr(item, stage)
        for field in dataclasses.fields(held):
            value = getattr(held, field.name)
            if isinstance(value, Tensor) and value.numel() and field.name not in ("in_losses", "lengths"):
                changed = dataclasses.replace(held, **{field.name: other(value)})
                found = unequal(dataclasses.replace(item, **{stage: changed}), tables)
                assert found == {f"{type(held).__name__}.{field.name}"}
                checked += 1
    assert checked >= 18
