"""What is built, read and refused: columns, tables, iterations, a writer's moments."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ppo_repro.base.errors import UserError
from ppo_repro.ppo.objectives import REMOVING, ClipFlag
from ppo_repro.records import arrow, manifest, reader, schema
from ppo_repro.records.columns import offsets_of
from tests.support import synthetic_run
from tests.support.paths import ROOT
from tests.support.synthetic_run import one_column


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_run.make_run(tmp_path_factory.mktemp("run") / "seed=1" / "a", iterations=3)


FLOATS = np.zeros(2, dtype=np.float32)
BAD_COLUMNS: list[tuple[str, bool, Any]] = [
    ("float32", False, np.zeros(2)),
    ("float32", False, np.zeros(2, dtype=">f4")),
    ("float32", False, [0.5, 0.5]),
    ("float32", False, FLOATS.reshape(2, 1)),
    ("float64", False, np.ma.masked_array(np.zeros(2), mask=[0, 1])),
    ("float64", False, [0.5, None]),
    ("int32", False, [0, 2**31]),
    ("int32", False, [0, 0.5]),
    ("bool", False, [0, 1]),
    ("string", False, ["a", 3]),
    ("string", False, ["a", None]),
    ("list<int32>", False, [[1], [2.5]]),
    ("list<float32>", False, [[0.5]]),
    ("list<float32>", False, [np.zeros(1)]),
    ("list<float64>", False, [[0.5], None]),
    ("float32", False, pa.array(FLOATS, mask=np.array([True, False]))),
    ("float32", True, pa.array(np.zeros(2), mask=np.array([True, False]))),
    ("float32", True, [None, 0.5]),
]


@pytest.mark.parametrize(("kind", "nullable", "values"), BAD_COLUMNS)
def test_nothing_is_cast_in_silence(kind: str, nullable: bool, values: Any) -> None:
    with pytest.raises(ValueError, match=r"^table t, column c: "):
        arrow.to_arrow(one_column(kind, nullable), {"c": values})


def test_lists_that_a_column_cannot_hold_are_refused() -> None:
    assert offsets_of(np.array([2**30, 2**30 - 1])).tolist() == [0, 2**30, 2**31 - 1]
    with pytest.raises(UserError, match=r"2147483648 kept tokens.*records\.level = lean"):
        offsets_of(np.array([2**30, 2**30]))


def test_columns_and_iterations_are_chosen(run: Path) -> None:
    frame = reader.read_tokens(run, iterations=[2, 0], columns=["rewards", "iteration"])
    assert list(frame.columns) == ["rewards", "iteration"]
    assert frame["iteration"].tolist() == [2] * 12 + [0] * 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"columns": ["reward"]}, "tokens has no column 'reward'; there are iteration, "),
        ({"columns": ["rewards", "rewards"]}, "'rewards' is asked for twice"),
        ({"columns": "rewards"}, "must be a list of names"),
        ({"iterations": [3]}, "no iteration 3; recorded are 0 to 2"),
        ({"iterations": [1.0]}, "no iteration 1.0"),
        ({"iterations": [1, 1]}, "iteration 1 is asked for twice"),
    ],
)
def test_what_is_not_there_is_refused(run: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        reader.read_tokens(run, **arguments)
    with pytest.raises(UserError, match="no table 'token'; there are sequences, tokens"):
        reader.read_table("token", run)


def test_final_results_keep_their_type_and_bits(tmp_path: Path) -> None:
    written = synthetic_run.start_run(tmp_path / "a")
    with pytest.raises(ValueError, match="final result x is a float32"):
        written.finish({"x": np.float32(1)}, {})  # type: ignore[dict-item]
    written.finish({"nan": float("nan"), "zero": -0.0, "many": 2**60, "name": "é"}, {})
    final = manifest.load(tmp_path / "a").final
    assert repr(final) == "{'nan': nan, 'zero': -0.0, 'many': 1152921504606846976, 'name': 'é'}"


def test_full_memory_is_no_damage(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(reader.pq, "ParquetFile", full)
    with pytest.raises(MemoryError):
        reader.read_table("tokens", run)


def test_the_page_explains_every_word_of_a_clip_flag_and_names_follow_its_rule() -> None:
    page = (ROOT / "ppo_repro" / "records" / "README.md").read_text()
    table = page[page.index("| `clip_flag` | ratio | gradient |") :].partition("\n\n")[0]
    words = {word: line.split("|")[3].strip() for line in table.splitlines() for word in re.findall(r"`(\w+)`", line)}
    assert {flag.name.lower() for flag in ClipFlag} <= words.keys()
    removing = {flag.name.lower() for flag in REMOVING}
    assert {word for word, gradient in words.items() if gradient == "removed"} - {"dual_clip"} == removing
    assert {flag.name.lower() for flag in ClipFlag if flag.name.lower().startswith("clip_")} == removing
    columns = (*schema.TOKENS.columns, *schema.UPDATES.columns)
    tensors = [column.name for column in columns if column.kind == "float32"]
    assert [name for name in tensors if not name.endswith("s")] == ["ref_kl", "reverse_ref_kl"]
