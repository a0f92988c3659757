"""Precision high has one fingerprint for every layout, number of processes and instruction set.

Controls: in `highest` the same run has another fingerprint. `test_integers.py` has the rule itself.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ppo_repro
from ppo_repro.base.errors import UserError
from ppo_repro.config.files import load_config
from ppo_repro.numerics import build
from ppo_repro.records import manifest
from ppo_repro.records.folder import ACCURACY_NAME
from tests.support.cli import Cli
from tests.support.language import fork, rerun, run, tiny_run
from tests.support.models import source_model
from tests.support.paths import TINY
from tests.support.ranks import fingerprint_of
from tests.support.runs import recorded_iterations
from tests.support.variants import ABLE, FASTEST, opened, using

HIGH = "numerics.precision=high"
QUICK = (HIGH, "model.warm_start_steps=4")
QUICKSTART = Path(__file__).parents[2] / "experiments" / "quickstart.yaml"
# of two iterations; another number is another rule, or a change of what quickstart computes
PINNED = "4e4bfc0918ee1686d2584de3b06c7bb6ac6cda21405f4d9313408d79f2b94c9b"
REWARD = "reward.terms=[{kind: trained_model, num_pairs: 8, minibatch_size: 4, learning_rate: 1e-3}]"
LAYOUTS = (
    ("layout.rollout_slots=3", "layout.prefill_chunk=2", "layout.forward_micro_batch=1"),
    ("layout.padding=none", "layout.update_micro_batch=2"),
    ("layout.threads=2", "layout.padding=left", "layout.prefix_cache=false", "layout.gradient_checkpointing=true"),
)
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def high_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run(tmp_path_factory.mktemp("high"), *QUICK)


def of(run_dir: Path) -> str:
    found = manifest.load(run_dir).fingerprint
    assert found is not None
    return found


def test_the_other_precision_has_another_fingerprint(high_run: Path, tmp_path: Path) -> None:
    assert of(tiny_run(tmp_path, *QUICK[1:])) != of(high_run)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_layout_changes_the_fingerprint(high_run: Path, tmp_path: Path, layout: tuple[str, ...]) -> None:
    assert of(tiny_run(tmp_path, *QUICK, *layout)) == of(high_run)


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=slow)])
def test_no_number_of_processes_changes_the_fingerprint(high_run: Path, tmp_path: Path, processes: int) -> None:
    assert fingerprint_of(processes, TINY, tmp_path, *QUICK) == of(high_run)


@pytest.mark.parametrize("variant", ABLE, ids=[variant.name for variant in ABLE])
def test_no_instruction_set_changes_the_fingerprint(variant: build.Variant, high_run: Path, tmp_path: Path) -> None:
    with using(opened(variant)):
        assert of(tiny_run(tmp_path, *QUICK)) == of(high_run)


@pytest.mark.parametrize(
    "changes",
    [
        ("lora={rank: 2, alpha: 2}", "value={learning_rate: 1e-3, lora: {rank: 2, alpha: 2}}"),
        ("value={kind: head}",),
        (REWARD, "value={learning_rate: 1e-3, init: reward_model}"),
        ("model.experts={family: qwen3_moe, count: 3, per_token: 2}",),
    ],
    ids=["adapters", "value head", "reward model", "experts"],
)
def test_whatever_is_trained_does_not_depend_on_the_layout(changes: tuple[str, ...], tmp_path: Path) -> None:
    first = tiny_run(tmp_path / "first", *QUICK, *changes)
    second = tiny_run(tmp_path / "second", *QUICK, *changes, *LAYOUTS[1])
    highest = tiny_run(tmp_path / "highest", *QUICK[1:], *changes)
    assert of(first) == of(second) != of(highest)


def test_a_run_is_rerun_and_its_precision_changes_in_a_fork_alone(cli: Cli, high_run: Path, tmp_path: Path) -> None:
    assert rerun(high_run).difference is None
    change = ("--set", "numerics.precision=highest")
    assert "precision=highest: may change fields of layout" in cli.refusal("rerun", high_run, *change)
    assert "keeps no reference" in cli.refusal(
        "fork", high_run, *change, "--set", "ppo.iterations=3", "--out", tmp_path
    )
    kept = tiny_run(tmp_path / "kept", *QUICK, "checkpoints.every=1")
    forked = fork(kept, tmp_path, None, "ppo.iterations=3", "numerics.precision=highest")
    origin = manifest.load(forked).origin
    assert origin is not None
    assert origin.changed["numerics.precision"] == ["high", "highest"]
    assert [ACCURACY_NAME in manifest.load(path).notes for path in (kept, forked)] == [True, False]
    assert rerun(forked).difference is None
    assert "precision: highest" in (forked / "config.yaml").read_text()
    assert recorded_iterations(forked) == 3


@pytest.mark.parametrize(
    "variant",
    [pytest.param(v, marks=() if v in FASTEST.variants else slow, id=v.name) for v in ABLE[:3]],
)
def test_two_iterations_of_quickstart_have_the_pinned_fingerprint(variant: build.Variant, tmp_path: Path) -> None:
    with using(opened(variant)):
        assert of(run(load_config(QUICKSTART, (HIGH, "ppo.iterations=2")), tmp_path)[0]) == PINNED


def test_your_own_model_does_not_depend_on_padding() -> None:
    source = source_model("qwen3")
    high, highest = (ppo_repro.deterministic(source, precision=p) for p in ("high", "highest"))
    ids, alone = torch.tensor([[7, 8, 9, 0, 0], [1, 2, 3, 4, 5]]), torch.tensor([[7, 8, 9]])
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    found = high(ids, mask).logits[:1, :3]
    assert bool((found == high(alone).logits).all())
    assert bool((found != highest(alone).logits).any())
    with pytest.raises(UserError, match="precision = 'medium': must be one of highest, high"):
        ppo_repro.deterministic(source, precision="medium")  # type: ignore[arg-type]
