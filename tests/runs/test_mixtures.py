"""Whole runs of mixtures of experts: agreement, layouts that must not show, recorded routes, and routes replayed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ppo_repro.analysis.agreement import run_agreement
from ppo_repro.analysis.mismatch import mismatch_by_iteration
from ppo_repro.analysis.mismatch_buckets import bucket_table
from ppo_repro.analysis.report.sections.sampler_and_trainer import bucket_figure
from ppo_repro.analysis.run_pairs import run_pairs
from ppo_repro.base.errors import UserError
from ppo_repro.config.files import load_config
from ppo_repro.config.run import RunConfig
from ppo_repro.records import manifest, reader
from ppo_repro.records.diff import first_difference
from ppo_repro.records.logprob_pairs import ROUTE, ROUTES
from tests.support.language import run
from tests.support.paths import TINY
from tests.support.recipes import UNPADDED_LAYOUT
from tests.support.runs import recomputed

FAMILIES = ("qwen3_moe", "mixtral", "olmoe")
every_family = pytest.mark.parametrize(
    "family", [f if f == "qwen3_moe" else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES]
)
BFLOAT16 = "mismatch.sampler.precision={weights: bfloat16, activations: bfloat16}"
ONE_STEP = ("ppo.epochs=1", "ppo.minibatch_size=15")


def config_of(family: str, *more: str) -> RunConfig:
    """`tiny.yaml` with two layers of 2 of 5 experts, shorter."""
    experts = f"model.experts={{family: {family}, count: 5, per_token: 2}}"
    small = ("model.intermediate_size=12", "model.num_layers=2", "model.warm_start_steps=10", "ppo.learning_rate=2e-2")
    return load_config(TINY, [experts, *small, "numerics.accuracy_sequences=2", *more])


def record(out: Path, family: str, *more: str) -> Path:
    return run(config_of(family, *more), out)[0]


def routes(folder: Path, column: str) -> np.ndarray:
    """[N, M k] of all iterations."""
    return np.stack(reader.read_tokens(folder)[column].to_list())


def buckets_of(folder: Path) -> pd.DataFrame:
    """The table of mismatch by bucket over all iterations."""
    return bucket_table([measured.buckets for measured in mismatch_by_iteration(run_pairs(folder))])


@pytest.fixture(scope="module")
def deep_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("deep"), "qwen3_moe", "records.level=deep")


@every_family
def test_sampler_and_trainer_agree_on_every_bit_in_every_layout(family: str, tmp_path: Path) -> None:
    one, other = record(tmp_path / "one", family), record(tmp_path / "other", family, *UNPADDED_LAYOUT)
    found = run_agreement(one)
    assert found.tokens > 50
    assert found.unequal_old_rollout_logprobs == 0
    assert (found.unequal_first_ratios, found.unequal_values) == (0, 0)
    assert found.unequal_ratios > 0, "the weights must have moved, or a constant would pass this test"
    assert manifest.load(one).fingerprint == manifest.load(other).fingerprint
    assert first_difference(one, other) is None


def test_no_split_of_a_minibatch_shows_where_most_experts_have_few_tokens(tmp_path: Path) -> None:
    """Micro-batches of 3 and 7 of 20 sequences end inside slots, in which most of 16 experts have no tokens left."""
    experts = ("model.experts={family: mixtral, count: 16, per_token: 1}", "model.intermediate_size=4")
    size = ("rollout.prompts_per_iteration=10", "rollout.samples_per_prompt=2", "ppo.minibatch_size=20")
    shorter = ("model.warm_start_steps=5", "ppo.iterations=1", "numerics.accuracy_sequences=0")
    found = {}
    for each in (0, 1, 2, 3, 7):
        folder = record(tmp_path / str(each), "mixtral", *experts, *size, *shorter, f"layout.update_micro_batch={each}")
        found[each] = manifest.load(folder).fingerprint
    assert len(set(found.values())) == 1, found


@pytest.mark.usefixtures("row_noise")
def test_native_numerics_fail_the_same_check(tmp_path: Path) -> None:
    native = record(tmp_path, "qwen3_moe", "numerics.mode=native", "numerics.accuracy_sequences=0")
    found = run_agreement(native)
    assert found.unequal_old_rollout_logprobs > found.tokens // 20
    assert found.unequal_first_ratios > 0


def test_routes_are_recorded_at_level_deep_and_change_no_fingerprint(deep_run: Path, tmp_path: Path) -> None:
    lean = record(tmp_path, "qwen3_moe")
    assert manifest.load(lean).fingerprint == manifest.load(deep_run).fingerprint
    sampled, trained = routes(deep_run, "rollout_routes"), routes(deep_run, "policy_routes")
    assert sampled.shape[1] == 4
    assert (sampled == trained).all()
    pairs = sampled.reshape(-1, 2, 2)
    assert (pairs[..., 0] < pairs[..., 1]).all()
    assert set(np.unique(pairs)) == set(range(5))
    assert reader.read_tokens(lean)["rollout_routes"].isna().all()


def test_every_stage_of_a_run_with_routes_follows_from_its_records(deep_run: Path) -> None:
    assert recomputed(deep_run).difference is None


def rms(folder: Path) -> float:
    tokens = reader.read_tokens(folder)
    return float(np.sqrt(np.mean((tokens["old_logprobs"] - tokens["rollout_logprobs"]).astype(float) ** 2)))


def by_kind_of_route(buckets: pd.DataFrame) -> pd.DataFrame:
    found = buckets[buckets["kind"] == ROUTE]
    return found.set_index(pd.Index([ROUTES[int(lo)] for lo in found["lo"]]))


@pytest.mark.slow
def test_replayed_routes_bring_a_rounded_sampler_and_the_trainer_nearer(tmp_path: Path) -> None:
    experts = ("model.experts.count=64", "model.experts.per_token=4", "model.intermediate_size=4")
    more = ("records.level=deep", BFLOAT16, *experts, "ppo.iterations=1", *ONE_STEP)
    own = record(tmp_path / "own", "olmoe", *more)
    replayed = record(tmp_path / "replayed", "olmoe", *more, "ppo.replay_routes=true")
    again = record(tmp_path / "again", "olmoe", *more, "ppo.replay_routes=true", *UNPADDED_LAYOUT)
    assert (routes(own, "rollout_routes") == routes(replayed, "rollout_routes")).all()
    assert (routes(own, "policy_routes") != routes(own, "rollout_routes")).any()
    assert manifest.load(replayed).fingerprint == manifest.load(again).fingerprint != manifest.load(own).fingerprint
    assert (routes(replayed, "policy_routes") == routes(replayed, "rollout_routes")).all()
    assert rms(replayed) < rms(own)
    flipped = (routes(own, "policy_routes") != routes(own, "rollout_routes")).any(-1)
    buckets = buckets_of(own)
    by_route = by_kind_of_route(buckets)
    assert by_route.loc["flipped", "n_tokens"] == flipped.sum()
    assert by_route["n_tokens"].sum() == len(flipped)
    assert by_route.loc["flipped", "abs_mean"] > by_route.loc["same", "abs_mean"] > 0
    assert all(route in bucket_figure(buckets, ROUTE).chart for route in ("same", "flipped"))
    assert by_kind_of_route(buckets_of(replayed)).index.tolist() == ["same"]


@pytest.mark.parametrize(
    ("override", "needs"),
    [
        ("model.experts=null", "a mixture of experts"),
        ("numerics.mode=native", r"numerics\.mode = deterministic"),
        ("mismatch.trainer.retokenize=0.5", r"mismatch\.trainer\.retokenize = 0"),
        ("mismatch.trainer.prompt_before=a", "the sampler's prompts"),
    ],
)
def test_a_run_without_routes_to_replay_is_refused(override: str, needs: str) -> None:
    with pytest.raises(UserError, match=rf"ppo\.replay_routes = true needs {needs}"):
        config_of("mixtral", "ppo.replay_routes=true", override)
