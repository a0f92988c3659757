"""What the benchmarks of speed compute from times: ratios, bytes, the fit of the cost model, the peer's torch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from experiments.benchmarks import all as everything
from experiments.benchmarks import recording, scale, timing, workload
from experiments.benchmarks.peers import environment
from experiments.benchmarks.scale import Case, CaseCost
from experiments.benchmarks.timing import Cost
from ppo_repro.config.files import load_config
from tests.support.paths import SMALL


def test_speedups_are_taken_round_by_round_by_hand() -> None:
    peer, own = [Cost(4.0, 2.0), Cost(9.0, 3.0), Cost(6.0, 3.0)], [Cost(2.0, 2.0), Cost(3.0, 1.0), Cost(6.0, 1.0)]
    rows = timing.compared("rollout", "m", 1, 30, {"peer": peer, "exact": own}, "peer")
    exact = rows[1]
    assert (exact.wall.median, exact.wall.lowest, exact.wall.highest) == (3.0, 2.0, 6.0)
    assert (exact.speedup.median, exact.speedup.lowest, exact.speedup.highest) == (2.0, 1.0, 3.0)
    assert exact.cpu_speedup.median == 3.0 and rows[0].speedup.median == 1.0
    assert "| rollout | m | 1 | exact | 3 | 3.000 (2.000-6.000) | 1.000 | 10 | 2.00 (1.00-3.00) | 3.00 |" in (
        timing.table(rows)
    )
    missed = everything.speed_verdicts([replace(exact, speedup=timing.Spread(1.49, 1.0, 3.0))])
    assert everything.speed_verdicts(rows)[0].reached and not missed[0].reached and len(missed) == 1


def test_candidates_take_turns_and_the_first_turn_is_not_counted() -> None:
    order: list[str] = []

    def candidate(name: str) -> Cost:
        order.append(name)
        return Cost(float(len(order)), 0.0)

    found = timing.interleaved({name: lambda name=name: candidate(name) for name in "ab"}, rounds=2)
    assert order == list("ababab")
    assert [c.wall for c in found["a"]] == [3.0, 5.0]


@pytest.mark.parametrize("size", [workload.SMALL, replace(workload.LARGE, layers=1, hidden=256, intermediate=320)])
def test_the_products_of_a_size_are_those_of_its_matrices(size: workload.Size) -> None:
    model = workload.make_model(size)
    assert workload.weights(size) == sum(p.numel() for p in model.parameters() if p.dim() == 2)


def test_every_prompt_of_the_folder_has_its_tokens(tmp_path: Path) -> None:
    workload.write_folder(workload.SMALL, tmp_path, 3)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    texts = [" ".join(f"w{i}" for i in ids) for ids in workload.prompt_ids(workload.SMALL, 3)]
    assert [tuple(tokenizer(text)["input_ids"]) for text in texts] == workload.prompt_ids(workload.SMALL, 3)
    assert len(set(texts)) == 3


def test_the_cost_model_finds_what_made_the_numbers_and_says_how_far_it_is_off() -> None:
    truth = np.array([0.05, 2e-11, 3e-10, 1e-9])
    found = [CaseCost(c, float(np.array(scale.features(c)) @ truth), c.sequences * c.response) for c in scale.cases()]
    fitted = scale.fit(found)
    assert list(fitted.coefficients.values()) == pytest.approx(truth.tolist(), rel=1e-6)
    assert fitted.largest_error < 1e-6
    off = scale.fit([*found[:-1], replace(found[-1], cpu=found[-1].cpu * 2)])
    assert off.largest_error > 0.2


def test_what_an_iteration_costs_by_hand() -> None:
    case = Case("tokens", workload.Size("", 1, 64, 64, 1, 10), 2, 5)
    weights = 2 * 64 * 64 + 64 * 128 + 3 * 64 * 64 + 640
    inputs = 2 * (16 + 5 - 1)
    passes = 1 + 3 + 6 * 2
    assert scale.features(case) == [1.0, inputs * passes * weights, inputs * passes * 128 * 10.5, 2 * weights * 4]


def test_committing_is_measured_on_a_run_that_readers_accept() -> None:
    # `load` checks every line and the chain, and is part of what is measured
    found = scale.committing(4)
    assert found.iterations == 4 and min(found.commit, found.load) > 0


def test_a_report_is_printed_and_written_where_a_path_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = timing.compared("rollout", "m", 1, 30, {"peer": [Cost(4.0, 2.0)]}, "peer")
    timing.report(rows, None)
    timing.report(rows, tmp_path / "a.json")
    assert capsys.readouterr().out == 2 * (timing.table(rows) + "\n")
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["results"][0]["wall"] == {"median": 4.0, "lowest": 4.0, "highest": 4.0}
    assert found["machine"]["torch"] and [p.name for p in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ("torch (2.15.0)\nAvailable versions: 2.15.0, 2.13.0+cpu, 2.13.0", ["torch==2.13.0+cpu"]),
        ("Available versions: 2.13.0, 12.13.0+cpu, 2.13.0+cpu.x", None),
    ],
)
def test_the_cpu_build_is_taken_where_the_index_has_one(listed: str, expected: list[str] | None) -> None:
    found = environment.torch_requirement(listed)
    assert found == expected if expected else found[0] == "torch==2.13.0" and found[1] == "--index-url"


@pytest.mark.slow
def test_recording_changes_no_weight_and_its_bytes_are_counted(tmp_path: Path) -> None:
    config = load_config(SMALL, ["ppo.iterations=6", "model.warm_start_steps=2"])
    ways, disks = recording.measure(config, tmp_path / "two")
    assert recording.same_bits(ways) and [w.name for w in ways] == list(recording.WAYS)
    assert ways[0].share < ways[-1].share
    for level, disk in disks.items():
        files = sum(p.stat().st_size for p in (tmp_path / "two" / level / "records").rglob("*.parquet"))
        assert sum(disk.bytes.values()) == files
        assert disk.rows["iterations"] == 6 and disk.rows["updates"] == 2 * disk.rows["tokens"]
        assert disk.per_token == pytest.approx(3 * disk.per_token_record)
    assert disks["lean"].per_token < disks["full"].per_token < disks["deep"].per_token
    assert not recording.same_bits([ways[0], replace(ways[1], policy_digest="other")])
