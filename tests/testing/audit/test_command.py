"""`ppo-repro audit` on a run's own records: right; with one side spoiled, wrong."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ppo_repro.base.watcher import Silent
from ppo_repro.records import reader
from ppo_repro.records.folder import FINAL, REFERENCE
from ppo_repro.testing import assert_mismatch_below, diagnose
from tests.support import sglang_dumps
from tests.support.cli import Cli, one_line
from tests.support.language import run
from tests.support.paths import ROOT
from tests.support.runs import small_config
from tests.support.turns import turns_config


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A dump of the first iteration of a run, and the folder of the weights it was sampled with."""
    return dumped(tmp_path_factory.mktemp("dump"))


def dumped(folder: Path, *overrides: str) -> tuple[Path, Path]:
    run_dir, _ = run(small_config("ppo.iterations=1", "checkpoints.every=1", *overrides), folder, Silent())
    tokens, prompts = reader.read_tokens(run_dir), reader.read_sequences(run_dir)["prompt_ids"]
    path = folder / "dump.jsonl"
    with path.open("w") as file:
        for prompt, (_, of) in zip(prompts, tokens.groupby("sequence", sort=True), strict=True):
            row = {"prompt_ids": list(map(int, prompt)), "response_ids": of["token_id"].tolist()}
            row |= {name: of[name].astype(float).tolist() for name in ("rollout_logprobs", "old_logprobs")}
            file.write(json.dumps(row) + "\n")
    return path, run_dir / REFERENCE


