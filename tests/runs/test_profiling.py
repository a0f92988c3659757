"""Shares of the measured peak by hand, and files written before there were any."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from ppo_repro.errors import UserError
from ppo_repro.models.networks import make_policy
from ppo_repro.records import manifest, reader, schema
from ppo_repro.records.digests import FINGERPRINT_SEED
from ppo_repro.runs import profiling
from ppo_repro.runs.profiling import Peak
from ppo_repro.runs.summary import profile
from tests.support.models import source_model
from tests.support.synthetic_run import accept

SPEED = ("tokens_per_second", "memory_peak", "peak_fraction_rollout", "peak_fraction_forward", "peak_fraction_update")


def test_shares_of_the_peak_by_hand() -> None:
    rollout = SimpleNamespace(
        prompts=SimpleNamespace(prompt_ids=((1, 2), (3,))),
        lengths=torch.tensor([3, 2]),
        sequence_of_token=lambda: torch.tensor([0, 0, 0, 1, 1]),
    )
    step = SimpleNamespace(tokens=torch.tensor([3, 4]), policy=None, value=object())
    both = SimpleNamespace(tokens=torch.tensor([0, 1, 2]), policy=object(), value=object())
    seconds = {"rollout": 2.0, "forward": 0.0, "update": 4.0}
    item = SimpleNamespace(rollout=rollout, updates=(step, both), seconds=seconds)
    found = profiling.fractions(item, Peak(rate=10.0, policy=100, value=50))  # type: ignore[arg-type]
    # inputs: 2 + 3 - 1 = 4 and 1 + 2 - 1 = 2 tokens
    assert found["rollout"] == 6 * 100 / (2.0 * 10.0)
    assert math.isnan(found["forward"])
    assert found["update"] == 3 * (2 * 50 + 4 * 150) / (4.0 * 10.0)


def test_products_are_those_of_matrices_not_of_embeddings() -> None:
    tied = nn.Module()
    tied.embed, tied.norm, tied.head = nn.Embedding(7, 5), nn.LayerNorm(5), nn.Linear(5, 7)
    assert profiling.products_of(tied) == 35


@pytest.mark.parametrize("mode", ["deterministic", "native"])
def test_a_policy_has_the_same_products_in_both_numerics(mode: str) -> None:
    source = source_model("qwen2")
    matrices = sum(p.numel() for name, p in source.named_parameters() if p.dim() == 2 and "embed" not in name)
    head = 0 if not source.config.tie_word_embeddings else source.get_output_embeddings().weight.numel()
    assert profiling.products_of(make_policy(source, mode, 16)) == matrices + head


def test_a_run_records_its_speed_outside_of_the_fingerprint(deterministic_run: Path) -> None:
    rows = reader.read_iterations(deterministic_run)
    assert (rows["tokens_per_second"] > 0).all() and (rows["memory_peak"] > 2**20).all()
    assert rows[["peak_fraction_rollout", "peak_fraction_forward", "peak_fraction_update"]].isna().all(axis=None)
    assert math.isnan(profile(deterministic_run).peak_fraction["all"])  # it was not asked to measure
    assert not any(column.in_fingerprint for column in schema.ITERATIONS.columns if column.name in SPEED)


def test_files_without_these_columns_are_read_and_those_without_others_refused(
    deterministic_run: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    (run_dir / "records").mkdir(parents=True)
    for path in deterministic_run.rglob("*"):
        if path.is_file() and "checkpoints" not in path.parts:
            target = run_dir / path.relative_to(deterministic_run)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    path = manifest.table_path(run_dir, "iterations", 0)
    whole = pq.ParquetFile(path).read()
    pq.write_table(whole.drop_columns(list(SPEED)), path)
    with pytest.raises(UserError, match="has another SHA-256"):
        reader.read_iterations(run_dir)
    accept(run_dir, "iterations", 0)
    rows = reader.read_iterations(run_dir)  # digests included
    assert math.isnan(rows["memory_peak"].iloc[0]) and rows["memory_peak"].iloc[1] > 0
    streamed = list(reader.stream(run_dir, "iterations", columns=["tokens", "memory_peak"], verify="pages"))
    assert math.isnan(streamed[0]["memory_peak"].iloc[0]) and streamed[0]["tokens"].iloc[0] == rows["tokens"].iloc[0]
    assert manifest.load(run_dir).fingerprint == manifest.load(deterministic_run).fingerprint != FINGERPRINT_SEED
    for missing in ("seconds_update", "clip_range"):  # not nullable; a result
        pq.write_table(whole.drop_columns([missing]), path)
        accept(run_dir, "iterations", 0)
        with pytest.raises(UserError, match="has columns"):
            reader.read_iterations(run_dir)
