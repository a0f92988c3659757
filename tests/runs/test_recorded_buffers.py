"""Every field of every stage is a column, with the bits that the loop held."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import torch
from torch import Tensor

from ppo_repro import buffers
from ppo_repro.buffers import Iteration, ReturnStatistics
from ppo_repro.config.files import load_config
from ppo_repro.ppo.corrections import correction_names
from ppo_repro.ppo.objective import flag_names
from ppo_repro.records import digests, schema
from ppo_repro.runs.language import LanguageKind
from ppo_repro.watcher import Silent
from tests.support.paths import TINY
from tests.support.turns import turns_config

RECORDED = (*schema.TABLES, schema.EVALUATIONS)
COLUMNS = {(table.name, column.name): column for table in RECORDED for column in table.columns}
STAGES = [
    kind for _, kind in inspect.getmembers(buffers, dataclasses.is_dataclass) if kind.__module__ == buffers.__name__
]

Field = tuple[str, str]  # stage type and field
Tables = dict[str, pa.Table]


# tables in which the fields of a stage are columns
TABLES_OF = {
    "Prompts": ("sequences",),
    "Spans": ("tokens",),
    "Rollout": ("tokens", "sequences"),
    "Episode": ("sequences",),
    "ForwardPass": ("tokens", "sequences"),
    "Rewards": ("tokens", "sequences"),
    "Advantages": ("tokens",),
    "TensorGradient": ("steps",),
    "PolicyUpdate": ("updates", "steps"),
    "ValueUpdate": ("updates", "steps"),
    "MinibatchUpdate": ("steps", "updates"),
    "Iteration": ("iterations",),
    "Coefficients": ("iterations",),
    "Evaluation": ("evaluations",),
}
# columns with another name than their field
TEXTS = {"keys": "prompt_key", "texts": "prompt", "answers": "answer"}
RESPONSES = {"responses": "response", "finish_reasons": "finish_reason"}
TENSORS = {"norm": "tensor_grad_norms", "max_abs": "tensor_grad_max_abs", "zeros": "tensor_grad_zeros"}
RENAMED: dict[str, dict[str, str]] = {
    "Prompts": {**TEXTS, "sample_indices": "sample_index", "seeds": "seed"},
    "Rollout": {
        **RESPONSES,
        **{"response_ids": "token_id", "lengths": "response_length", "servers": "server", "latencies": "latency"},
        **{name: f"rollout_{name}" for name in ("top_ids", "top_logits", "routes", "policy_versions")},
    },
    "Episode": {"ids": "episode_ids", "turns": "response"},
    "ForwardPass": {name: f"policy_{name}" for name in ("top_ids", "top_logits", "routes")},
    "PolicyUpdate": {
        **{"clip_flags": "clip_flag", "losses": "policy_losses", "corrections": "correction", "loss": "policy_loss"}
    },
    "ValueUpdate": {
        **{name: f"value_{name}" for name in ("clipped", "losses", "loss", "clip_fraction", "grad_norm")},
    },
    "Iteration": {"index": "iteration"},
    "Evaluation": {**TEXTS, **RESPONSES},
}
STATISTICS = ("count", "mean", "squares")
DERIVED = {("MinibatchUpdate", "tokens"), ("Iteration", "seconds"), *(("ReturnStatistics", x) for x in STATISTICS)}
DERIVED |= {("Coefficients", "clip_range"), ("Coefficients", "penalty_coef")}
# functions of the configuration alone
CONFIGURED = {("Rollout", "temperature"), ("Rollout", "in_losses")}


def columns_of(field: Field) -> tuple[Field, ...]:
    """Where a field is recorded: table and column."""
    stage, name = field
    if stage == "TensorGradient":
        return tuple(("steps", f"{model}_{TENSORS.get(name, 'tensors')}") for model in ("policy", "value"))
    column = RENAMED.get(stage, {}).get(name, name)
    found = [(table, column) for table in TABLES_OF.get(stage, ()) if (table, column) in COLUMNS]
    return tuple(found[:1])


def fields_of(stages: Sequence[type]) -> set[Field]:
    """Every field but those that hold another stage, whose own fields are here."""
    names = "|".join(stage.__name__ for stage in stages)
    return {
        (stage.__name__, field.name)
        for stage in stages
        for field in dataclasses.fields(stage)
        if not re.search(rf"\b({names})\b", str(field.type))
    }


def unplaced(stages: Sequence[type]) -> set[Field]:
    return {field for field in fields_of(stages) - DERIVED - CONFIGURED if not columns_of(field)}


def test_every_field_of_every_stage_has_a_column() -> None:
    assert len(STAGES) > 12 and ("Rollout", "kept_tokens") in fields_of(STAGES)
    assert unplaced(STAGES) == set()

    # control: a stage with a field that no column has
    @dataclass(frozen=True)
    class Forgotten:
        forgotten: Tensor

    assert unplaced([*STAGES, Forgotten]) == {("Forgotten", "forgotten")}


def bits_of(kind: str, value: Any) -> Any:
    """One value so that it equals another one exactly when all bits do."""
    if value is None or kind not in (*digests.ELEMENTS, "float32", "float64"):
        return value
    array: npt.NDArray[Any] = value.numpy() if isinstance(value, Tensor) else np.asarray(value)
    dtype = np.dtype(digests.ELEMENTS.get(kind, kind))
    if isinstance(value, Tensor) and array.dtype.kind == "f":
        assert array.dtype == dtype, "a tensor is recorded in its own type"
    flat = np.atleast_1d(array.astype(dtype))
    return tuple(flat.view(f"u{dtype.itemsize}").tolist())


def recorded_rows(tables: Tables, column: Field) -> list[Any]:
    kind, found = COLUMNS[column].kind, tables[column[0]].column(column[1])
    if kind in digests.ELEMENTS:
        return [bits_of(kind, item.values.to_numpy()) if item.is_valid else None for item in found]
    if kind in ("float32", "float64"):
        raw = digests.raw_values(kind, found).tolist()
        return [(bits,) if there else None for bits, there in zip(raw, found.is_valid().to_pylist(), strict=True)]
    return list(found.to_pylist())


def ids_of(kept_tokens: Tensor) -> list[list[int]] | None:
    """The eligible tokens of each position, one bit after the other."""
    if kept_tokens.shape[1] == 0:
        return None
    return [[i for i in range(8 * len(row)) if row[i // 8] >> (7 - i % 8) & 1] for row in kept_tokens.tolist()]


# fields that are recorded in another form
ENCODED: dict[Field, Callable[[Any], Any]] = {
    ("Rollout", "kept_tokens"): ids_of,
    ("PolicyUpdate", "clip_flags"): flag_names,
    ("PolicyUpdate", "corrections"): lambda changes: None if changes is None else correction_names(changes),
}


def held_rows(item: Iteration, field: Field, column: Field, rows: int) -> list[Any]:
    """The values of a field in the order of the rows of its table."""
    stage, name = field
    updates = item.updates
    single = {
        "Prompts": item.rollout.prompts,
        "Rollout": item.rollout,
        "ForwardPass": item.forward,
        "Rewards": item.rewards,
        "Advantages": item.advantages,
    }
    if stage in single:
        value = ENCODED.get(field, lambda x: x)(getattr(single[stage], name))
        empty = isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] == 0
        return [None] * rows if value is None or empty else list(value)
    if stage == "Spans":
        return [value for spans in item.rollout.spans for value in getattr(spans, name)]
    if stage in ("Iteration", "Coefficients"):
        return [getattr({"Iteration": item, "Coefficients": item.coefficients}[stage], name)]
    if stage == "Evaluation":
        return [] if item.evaluation is None else list(getattr(item.evaluation, name))
    if stage == "TensorGradient":
        steps = [u.policy if column[1].startswith("policy_") else u.value for u in updates]
        values = [[getattr(g, name) for g in step.gradients] if step and step.gradients else None for step in steps]
        return [v if v is None or name != "name" else " ".join(v) for v in values]
    if stage == "Episode":
        return episode_rows(item, name)
    found: list[Any] = []
    for u in updates:
        step = {"PolicyUpdate": u.policy, "ValueUpdate": u.value, "MinibatchUpdate": u}[stage]
        value = None if step is None else ENCODED.get(field, lambda x: x)(getattr(step, name))
        if column[0] == "steps":
            found.append(value)
        else:
            nothing: Any = False if name == "clipped" else None
            found += [nothing] * len(u.tokens) if value is None else list(value)
    return found


def episode_rows(item: Iteration, name: str) -> list[Any]:
    """A field of every episode; where each is one turn, that turn is the response."""
    episodes = item.rollout.episodes
    if episodes is None:
        assert name == "turns"
        return list(item.rollout.responses)
    rows = [getattr(episode, name) for episode in episodes]
    return ["".join(turns) for turns in rows] if name == "turns" else [[int(x) for x in row] for row in rows]


def unequal(item: Iteration, tables: Tables) -> set[Field]:
    """The fields whose recorded values are not those of the buffers."""
    found = set()
    for field in fields_of(STAGES) - DERIVED - CONFIGURED:
        for column in columns_of(field):
            if column[0] == "evaluations" and column[0] not in tables:
                assert item.evaluation is None
                continue
            if COLUMNS[column].only_with and column[1] not in tables[column[0]].column_names:
                only_with = {"turns": "episodes", "lag": "policy_versions", "retokenized": "sampled_ids"}
                assert getattr(item.rollout, only_with[COLUMNS[column].only_with]) is None
                continue
            kind, recorded = COLUMNS[column].kind, recorded_rows(tables, column)
            held = held_rows(item, field, column, len(recorded))
            plain = [v.item() if isinstance(v, Tensor) and kind in ("int32", "int64", "bool") else v for v in held]
            if [bits_of(kind, value) for value in plain] != recorded:
                found.add(field)
    return found


def derived_values(before: Sequence[Tables], tables: Tables) -> dict[Field, Any]:
    """What the documents derive, from records alone; `before`: those of the iterations before."""
    row = {name: tables["iterations"].column(name)[0].as_py() for name in tables["iterations"].column_names}
    lengths = tables["sequences"].column("response_length").to_numpy()
    starts = np.cumsum(lengths) - lengths
    places_of_tokens = starts[tables["updates"].column("sequence").to_numpy()]
    statistics = ReturnStatistics()
    if row["return_mean"] is not None:
        for earlier in before:
            statistics = statistics.joined(earlier["tokens"].column("returns").to_pylist())
    return {
        ("MinibatchUpdate", "tokens"): (places_of_tokens + tables["updates"].column("position").to_numpy()).tolist(),
        ("Iteration", "seconds"): {n.removeprefix("seconds_"): v for n, v in row.items() if n.startswith("seconds_")},
        ("Coefficients", "clip_range"): row["clip_range"] or 0.0,
        ("Coefficients", "penalty_coef"): row["penalty_coef"] or 0.0,
        **{("ReturnStatistics", name): value for name, value in dataclasses.asdict(statistics).items()},
    }


def held_values(item: Iteration) -> dict[Field, Any]:
    coefficients = item.coefficients
    return {
        ("MinibatchUpdate", "tokens"): torch.cat([u.tokens for u in item.updates]).tolist(),
        ("Iteration", "seconds"): item.seconds,
        ("Coefficients", "clip_range"): coefficients.clip_range,
        ("Coefficients", "penalty_coef"): coefficients.penalty_coef,
        **{("ReturnStatistics", name): value for name, value in dataclasses.asdict(coefficients.returns).items()},
    }


COMMON = ("ppo.iterations=2", "records.level=deep")
OPTIONS = {
    "separate value": (
        *("rollout.top_p=0.9", "rollout.temperature=1.2", "model.warm_start_steps=3", "reward.whiten=full"),
        *("kl.estimator=exact", "kl.direction=reference_policy", "advantages.whiten=full"),
        *("value.normalize_returns=true", "value.clip_range=0.2", "value.epochs=3"),
        *(
            "ppo.ratio_anchor=old",
            "ppo.importance_weights={kind: truncated, level: token}",
            "rollout.mismatch_sigma=0.3",
        ),
        "ppo.objective={kind: kl_penalty, penalty_coef: 0.5, target_kl: 0.01}",
    ),
    "value head": (
        *("rollout.top_k=5", "value={kind: head}", "kl={placement: loss, estimator: exact}"),
        "ppo.objective={kind: adaptive_clip, target_kl: 0.01}",
    ),
}
OPTIONS["encoded again"] = (
    *("model.warm_start_steps=0", "model.vocab_size=40", "mismatch.trainer.retokenize=1"),
    "mismatch.sampler.lag=1",
)
TURNS = "turns"


@dataclass(frozen=True)
class Recorded:
    """Iterations of a run and their tables."""

    name: str
    items: tuple[Iteration, ...]
    tables: tuple[Tables, ...]


@pytest.fixture(scope="module", params=[*OPTIONS, TURNS])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder: Path = tmp_path_factory.mktemp("run")
    options = [*COMMON, *OPTIONS.get(request.param, ())]
    config = turns_config(folder, *options) if request.param == TURNS else load_config(TINY, options)
    with LanguageKind(Silent()).begin(config, None) as execution:
        items = tuple(execution.iterations())
        return Recorded(request.param, items, tuple(execution.tables(item) for item in items))


def test_what_is_recorded_is_what_the_loop_held(recorded: Recorded) -> None:
    for index, (item, tables) in enumerate(zip(recorded.items, recorded.tables, strict=True)):
        assert unequal(item, tables) == set()
        derived = derived_values(recorded.tables[:index], tables)
        assert derived == held_values(item)
        assert set(derived) == DERIVED


def test_a_buffer_with_another_bit_is_noticed(recorded: Recorded) -> None:
    item, tables = recorded.items[1], recorded.tables[1]

    def other(value: Tensor) -> Tensor:
        changed = value.clone()
        last = changed.view(-1)[-1]
        changed.view(-1)[-1] = (
            ~last if value.dtype == torch.bool else last + 1 if last.is_floating_point() else 1 - last
        )
        return changed

    checked = 0
    for stage in ("rollout", "forward", "rewards", "advantages"):
        held = getattr(item, stage)
        for field in dataclasses.fields(held):
            value = getattr(held, field.name)
            # the lengths say where everything else lies
            if isinstance(value, Tensor) and value.numel() and field.name != "lengths":
                part = dataclasses.replace(held, **{field.name: other(value)})
                changed = dataclasses.replace(item, **{stage: part})
                assert unequal(changed, tables) == {(type(held).__name__, field.name)}
                checked += 1
    assert checked >= 20


EVERYWHERE = {("tokens", name) for name in ("kept_tokens", "ref_top_ids")}
HAS_VALUES = {
    "separate value": {
        *EVERYWHERE,
        *(("tokens", "reverse_ref_kl"), ("updates", "penalty_terms"), ("updates", "importance_weights")),
        ("updates", "correction"),
        *(("steps", "value_tensors"), ("iterations", "return_mean")),
    },
    "value head": {*EVERYWHERE, ("updates", "kl_terms"), ("steps", "kl_loss"), ("iterations", "clip_range")},
    "encoded again": (
        ("sequences", "rollout_policy_versions"),
        ("sequences", "sampled_ids"),
        ("sequences", "is_as_sampled"),
    ),
    TURNS: (("sequences", "episode_ids"), ("sequences", "is_forced")),
}


def test_the_comparison_was_not_one_of_nulls(recorded: Recorded) -> None:
    tables = recorded.tables[1]
    for table, column in HAS_VALUES[recorded.name]:
        assert tables[table].column(column).null_count < tables[table].num_rows, (table, column)