def test_log_probs_of_a_run_are_right(cli: Cli, dump: tuple[Path, Path], tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.parquet"
    code, out, err = cli("audit", dump[0], "--model", dump[1], "--out", tokens)
    assert code == 0
    assert "error: " not in err
    assert out.splitlines()[-2:] == ["verdict: both sides are right", f"tokens  {tokens}"]
    frame = pd.read_parquet(tokens)
    assert (frame["sampler"] - frame["reference"]).abs().max() < 1e-4


def test_out_replaces_only_a_file_that_an_audit_wrote(cli: Cli, dump: tuple[Path, Path], tmp_path: Path) -> None:
    options = "audit", dump[0], "--model", dump[1], "--responses", "6", "--out"
    assert [cli(*options, tmp_path / "tokens.parquet")[0] for _ in range(2)] == [0, 0]
    mine, text = tmp_path / "mine.parquet", tmp_path / "mine.txt"
    pd.read_parquet(tmp_path / "tokens.parquet").drop(columns="reference").to_parquet(mine)
    text.write_text("of mine")
    for path in (mine, text):
        before = path.read_bytes()
        code, out, err = cli(*options, path)
        assert (code, out) == (2, "")
        assert f"{path}: exists, and was not written by ppo-repro" in one_line(err)
        assert path.read_bytes() == before


def test_the_wrong_temperature_is_wrong(cli: Cli, dump: tuple[Path, Path]) -> None:
    code, out, _ = cli("audit", dump[0], "--model", dump[1], "--temperature", "0.5", "--responses", "3", "--json")
    found = json.loads(out)
    assert code == 1
    assert found["trainer"]["cause"] == found["sampler"]["cause"] == "temperature 1 instead of 0.5"


def test_a_run_of_several_turns_is_audited_in_its_contexts(cli: Cli, tmp_path: Path) -> None:
    run_dir, _ = run(turns_config(tmp_path, "checkpoints.every=1", "ppo.iterations=1"), tmp_path / "runs", Silent())
    forced = reader.read_sequences(run_dir)["is_forced"]
    assert any(map(any, forced))
    code, out, _ = cli("audit", run_dir)
    assert (code, out.splitlines()[-1]) == (0, "verdict: both sides are right")
    assert f"{sum(len(of) - sum(of) for of in forced):,} tokens of " in out.splitlines()[0]


def test_a_sampler_without_the_given_cut_is_found(cli: Cli, dump: tuple[Path, Path]) -> None:
    options = "audit", dump[0], "--model", dump[1], "--sampler-logprobs", "tempered", "--trainer-logprobs", "tempered"
    assert cli(*options)[0] == 0
    code, out, _ = cli(*options, "--top-k", "2")
    assert code == 1
    assert re.search(r"draws: \d+ of \d+ tokens have probability 0: does the sampler make the given cuts\?", out), out


def test_drawn_tokens_that_are_all_impossible_are_counted(cli: Cli, dump: tuple[Path, Path], tmp_path: Path) -> None:
    rows = [json.loads(line) for line in dump[0].read_text().splitlines()]
    unlikely = [row for row in rows if row["rollout_logprobs"][0] < -1.5][:4]  # the likeliest has more than 0.2
    assert len(unlikely) == 4
    path = tmp_path / "unlikely.jsonl"
    path.write_text(
        "".join(json.dumps({n: v if n == "prompt_ids" else v[:1] for n, v in r.items()}) + "\n" for r in unlikely)
    )
    sides = ("--sampler-logprobs", "tempered", "--trainer-logprobs", "tempered")
    code, out, _ = cli("audit", path, "--model", dump[1], "--top-k", "1", *sides)
    assert code == 1
    assert "draws: 4 of 4 tokens have probability 0" in out, out


def test_a_dump_without_end_tokens_accuses_nobody_of_a_ban(cli: Cli, dump: tuple[Path, Path], tmp_path: Path) -> None:
    rows = [json.loads(line) for line in dump[0].read_text().splitlines()]
    cut = [{**row, **{name: row[name][:-1] for name in row if name != "prompt_ids"}} for row in rows]
    path = tmp_path / "cut.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in cut if row["response_ids"]))
    code, out, _ = cli("audit", path, "--model", dump[1], "--responses", "1000")
    assert "a ban of token" not in out
    assert code == 0, out


def test_rows_after_the_judged_responses_are_not_read(cli: Cli, dump: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "dump.jsonl"
    path.write_text("".join(dump[0].read_text().splitlines(keepends=True)[:6]) + "{damaged")
    code, out, _ = cli("audit", path, "--model", dump[1], "--responses", "6")
    assert code == 0
    assert " tokens of the first 6 responses; " in out.splitlines()[0]
    assert f"{path}:7: not valid JSON" in one_line(cli("audit", path, "--model", dump[1], "--responses", "7")[2])


@pytest.mark.slow
def test_a_tokenizer_that_does_not_load_is_said(cli: Cli, dump: tuple[Path, Path], tmp_path: Path) -> None:
    model = shutil.copytree(dump[1], tmp_path / "model")
    (model / "tokenizer.json").write_text("{")
    code, _, err = cli("audit", dump[0], "--model", model, "--responses", "6")
    assert code == 0
    assert f"--model {model}: its tokenizer: cannot be loaded (" in err
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [("temperature=0.8", "top_k=5"), ("top_p=0.9",)])
def test_a_run_with_cuts_is_right(cli: Cli, tmp_path: Path, sampling: tuple[str, ...]) -> None:
    path, model = dumped(tmp_path, *(f"rollout.{s}" for s in sampling))
    options = [x for s in sampling for x in (f"--{s.partition('=')[0].replace('_', '-')}", s.partition("=")[2])]
    code, out, _ = cli("audit", path, "--model", model, *options)
    assert code == 0
    assert "log-probs judged as processed" in out


def test_a_folder_that_is_not_the_one_is_refused(cli: Cli, dump: tuple[Path, Path]) -> None:
    code, out, err = cli("audit", dump[0], "--model", dump[1].parents[1] / FINAL, "--responses", "3")
    assert (code, out) == (2, "")
    assert "give the folder of the weights that the dump was made with" in one_line(err)


def test_other_weights_are_wrong_and_named_where_they_are_given(cli: Cli, dump: tuple[Path, Path]) -> None:
    later = dump[1].parents[1] / FINAL
    code, out, _ = cli("audit", dump[0], "--model", later, "--also", dump[1], "--responses", "6", "--json")
    assert code == 1
    found = json.loads(out)["sampler"]
    assert (found["state"], found["cause"]) == ("explained", f"weights of {dump[1]}")


RAW = "temperature 1 instead of 0.8"
# What is wrong with sampler and trainer in dumps of real stacks. "bfloat16": "computed in" it, or "as large as" its
# rounding: the processor decides.
REAL = {
    # TRL 1.12.0's GRPOTrainer: experiments/guard_your_stack/trl_dump.py with the options that the name has, on the
    # reference model of small.yaml, 8 prompts, 12 tokens, temperature 0.8. Another warm start needs new dumps.
    "trl/float32": ("", ""),
    "trl/float32_raw": (RAW, ""),
    "trl/bfloat16": ("bfloat16", "bfloat16"),
    "trl/float32_checkpointing": ("only the token before (no key/value cache)", ""),
    # stock SGLang 0.5.21 servers on the CPU: tests/support/sglang_dumps.py
    "sglang/float32": ("", ""),
    "sglang/float32_trainer_bfloat16": ("", "bfloat16"),
    "sglang/float32_trainer_without_temperature": ("", RAW),
    "sglang/float32_top_p": ("", ""),  # SGLang's log-probs are of all tokens, whatever top-p keeps
    "sglang/float32_rescored": (RAW, ""),  # SGLang divides by the temperature while it samples, and not in a prefill
    "sglang/float32_stale": ("weights of ", ""),
    "sglang/float32_raw": (RAW, ""),
    "sglang/bfloat16": ("bfloat16", ""),
    "sglang/bfloat16_trainer_bfloat16": ("bfloat16", "bfloat16"),
    "sglang/bfloat16_trainer_without_temperature": ("bfloat16", RAW),
    "sglang/bfloat16_raw": (RAW, ""),
}
QUICK = "trl/float32", "sglang/float32", "sglang/float32_trainer_without_temperature"


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in REAL])
def test_dumps_of_real_stacks(cli: Cli, dump: tuple[Path, Path], name: str) -> None:
    reference, later = dump[1], dump[1].parents[1] / FINAL
    models = ["--model", later, "--also", reference] if name == "sglang/float32_stale" else ["--model", reference]
    path = Path(__file__).parent / f"{name}.jsonl"
    code, out, err = cli("audit", path, *models, "--temperature", "0.8", "--json")
    assert "error: " not in err
    assert code == int(any(REAL[name]))
    assert says(json.loads(out), *REAL[name])


