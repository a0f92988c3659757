"""What the benchmarks compute from times: ratios and intervals; and the work that they give to both sides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from experiments.benchmarks import learning, timing, workload
from experiments.benchmarks.peers import environment
from experiments.benchmarks.timing import Cost


def test_the_interval_of_a_paired_difference_by_hand() -> None:
    centre, low, high = learning.interval([1.0, 2.0, 3.0])
    # t of 2 degrees of freedom at 97.5 % is 4.3027; the standard error is 1 / sqrt 3
    assert centre == 2.0
    assert (low, high) == (
        pytest.approx(2.0 - 4.3027 / 3**0.5, rel=1e-4),
        pytest.approx(2.0 + 4.3027 / 3**0.5, rel=1e-4),
    )


def test_speedups_are_taken_round_by_round_by_hand() -> None:
    peer, own = [Cost(4.0, 2.0), Cost(9.0, 3.0), Cost(6.0, 3.0)], [Cost(2.0, 2.0), Cost(3.0, 1.0), Cost(6.0, 1.0)]
    rows = timing.compared("rollout", "m", 1, 30, {"peer": peer, "own": own}, "peer")
    mine = rows[1]
    assert (mine.wall.median, mine.wall.lowest, mine.wall.highest) == (3.0, 2.0, 6.0)
    assert (mine.speedup.median, mine.speedup.lowest, mine.speedup.highest) == (2.0, 1.0, 3.0)
    assert mine.cpu_speedup.median == 3.0 and rows[0].speedup.median == 1.0
    line = "| rollout | m | 1 | own | 3 | 3.000 (2.000-6.000) | 1.000 | 10 | 2.00 (1.00-3.00) | 3.00 |"
    assert line in timing.table(rows)


def test_candidates_take_turns_and_the_first_turn_is_not_counted() -> None:
    order: list[str] = []

    def candidate(name: str) -> Cost:
        order.append(name)
        return Cost(float(len(order)), 0.0)

    found = timing.interleaved({name: lambda name=name: candidate(name) for name in "ab"}, rounds=2)
    assert order == list("ababab")
    assert [c.wall for c in found["a"]] == [3.0, 5.0]


def test_every_prompt_of_the_folder_has_its_tokens(tmp_path: Path) -> None:
    workload.write_folder(workload.SMALL, tmp_path, 3)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    texts = [" ".join(f"w{i}" for i in ids) for ids in workload.prompt_ids(workload.SMALL, 3)]
    assert [tuple(tokenizer(text)["input_ids"]) for text in texts] == workload.prompt_ids(workload.SMALL, 3)
    assert len(set(texts)) == 3


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
