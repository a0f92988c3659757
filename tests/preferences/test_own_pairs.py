"""Preference pairs of one's own, by commands alone: DPO is a run like the others, and a reward model takes the file."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from tokenizers.normalizers import NFC

from ppo_repro.base.errors import UserError
from ppo_repro.commands.cli import exit_code_of
from ppo_repro.config.dpo import DPOConfig
from ppo_repro.config.files import validated
from ppo_repro.preferences.preference_pairs import Preference, pairs_of_file
from ppo_repro.records import manifest, reader
from ppo_repro.tasks.problems import Problem, arithmetic
from ppo_repro.tasks.templates import encoder
from ppo_repro.tasks.tokenizer import character_tokenizer
from tests.support.cli import Cli, one_line, sets
from tests.support.json_lines import write_lines
from tests.support.paths import TINY
from tests.support.runs import run_below
from tests.support.synthetic_run import rewrite_cell

Run = Callable[..., tuple[int, str]]


def tree(model: Path) -> dict[str, Any]:
    return {
        "experiment": "own",
        "seed": 3,
        "model": {"kind": "folder", "path": str(model)},
        "pairs": "pairs.jsonl",
        "num_eval_prompts": 6,
        "dpo": {"epochs": 3, "minibatch_size": 16, "learning_rate": 2e-3},
        "numerics": {"max_context": 24},
    }


@pytest.fixture(scope="module")
def folder(deterministic_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration and its pairs, a grid of two seeds, and one finished run."""
    folder = tmp_path_factory.mktemp("own")
    rows = [{"prompt": p.prompt, "chosen": p.answer, "rejected": f"{p.answer}0"} for p in arithmetic(6)]
    write_lines(folder / "pairs.jsonl", rows)
    (folder / "dpo.yaml").write_text(yaml.safe_dump(tree(deterministic_run / "checkpoints" / "final")))
    grid = {"question": "?", "expectation": "none", "base": "dpo.yaml", "seeds": [3, 4]}
    (folder / "seeds.yaml").write_text(yaml.safe_dump(grid))
    return folder


@pytest.fixture(scope="module")
def finished(folder: Path) -> Path:
    assert exit_code_of(["run", f"{folder}/dpo.yaml", "--out", f"{folder}/runs"]) == 0
    found = run_below(folder / "runs")
    assert manifest.load(found).status == "complete"
    return found


def test_a_dpo_run_is_shown_verified_rerun_and_reported(finished: Path, cli: Cli) -> None:
    out = cli.done("show", finished)
    assert "held-out pairs in the right order" in out
    for command in (("verify",), ("rerun", "--set", "layout.update_micro_batch=4"), ("report",)):
        cli.done(command[0], finished, *command[1:])
    page = (finished / "report.html").read_text(encoding="utf-8")
    assert "own" in page
    by_step = {"Loss", "Margin", "Pairs in the right order", "Gradient norm"}
    assert {*by_step, "Margin of training pairs"} <= set(re.findall("<h3>(.*?)</h3>", page))


def test_a_page_without_a_finite_margin_says_so(finished: Path, tmp_path: Path, cli: Cli) -> None:
    run, pages = shutil.copytree(finished, tmp_path / "run"), []
    for margins in (lambda values: values, lambda values: values * np.nan):
        rewrite_cell(run, "margins", 2, "margins", margins)
        cli.done("report", run)
        pages.append((run / "report.html").read_text(encoding="utf-8"))
    assert ["<h3>Margins after training</h3>" in page for page in pages] == [True, False]
    finite = "No margin after training is finite, so there is no figure of them."
    assert [finite in page for page in pages] == [False, True]


@pytest.mark.parametrize(
    "words",
    [
        *("clipping", "compare", "tokenization", "mismatch", "mismatch --remedies"),
        *("figure agreement x.svg", "figure mismatch x.svg"),
    ],
)
def test_an_analysis_of_responses_says_which_kind_of_run_has_none(
    words: str, finished: Path, control_run: Path, cli: Cli
) -> None:
    for run, kind in ((finished, "DPO"), (control_run, "control")):
        code, _, err = cli("analyse", *words.split(), *[run] * (1 + words.startswith("compare")))
        assert (code, one_line(err)) == (
            2,
            f"error: {run}: is a {kind} run, which records no responses; give a run of PPO on a language model",
        )


def test_an_interrupted_dpo_run_goes_on_to_the_same_fingerprint(
    finished: Path, folder: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ppo_repro.base.progress import ConsoleProgress

    def interrupted(self: ConsoleProgress, done: int, total: int, figures: str, *pace: float) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ConsoleProgress, "iteration", interrupted)
        assert cli("run", folder / "dpo.yaml", "--out", tmp_path)[0] == 130
    ended = run_below(tmp_path)
    code, _, err = cli("resume", ended)
    assert code == 0
    assert "computed again from the beginning; 2 recorded" in err
    assert manifest.load(ended).fingerprint == manifest.load(finished).fingerprint
    assert cli("diff", ended, finished)[0] == 0


def test_a_rerun_takes_the_pairs_that_the_run_has(finished: Path, folder: Path, tmp_path: Path, cli: Cli) -> None:
    assert (finished / "inputs" / "pairs.jsonl").is_file()
    before = (folder / "pairs.jsonl").read_text()
    try:
        (folder / "pairs.jsonl").write_text(before.replace("120", "121"))
        assert cli("rerun", finished)[0] == 0
        cli.done("run", folder / "dpo.yaml", "--out", tmp_path)
    finally:
        (folder / "pairs.jsonl").write_text(before)
    edited = run_below(tmp_path)
    assert cli("diff", edited, finished)[0] == 1