def test_the_page_shows_what_the_command_prints(cli: Cli, dump: tuple[Path, Path]) -> None:
    page = (ROOT / "ppo_repro" / "testing" / "audit" / "README.md").read_text()
    shown = page.partition("$ ppo-repro audit ")[2].partition("\n```")[0].splitlines()
    path, *options = shown[0].split()
    options[options.index("--model") + 1] = str(dump[1])
    _, out, _ = cli("audit", ROOT / path, *options)
    without_numbers = [re.sub(r"\d+(\.\d+)?(e-\d+)?", "#", line) for line in (*shown[1:], *out.splitlines())]
    assert without_numbers[: len(shown) - 1] == without_numbers[len(shown) - 1 :]


def says(found: dict[str, Any], sampler: str, trainer: str) -> bool:
    """Whether each side's cause names that; "" is for a side that is right."""
    return all(
        found[side]["is_right"] == (cause == "") and cause in found[side]["cause"]
        for side, cause in (("sampler", sampler), ("trainer", trainer))
    )


def test_each_dump_of_sglang_has_a_verdict() -> None:
    assert {f"sglang/{d.name}" for d in sglang_dumps.DUMPS} == {name for name in REAL if name.startswith("sglang/")}


@pytest.mark.sglang
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_dump_of_a_server_that_runs_now(cli: Cli, dump: tuple[Path, Path], tmp_path: Path, dtype: str) -> None:
    # servers sample without a seed: with one response to each prompt, one dump in 20 looked unlike bfloat16 by chance
    prompts = 3 * sglang_dumps.PROMPTS
    with sglang_dumps.stock_server(dump[1], tmp_path, dtype, raw=False) as url:
        sglang_dumps.dump(url, dump[1], tmp_path / "now.jsonl", ("--temperature", "0.8"), prompts)
    code, out, _ = cli("audit", tmp_path / "now.jsonl", "--model", dump[1], "--temperature", "0.8", "--json")
    found = json.loads(out)
    assert code == int(dtype == "bfloat16")
    assert found["tokens"] == 12 * len(prompts)
    assert says(found, *REAL[f"sglang/{dtype}"]), (found["sampler"]["cause"], found["trainer"]["cause"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--format", "other"],
            "--format or names = 'other': must be one of ppo_repro, verl, trl, slime, prime-rl",
        ),
        (["--temperature", "0"], "--temperature: '0' must be a finite number of at least 1e-06"),
        (["--temperature", "1e-38"], "--temperature: '1e-38' must be a finite number of at least 1e-06"),
        (["--top-p", "2"], "--top-p: '2' must be a number above 0 and at most 1"),
        (["--top-k", "-1"], "--top-k: '-1' is not a count"),
        (["--responses", "0"], "--responses: must be at least 1"),
        (["--threads", "0"], "--threads: must be at least 1"),
        (["--format", "verl"], "row 1: no column 'rollout_log_probs'"),
        (["--repetition-penalty", "inf"], "--repetition-penalty: 'inf' must be a finite number above 0"),
        (["--min-p", "1"], "--min-p: '1' must be a number of at least 0 and below 1"),
        (["--device", "cuda"], "--device cuda: torch sees no CUDA device"),
        (["--model", "nowhere"], "nowhere"),
        (["--out", "nowhere/a.parquet"], "nowhere/a.parquet: there is no folder nowhere; make it"),
    ],
)
def test_mistakes_are_one_line(cli: Cli, dump: tuple[Path, Path], options: list[str], message: str) -> None:
    code, out, err = cli("audit", dump[0], "--model", dump[1], *options)
    assert (code, out) == (2, "")
    assert message in one_line(err)


