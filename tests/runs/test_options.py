"""The promises of the loop hold for every option: over configurations in which every two options meet."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis.mismatch.parity import parity
from ppo_repro.config.files import load_config
from ppo_repro.config.run import RunConfig
from ppo_repro.recompute.recompute import STAGES, lines, recompute
from ppo_repro.records import reader
from ppo_repro.watcher import Silent
from tests.runs.options import FACTORS, NAMES, Choice, overrides, pairwise
from tests.support.language import run
from tests.support.paths import TINY

CASES = pairwise()
# the same work cut up in another way
OTHER_LAYOUT = (
    *(
        "layout.rollout_slots=2",
        "layout.prefill_chunk=2",
        "layout.forward_micro_batch=2",
        "layout.update_micro_batch=1",
    ),
    *("layout.padding=left", "layout.threads=2", "layout.prefix_cache=false"),
)


def name_of(choice: Choice) -> str:
    return "-".join(f"{name}{option}" for name, option in zip(NAMES, choice, strict=True) if option) or "usual"


def recorded(choice: Choice, out: Path, *more: str) -> tuple[RunConfig, Path]:
    config = load_config(TINY, [*overrides(choice), *more])
    return config, run(config, out, Silent())[0]


def check(choice: Choice, tmp_path: Path) -> None:
    config, run_dir = recorded(choice, tmp_path / "first")
    found = parity(run_dir)
    assert found.tokens > 30 and found.first_minibatch_tokens > 3
    assert (found.unequal_old_rollout_logprobs, found.unequal_first_ratios, found.unequal_values) == (0, 0, 0)
    again = recompute(run_dir, STAGES)
    assert again.difference is None and min(again.compared.values()) >= 2, lines(again)
    _, other = recorded(choice, tmp_path / "other", *OTHER_LAYOUT)
    assert reader.open_manifest(other).fingerprint == reader.open_manifest(run_dir).fingerprint
    steps = reader.read_steps(run_dir)
    assert steps["policy_digest"].nunique() > 1, "the policy learnt nothing, so nothing was compared"
    assert (steps["value_digest"].isna().all()) == (config.value.kind == "none")


def test_every_option_is_in_some_case() -> None:
    met = {(name, option) for choice in CASES for name, option in zip(NAMES, choice, strict=True)}
    assert met == {(name, option) for name, options in FACTORS.items() for option in range(len(options))}
    assert len(CASES) < 110


# the first five meet most options; all of them are in the slow tier
@pytest.mark.parametrize("choice", CASES[:2], ids=name_of)
def test_parity_and_rerun_hold_for_a_sample_of_options(choice: Choice, tmp_path: Path) -> None:
    check(choice, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("choice", CASES[2:], ids=name_of)
def test_parity_and_rerun_hold_for_every_two_options(choice: Choice, tmp_path: Path) -> None:
    check(choice, tmp_path)


@pytest.mark.usefixtures("row_noise")
def test_native_numerics_break_these_promises(tmp_path: Path) -> None:
    """The same comparison must find differences."""
    fingerprints = set()
    for layout, more in (("first", ()), ("again", OTHER_LAYOUT)):
        _, run_dir = recorded(CASES[0], tmp_path / layout, "numerics.mode=native", *more)
        assert parity(run_dir).unequal_old_rollout_logprobs > 0
        fingerprints.add(reader.open_manifest(run_dir).fingerprint)
    assert len(fingerprints) == 2, "every layout gave the same bits"