def test_pairs_in_parquet_train_as_the_same_lines_do(
    finished: Path, folder: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "pairs.parquet")
    monkeypatch.chdir(tmp_path)
    cli.done("run", folder / "dpo.yaml", "--set", "pairs=pairs.parquet", "--out", tmp_path)
    assert manifest.load(run_below(tmp_path)).fingerprint == manifest.load(finished).fingerprint


def test_a_control_token_in_a_prompt_is_refused_without_the_advice_of_a_field_that_dpo_lacks(tmp_path: Path) -> None:
    encode = encoder(character_tokenizer(["ab"]), validated(DPOConfig, tree(tmp_path), "dpo.yaml"))
    assert encode([Problem("a", "ab", "")])
    with pytest.raises(UserError, match=r"reads as a control token; remove it$"):
        encode([Problem("e", "<eos>", "")])


def test_letter_and_accent_are_what_the_tokenizer_writes_as_one_character(tmp_path: Path) -> None:
    """As Qwen's tokenizers do; the control's tokenizer does not compose, and lacks the accent."""
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "ab", "chosen": "e\u0301", "rejected": "b"}))
    tokenizer = character_tokenizer(["ab\u00e9"])
    config = validated(DPOConfig, tree(tmp_path), "dpo.yaml")

    def read() -> list[Preference]:
        return pairs_of_file(tmp_path / "p.jsonl", "pairs", tokenizer, encoder(tokenizer, config), False)

    with pytest.raises(UserError, match=r"p\.jsonl:1: field 'chosen': the tokenizer cannot spell the response"):
        read()
    tokenizer.backend_tokenizer.normalizer = NFC()
    (pair,) = read()
    assert tokenizer.decode(pair.chosen_ids, skip_special_tokens=True) == "\u00e9"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"chosen": "12"}, "field 'rejected' is missing"),
        ({"chosen": "12", "rejected": "12"}, "'chosen' and 'rejected' are the same response"),
        ({"chosen": "12", "rejected": "x" * 500}, "field 'rejected': "),
        ({"chosen": "12", "rejected": "1" * 500}, "preference pair of prompt '9+9=': has "),
        ({"prompt": [{"role": "user", "content": "a"}], "chosen": "1", "rejected": "2"}, "chat_template = true"),
    ],
)
def test_a_line_that_is_no_pair_is_named(
    line: dict[str, Any], message: str, folder: Path, tmp_path: Path, cli: Cli
) -> None:
    shutil.copy(folder / "dpo.yaml", tmp_path)
    text = (folder / "pairs.jsonl").read_text() + json.dumps({"prompt": "9+9=", **line}) + "\n"
    (tmp_path / "pairs.jsonl").write_text(text)
    said = cli.refusal("run", tmp_path / "dpo.yaml", "--out", tmp_path)
    assert message in said
    assert len(said) < 400
    assert "preference pair" in said or "pairs.jsonl:50: " in said


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_dpo_run_is_copied_to_tensorboard_and_mlflow(
    finished: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli("track", finished, "--tensorboard", tmp_path / "tb")[0] == 0
    assert list((tmp_path / "tb").rglob("events.out*"))
    out = cli.done("track", finished, "--uri", f"sqlite:///{tmp_path}/mlflow.db", "--json")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    copied = client.get_run(json.loads(out)["mlflow"]["run_id"])
    assert copied.data.tags["fingerprint"] == manifest.load(finished).fingerprint
    margins = client.get_metric_history(copied.info.run_id, "iteration/margin")
    assert [m.value for m in margins] == reader.read_iterations(finished)["margin"].tolist()


@pytest.mark.slow
def test_a_grid_of_dpo_runs(folder: Path, finished: Path, tmp_path: Path, cli: Cli) -> None:
    cli.done("grid", folder / "seeds.yaml", "--out", tmp_path)
    runs = sorted(path.parent for path in tmp_path.rglob("manifest.json"))
    assert manifest.load(runs[0]).fingerprint == manifest.load(finished).fingerprint
    assert len(runs) == 2
    assert cli("report", tmp_path / "seeds")[0] == 0
    assert "held-out pairs in order" in (tmp_path / "seeds" / "report.html").read_text(encoding="utf-8")


def test_a_reward_model_is_trained_on_pairs_of_ones_own(folder: Path, tmp_path: Path, cli: Cli) -> None:
    """For prompts of one's own that have no answers."""
    prompts = [{"prompt": p.prompt} for p in arithmetic(9)]
    write_lines(tmp_path / "p.jsonl", prompts)
    task = f"task={{kind: jsonl, path: '{tmp_path}/p.jsonl', num_eval_prompts: 7}}"
    term = "{kind: trained_model, %sminibatch_size: 8, learning_rate: 1e-3}"
    model = f"model={json.dumps(yaml.safe_load((folder / 'dpo.yaml').read_text())['model'])}"
    changed = sets(task, model, "ppo.iterations=1")
    terms = f"reward.terms=[{term % f'pairs: {folder}/pairs.jsonl, '}]"
    out = cli.done("run", TINY, "--out", tmp_path, *changed, "--set", terms, "--json")
    made = f"reward.terms=[{term % 'num_pairs: 30, '}]"
    said = cli.refusal("run", TINY, "--out", tmp_path, *changed, "--set", made)
    assert "need pairs, or task.kind = arithmetic" in said
    summary = json.loads(out)
    assert not summary["is_judged"], "no answer tells a right response from a wrong one"
    run_dir = Path(summary["run_dir"])
    assert "inputs/pairs.jsonl" in manifest.load(run_dir).inputs
    assert 0.0 <= float(manifest.load(run_dir).final["reward_model_pair_accuracy"]) <= 1.0
    assert cli("rerun", run_dir, "--set", "layout.forward_micro_batch=3")[0] == 0