def test_rows_whose_inputs_fill_the_positions_of_the_model_and_longer_ones(
    cli: Cli, dump: tuple[Path, Path], tmp_path: Path
) -> None:
    """The last token is no input."""
    row = json.loads(dump[0].read_text().splitlines()[0])
    positions = json.loads((dump[1] / "config.json").read_text())["max_position_embeddings"]
    for more in (1, 2):
        filled = (row["prompt_ids"] * positions)[: positions + more - len(row["response_ids"])]
        (tmp_path / "dump.jsonl").write_text(json.dumps({**row, "prompt_ids": filled}) + "\n")
        code, _, err = cli("audit", tmp_path / "dump.jsonl", "--model", dump[1])
        assert code == 2
        assert ("positions" in err) == (more == 2)  # other prompts than those that were sampled
    assert f"row 1: {positions + 2} tokens; the model has {positions} positions" in one_line(err)


@pytest.mark.parametrize(
    ("change", "cause", "verdicts", "guard"),
    [
        (lambda v: v, "", {"none", "floating_point_noise"}, None),
        pytest.param(
            lambda v: v / math.log(2), "in base 2, not in nats", {"unknown"}, "abs_mean is", marks=pytest.mark.slow
        ),
        (lambda v: [*v[1:], -3.0], "each entry is of the token +1 places on", {"off_by_one"}, "abs_mean is"),
        (lambda v: 0.0 * v, "numbers are exactly 0; nothing was recorded", {"unknown"}, "nothing was recorded"),
        (lambda v: -v, "minus the log-prob (a loss)", {"unknown"}, "numbers are above 0"),
    ],
)
def test_audit_diagnosis_and_guard_agree_about_a_dump(
    cli: Cli,
    dump: tuple[Path, Path],
    tmp_path: Path,
    change: Callable[[np.ndarray], Sequence[float]],
    cause: str,
    verdicts: set[str],
    guard: str | None,
) -> None:
    """One file, three readers: none names what another one contradicts."""
    rows = [json.loads(line) for line in dump[0].read_text().splitlines()[:12]]
    for row in rows:
        row["rollout_logprobs"] = list(change(np.array(row["rollout_logprobs"])))
    path = tmp_path / "dump.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, _ = cli("audit", path, "--model", dump[1], "--json")
    found = json.loads(out)
    assert code == int(bool(cause))
    assert cause in found["sampler"]["cause"]
    assert found["trainer"]["is_right"]
    of_pairs = diagnose(path)
    assert of_pairs.verdict in verdicts
    assert of_pairs.evidence["tokens"] == found["tokens"]
    if guard is None:
        assert_mismatch_below(path, abs_mean=1e-5)
    else:
        with pytest.raises(AssertionError, match=guard):
            assert_mismatch_below(path, abs_mean=1e-5)
