"""`ppo-repro audit` on a run's own records: exact, so right; with one side spoiled, wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ppo_repro.records import reader
from ppo_repro.records.contents import final_folder, reference_folder
from ppo_repro.watcher import Silent
from tests.support.cli import Cli, one_line
from tests.support.language import run
from tests.support.runs import small_config


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A dump of the first iteration of a run, and the folder of the weights it was sampled with."""
    folder = tmp_path_factory.mktemp("dump")
    run_dir, _ = run(small_config("ppo.iterations=1", "checkpoints.every=1"), folder, Silent())
    tokens, prompts = reader.read_tokens(run_dir), reader.read_sequences(run_dir)["prompt_ids"]
    path = folder / "dump.jsonl"
    with path.open("w") as file:
        for prompt, (_, of) in zip(prompts, tokens.groupby("sequence", sort=True), strict=True):
            row = {"prompt_ids": list(map(int, prompt)), "response_ids": of["token_id"].tolist()}
            row |= {name: of[name].astype(float).tolist() for name in ("rollout_logprobs", "old_logprobs")}
            file.write(json.dumps(row) + "\n")
    return path, reference_folder(run_dir)


def test_exact_log_probs_are_right(cli: Cli, dump: tuple[Path, Path], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    code, out, err = cli("audit", dump[0], "--model", dump[1], "--out", page)
    assert code == 0 and "error: " not in err
    assert out.splitlines()[-2:] == ["verdict: both sides are right", f"page    {page}"]
    assert "sampler is right" in page.read_text()


def test_the_wrong_temperature_is_wrong(cli: Cli, dump: tuple[Path, Path]) -> None:
    code, out, _ = cli("audit", dump[0], "--model", dump[1], "--temperature", "0.5", "--json")
    found = json.loads(out)
    assert code == 1 and found["trainer"]["cause"] == found["sampler"]["cause"] == "temperature 1 instead of 0.5"


def test_other_weights_are_wrong_and_named_where_they_are_given(cli: Cli, dump: tuple[Path, Path]) -> None:
    later = final_folder(dump[1].parents[1])
    code, out, _ = cli("audit", dump[0], "--model", later, "--also", dump[1], "--json")
    assert code == 1 and json.loads(out)["sampler"]["cause"] == f"weights of {dump[1]}"


# What TRL 1.12.0's GRPOTrainer sees, sampler and trainer: experiments/guard_your_stack/trl_dump.py with these options,
# on the reference model of small.yaml, 8 prompts, 12 tokens, temperature 0.8. Another warm start needs new dumps.
REAL = {
    "float32": ("", ""),
    "float32 --raw": ("temperature 1 instead of 0.8", ""),
    "bfloat16": ("about as far as bfloat16 rounding is", "about as far as bfloat16 rounding is"),
    "float32 --checkpointing": ("unknown", ""),  # the key/value cache is off, which `generate` does not notice
}


@pytest.mark.parametrize("options", REAL)
def test_dumps_of_the_real_trl(cli: Cli, dump: tuple[Path, Path], options: str) -> None:
    path = Path(__file__).parent / "trl" / f"{options.replace(' --', '_')}.jsonl"
    sets = ["--format", "trl", "--temperature", "0.8"]
    code, out, err = cli("audit", path, "--model", dump[1], *sets, "--json")
    found = json.loads(out)
    assert "error: " not in err and code == int(any(REAL[options]))
    for side, cause in zip(("sampler", "trainer"), REAL[options], strict=True):
        assert found[side]["is_right"] == (cause == "") and found[side]["cause"].startswith(cause)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--format", "other"], "--format other: must be one of ppo_repro, verl, trl, slime, prime-rl"),
        (["--temperature", "0"], "--temperature 0.0: must be greater than 0"),
        (["--top-p", "2"], "--top-p 2.0: must be greater than 0 and at most 1"),
        (["--top-k", "-1"], "--top-k -1: must be at least 0"),
        (["--responses", "0"], "--responses 0: must be at least 1"),
        (["--format", "verl"], "row 1: no column 'responses'"),
        (["--model", "nowhere"], "nowhere"),
        (["--out", "nowhere/page.html"], "--out nowhere/page.html: there is no folder nowhere; make it"),
    ],
)
def test_mistakes_are_one_line(cli: Cli, dump: tuple[Path, Path], options: list[str], message: str) -> None:
    code, out, err = cli("audit", dump[0], "--model", dump[1], *options)
    assert (code, out) == (2, "") and message in one_line(err)


def test_rows_as_long_as_the_model_has_positions_and_longer_ones(
    cli: Cli, dump: tuple[Path, Path], tmp_path: Path
) -> None:
    row = json.loads(dump[0].read_text().splitlines()[0])
    positions = json.loads((dump[1] / "config.json").read_text())["max_position_embeddings"]
    for more, expected in ((0, 1), (1, 2)):
        filled = (row["prompt_ids"] * positions)[: positions + more - len(row["response_ids"])]
        (tmp_path / "dump.jsonl").write_text(json.dumps({**row, "prompt_ids": filled}) + "\n")
        code, _, err = cli("audit", tmp_path / "dump.jsonl", "--model", dump[1])
        assert code == expected
    assert f"row 1: {positions + 1} tokens; the model has {positions} positions" in one_line(err)


def test_a_side_without_log_probs_has_no_distance(cli: Cli, dump: tuple[Path, Path], tmp_path: Path) -> None:
    row = json.loads(dump[0].read_text().splitlines()[0])
    row["rollout_logprobs"] = [None] * len(row["response_ids"])
    (tmp_path / "dump.jsonl").write_text(json.dumps(row) + "\n")
    code, out, _ = cli("audit", tmp_path / "dump.jsonl", "--model", dump[1])
    count = len(row["response_ids"])
    assert code == 1 and f"sampler is wrong: {count} of {count} tokens have no log-prob or a 0\n" in out


def test_tokens_that_the_model_has_not_are_refused(cli: Cli, dump: tuple[Path, Path], tmp_path: Path) -> None:
    row = json.loads(dump[0].read_text().splitlines()[0])
    row["response_ids"][0] = 10**6
    (tmp_path / "dump.jsonl").write_text(json.dumps(row) + "\n")
    code, _, err = cli("audit", tmp_path / "dump.jsonl", "--model", dump[1])
    assert code == 2 and "token 1000000 is not in the model's vocabulary" in one_line(err)
