"""Dumps of every format and kind of file give the same responses; what is wrong in one is one line."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from ppo_repro.base.errors import UserError
from ppo_repro.testing.dump_formats import FORMATS, Names
from ppo_repro.testing.dumps import DumpedResponse, read_dump
from tests.testing.audit.rows import ROWS


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        pd.DataFrame(rows).to_parquet(path)
    else:
        torch.save({name: torch.tensor([row[name] for row in rows]) for name in rows[0]}, path)
    return path


def counted(response: DumpedResponse) -> list[tuple[int, float, float]]:
    triples = zip(response.response_ids, response.sampler.tolist(), response.trainer.tolist(), strict=True)
    return [triple for triple, counts in zip(triples, response.counts, strict=True) if counts]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".pt"])
@pytest.mark.parametrize("form", ROWS)
def test_every_format_and_file_gives_the_same_tokens(form: str, suffix: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"dump{suffix}", [ROWS[form]] * 2)
    found = read(path, form)
    assert [r.row for r in found] == [1, 2]
    assert same(found, read(path, None))  # the format is told from the columns
    for response in found:
        assert counted(response) == [(7, -0.5, -0.5), (9, -2.0, -2.0)]
        assert (response.prompt_ids, response.response_ids) == ((5, 6), (7, 8, 9))
        assert response.turns.tolist() == [1, 1, 2]  # a token between that does not count ends a turn
        assert response.padding == ((0,) if form in ("verl", "trl") else ())


def read(path: Path, form: str | None) -> list[DumpedResponse]:
    return list(read_dump(path, form))


def same(a: Sequence[DumpedResponse], b: Sequence[DumpedResponse]) -> bool:
    return [(r.prompt_ids, counted(r)) for r in a] == [(r.prompt_ids, counted(r)) for r in b]


EMPTY = {  # columns of the response, of which an empty one has no entry
    "ppo_repro": ("response_ids", "rollout_logprobs", "old_logprobs", "mask"),
    "slime": ("rollout_log_probs", "log_probs", "loss_masks"),
}


@pytest.mark.parametrize("form", EMPTY)
def test_an_empty_response_or_shard_before_the_others_changes_no_response(form: str, tmp_path: Path) -> None:
    row = ROWS[form]
    prompt = {"tokens": row["tokens"][:2], "response_lengths": 0} if form == "slime" else {}
    rows = [row | prompt | {name: [] for name in EMPTY[form]}, row]
    columns = {name: [r[name] for r in rows] for name in row}
    tensors = [{name: torch.tensor(value) for name, value in r.items()} for r in rows]
    saved = (rows, tensors, columns, [columns], [{name: [] for name in row}, columns])
    paths = [write(tmp_path / f"dump{suffix}", rows) for suffix in (".jsonl", ".parquet")]
    for number, what in enumerate(saved):
        torch.save(what, path := tmp_path / f"{number}.pt")
        paths.append(path)
    for path in paths:
        empty, other = read(path, None)
        assert (empty.row, empty.prompt_ids, len(empty.counts)) == (1, (5, 6), 0), path.name
        assert (other.row, counted(other)) == (2, [(7, -0.5, -0.5), (9, -2.0, -2.0)]), path.name


def test_every_format_has_a_row_here() -> None:
    assert set(ROWS) == set(FORMATS)


def test_the_two_files_of_slime(tmp_path: Path) -> None:
    expected = read(write(tmp_path / "x.jsonl", [ROWS["slime"]] * 2), "slime")
    rows = [{name: torch.tensor(v) if isinstance(v, list) else v for name, v in ROWS["slime"].items()}] * 2
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    whole = {
        "rollout_data": {**columns, "global_batch_sizes": [2], "raw_reward": [1.0] * 5},
        "rollout_id": 3,
        "rank": 0,
    }
    torch.save(whole, tmp_path / "one.pt")
    torch.save({"format_version": 2, "samples": rows, "dp_shards": [{}], "rollout_id": 3}, tmp_path / "two.pt")
    for name in ("one.pt", "two.pt"):
        assert same(read(tmp_path / name, "slime"), expected)


def test_what_does_not_count_at_the_end_is_left_out(tmp_path: Path) -> None:
    rows = [
        changed(response_mask=[0, 0, 0]),
        changed(response_mask=[1, 0, 0]),
        {**ROWS["verl"], "responses": [], "rollout_log_probs": [], "old_log_probs": [], "response_mask": []},
        ROWS["verl"],
    ]
    found = read(write(tmp_path / "x.jsonl", rows), "verl")
    assert [(r.row, r.response_ids) for r in found] == [(1, ()), (2, (7,)), (3, ()), (4, (7, 8, 9))]


def changed(**fields: Any) -> dict[str, Any]:
    return {**ROWS["verl"], **fields}


BAD = [
    (changed(entropies=[0.5]), "row 2: entropies has 1 entries for 3 response tokens"),
    (changed(responses=[7, 8]), "row 2: rollout_log_probs has 3 entries for 2 response tokens"),
    (changed(responses=[7, 8, -1]), "row 2: responses = [7, 8, -1]: must be a list of token ids"),
    (changed(old_log_probs="-1"), "row 2: old_log_probs = '-1': must be a list of log-probs in nats"),
    (changed(response_mask=[1, 2, 0]), "row 2: response_mask = [1, 2, 0]: must be a list of 0 and 1"),
    (changed(response_mask=[0.7, 1.0, 0.0]), "row 2: response_mask = [0.7, 1.0, 0.0]: must be a list of 0 and 1"),
    (changed(attention_mask=[1]), "row 2: attention_mask is shorter than prompts"),
    ({**ROWS["slime"], "response_lengths": 5}, "row 2: response_lengths = 5: must leave at least one of 5 tokens"),
    (changed(rollout_log_probs=None), "row 2: no column 'rollout_log_probs'"),
]


@pytest.mark.parametrize(("row", "message"), BAD, ids=[message for _, message in BAD])
def test_what_is_wrong_is_named_with_its_row(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    form = "slime" if "response_lengths" in row else "verl"
    path = write(tmp_path / "dump.jsonl", [ROWS[form], row])
    with pytest.raises(UserError) as refused:
        read(path, form)
    assert f"{path}: {message}" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_wrong_row_leaves_no_open_file(tmp_path: Path) -> None:
    path = write(tmp_path / "dump.jsonl", [ROWS["verl"], changed(rollout_log_probs=None)])
    with pytest.raises(UserError) as refused:
        read(path, "verl")
    assert refused.value  # which holds the frames that read
    assert path not in [descriptor.resolve() for descriptor in Path("/proc/self/fd").iterdir()]


def test_rows_of_tokens_say_to_which_response_a_token_belongs(tmp_path: Path) -> None:
    tokens = [{"sequence": s, "token_id": 7, "rollout_logprobs": -1.0, "old_logprobs": -1.0} for s in (0, 0, 1)]
    assert [len(r.response_ids) for r in read(write(tmp_path / "a.jsonl", tokens), "ppo_repro")] == [2, 1]
    with pytest.raises(UserError, match="tokens of sequence 0 are not in consecutive rows"):
        read(write(tmp_path / "b.jsonl", [tokens[0], tokens[2], tokens[1]]), "ppo_repro")
    for row in tokens:
        del row["sequence"]
    with pytest.raises(UserError, match="row per token and no column sequence"):
        read(write(tmp_path / "c.jsonl", tokens), "ppo_repro")


OF_RESPONSE = {"prompt_ids", "prompt_mask", "prompts"}  # and verl's attention mask


def by_token(form: str) -> list[dict[str, Any]]:
    whole = ROWS[form]
    lists = {name for name in whole if name in OF_RESPONSE or (form == "verl" and name == "attention_mask")}
    size = len(next(values for name, values in whole.items() if name not in lists))
    return [
        {name: values if name in lists else values[k] for name, values in whole.items()} | {"sequence": 4}
        for k in range(size)
    ]


@pytest.mark.parametrize("form", [form for form in ROWS if form != "slime"])  # whose tokens have no log-prob each
def test_rows_of_tokens_give_the_same_response(form: str, tmp_path: Path) -> None:
    found = read(write(tmp_path / "x.jsonl", by_token(form)), form)
    assert same(found, read(write(tmp_path / "y.jsonl", [ROWS[form]]), form))
    assert found[0].prompt_ids == (5, 6)


def test_a_token_without_a_log_prob_may_come_first(tmp_path: Path) -> None:
    rows = by_token("ppo_repro")
    rows[0]["rollout_logprobs"] = None
    (found,) = read(write(tmp_path / "x.jsonl", rows), None)
    assert np.isnan(found.sampler[0])


def test_a_column_may_be_left_out_of_the_first_token(tmp_path: Path) -> None:
    rows = by_token("ppo_repro")
    for row in rows[1:]:
        row["entropies"] = 0.5
    (found,) = read(write(tmp_path / "x.jsonl", rows), None)
    assert np.array_equal(found.extra["entropies"], [np.nan, 0.5, 0.5], equal_nan=True)


def test_the_tokens_of_a_response_have_one_prompt(tmp_path: Path) -> None:
    rows = by_token("ppo_repro")
    rows[1] |= {"prompt_ids": [5, 7]}
    with pytest.raises(UserError, match="sequence 4: its tokens have different prompt_ids"):
        read(write(tmp_path / "x.jsonl", rows), None)


def test_rows_of_tokens_are_in_the_order_of_their_positions(tmp_path: Path) -> None:
    def of(*positions: object) -> list[DumpedResponse]:
        rows = [{"sequence": 0, "token_id": 7, "rollout_logprobs": -1.0, "old_logprobs": -1.0, "position": p}
                for p in positions]  # fmt: skip
        return read(write(tmp_path / "a.jsonl", rows), "ppo_repro")

    assert [len(response.response_ids) for response in of(0, 1, 4)] == [3]
    for positions, said in (((0, 2, 1), "1 follows 2"), ((0, 1, 1), "1 follows 1")):
        with pytest.raises(UserError, match=f"in sequence 0 position {said}; sort the rows by position"):
            of(*positions)
    with pytest.raises(UserError, match=r"sequence 0: position = .*: must be a list of positions"):
        of(0, "1")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_rows_of_nested_tensors(layout: torch.layout, tmp_path: Path) -> None:
    rows = [ROWS["verl"], {**ROWS["verl"], **{name: ROWS["verl"][name][:1] for name in OF_TOKENS}}]
    columns = {name: torch.tensor([row[name] for row in rows]) for name in ("prompts", "attention_mask")}
    for name in OF_TOKENS:
        columns[name] = torch.nested.nested_tensor([torch.tensor(row[name]) for row in rows], layout=layout)
    torch.save(columns, tmp_path / "dump.pt")
    assert same(read(tmp_path / "dump.pt", "verl"), read(write(tmp_path / "dump.jsonl", rows), "verl"))


@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_a_list_of_dicts_of_columns(kind: Any, tmp_path: Path) -> None:
    """A column of responses of several lengths is a list, of lists or of tensors."""
    columns = {name: [kind(row), kind(row)] for name, row in ROWS["verl"].items()}
    torch.save([columns, columns], tmp_path / "dump.pt")
    expected = read(write(tmp_path / "dump.jsonl", [ROWS["verl"]] * 4), "verl")
    assert same(read(tmp_path / "dump.pt", "verl"), expected)
    assert same(read(tmp_path / "dump.pt", None), expected)


def test_the_first_row_of_a_list_decides_whose_format_it_is(tmp_path: Path) -> None:
    row = ROWS["ppo_repro"]
    two_stacks = row | {"rollout_log_probs": [-1.0] * 3, "old_log_probs": [-1.0] * 3}
    torch.save([row, two_stacks], tmp_path / "dump.pt")
    assert len(read(tmp_path / "dump.pt", None)) == 2
    for second in ({}, {name: value for name, value in row.items() if name != "old_logprobs"}):
        torch.save([row, second], tmp_path / "dump.pt")
        with pytest.raises(UserError, match="row 2: no column"):
            read(tmp_path / "dump.pt", None)
    torch.save([], tmp_path / "dump.pt")
    assert read(tmp_path / "dump.pt", None) == []


def test_one_number_beside_the_columns_is_no_column(tmp_path: Path) -> None:
    columns = {name: torch.tensor([row]) for name, row in ROWS["verl"].items()}
    torch.save(columns | {"kl_coef": torch.tensor(0.5)}, tmp_path / "dump.pt")
    assert same(read(tmp_path / "dump.pt", None), read(write(tmp_path / "dump.jsonl", [ROWS["verl"]]), "verl"))


def test_a_mask_of_a_prompt_that_the_file_lacks_is_left_alone(tmp_path: Path) -> None:
    row = {name: values for name, values in ROWS["trl"].items() if name != "prompt_ids"}
    (found,) = read(write(tmp_path / "x.jsonl", [row | {"prompt_mask": [1, 1]}]), "trl")
    assert (found.prompt_ids, found.response_ids) == ((), (7, 8, 9))


def test_a_column_with_another_number_of_rows_is_refused(tmp_path: Path) -> None:
    columns = {name: torch.tensor([row, row]) for name, row in ROWS["verl"].items()}
    for name in ("responses", "entropies", "pad_length"):
        torch.save(columns | {name: torch.ones(3, 3, dtype=torch.int64)}, tmp_path / "dump.pt")
        with pytest.raises(UserError, match=f"{name} has 3 rows, rollout_log_probs has 2; all must have as many"):
            read(tmp_path / "dump.pt", "verl")


@pytest.mark.parametrize("kind", [torch.Tensor.to_sparse, lambda x: x.to("meta")])
@pytest.mark.parametrize("side", ["rollout_log_probs", "old_log_probs"])
def test_a_tensor_without_a_list_of_numbers_is_refused(side: str, kind: Any, tmp_path: Path) -> None:
    columns = {name: torch.tensor([row]) for name, row in ROWS["verl"].items()}
    torch.save(columns | {side: kind(columns[side])}, tmp_path / "dump.pt")
    with pytest.raises(UserError, match=f"row 1: {side} = .*: must be a list of log-probs in nats"):
        read(tmp_path / "dump.pt", "verl")


OF_TOKENS = "responses", "rollout_log_probs", "old_log_probs", "response_mask"


class Code:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (Path.touch, (Path("was-run"),))  # type: ignore[return-value]


def test_code_in_a_pickle_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, save in (("a.pt", torch.save), ("b.pt", lambda value, path: path.write_bytes(pickle.dumps(value)))):
        save({"responses": Code()}, tmp_path / name)
        with pytest.raises(UserError, match="cannot be read without running code from it"):
            read(tmp_path / name, "verl")
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.csv", b"a", "must be a .jsonl, a .parquet, a .pt file"),
        ("x.jsonl", b"", "is empty"),
    ],
)
def test_other_files_are_refused(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message.replace(".", r"\.")):
        read(tmp_path / name, "verl")


def test_a_value_of_a_file_that_is_no_column_is_left_out(tmp_path: Path) -> None:
    columns = {name: torch.tensor([values] * 2) for name, values in ROWS["verl"].items()}
    torch.save(columns | {"entropy": "full", "pad_length": {"mean": 1.0}}, tmp_path / "x.pt")
    assert same(read(tmp_path / "x.pt", "verl"), read(write(tmp_path / "y.jsonl", [ROWS["verl"]] * 2), "verl"))


def test_names_of_ones_own_may_be_ahead_with_any_spelling(tmp_path: Path) -> None:
    row = {"ids": [5, 7, 8], "m": [0, 1, 1], "s": [9.0, -1.0, -2.0], "t": [-3.0, -4.0, 9.0], "entropy": [0.1, 0.2, 9.0]}
    names = Names("s", "t", "m", "ids", ahead=("t", "entropy"))
    (found,) = read_dump(write(tmp_path / "x.jsonl", [row]), names)
    assert found.trainer.tolist() == [-3.0, -4.0]
    assert found.extra["entropies"] == pytest.approx([0.1, 0.2])
