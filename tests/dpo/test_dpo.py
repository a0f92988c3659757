"""DPO on a recorded run: one fingerprint under every layout, records that can be checked, mistakes in one line."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from ppo_repro.config.dpo import DPOConfig
from ppo_repro.config.files import load_dpo_config
from ppo_repro.config.reward import RewardModelTraining
from ppo_repro.disk import sealed_json
from ppo_repro.dpo import records
from ppo_repro.dpo.pairs import pairs_from_run
from ppo_repro.dpo.run import DPOResult, lines, sequence_kl, train_dpo
from ppo_repro.errors import PromiseBroken, UserError
from ppo_repro.numerics.optimizer import weights_digest
from ppo_repro.records import manifest
from ppo_repro.rollout.engine import Request
from ppo_repro.runs.prepare import prepare
from ppo_repro.seeding import sample_seed
from ppo_repro.stages.generation import sampling_of
from ppo_repro.watcher import Silent
from tests.support.cases.config_trees import leaf_fields
from tests.support.cli import Cli, one_line
from tests.support.language import run
from tests.support.paths import ROOT
from tests.support.runs import small_config

TEXT = """
experiment: baseline
seed: 2
run: {run}
num_eval_prompts: 6
dpo: {{beta: 0.1, epochs: 2, minibatch_size: 17, learning_rate: 2e-3}}
numerics: {{max_context: 24}}
layout: {{threads: 1}}
"""
LAYOUTS = (
    ("layout.threads=2", "layout.padding=left", "layout.update_micro_batch=4"),
    ("layout.padding=none", "layout.forward_micro_batch=5", "layout.rollout_slots=7", "layout.prefix_cache=false"),
    ("layout.update_micro_batch=1", "layout.gradient_checkpointing=true", "layout.prefill_chunk=2"),
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run that keeps its reference, so that no warm start has to be done again."""
    config = small_config("checkpoints.every=2", "ppo.iterations=2", "rollout.samples_per_prompt=4")
    return run(config, tmp_path_factory.mktemp("source"), Silent())[0]


@pytest.fixture(scope="module")
def trained(source: Path, tmp_path_factory: pytest.TempPathFactory) -> DPOResult:
    folder = tmp_path_factory.mktemp("dpo")
    return train_dpo(config_of(source, folder), folder, Silent())


def write_config(source: Path, folder: Path) -> Path:
    path = folder / "dpo.yaml"
    path.write_text(TEXT.format(run=json.dumps(str(source))))
    return path


def config_of(source: Path, folder: Path, *overrides: str) -> DPOConfig:
    return load_dpo_config(write_config(source, folder), overrides)


def test_no_layout_changes_the_fingerprint(trained: DPOResult, source: Path, tmp_path: Path) -> None:
    for overrides in LAYOUTS:
        again = train_dpo(config_of(source, tmp_path, *overrides), tmp_path, Silent())
        assert again.run_dir != trained.run_dir and again.fingerprint == trained.fingerprint


@pytest.mark.usefixtures("row_noise")
def test_in_native_numerics_the_layout_shows(source: Path, tmp_path: Path) -> None:
    native = "numerics.mode=native"
    layouts = [(), ("layout.padding=none",), ("layout.update_micro_batch=4",)]
    found = [train_dpo(config_of(source, tmp_path, native, *more), tmp_path, Silent()) for more in layouts]
    assert len({result.fingerprint for result in found}) == 3
    assert all(result.margin_accuracy_before == 0.5 for result in found)


@pytest.mark.parametrize("override", ["seed=3", "dpo.beta=0.2", "dpo.epochs=1", "run_iterations=1"])
def test_whatever_is_no_layout_changes_the_fingerprint(
    trained: DPOResult, source: Path, tmp_path: Path, override: str
) -> None:
    assert train_dpo(config_of(source, tmp_path, override), tmp_path, Silent()).fingerprint != trained.fingerprint


def test_it_learns_the_pairs_and_leaves_the_reference(trained: DPOResult) -> None:
    pairs = records.read_table(Path(trained.run_dir), "dpo_pairs")
    assert trained.loss_first == pytest.approx(np.log(2.0), rel=1e-12) and trained.loss_last < trained.loss_first
    assert float((pairs["margins"][~pairs["held_out"]] > 0).mean()) > 0.7
    assert trained.margin_accuracy_before == 0.5 and trained.ref_kl_per_sequence > 0.0
    assert trained.margin_accuracy_after == float((pairs["margins"][pairs["held_out"]] > 0).mean())


def test_with_a_learning_rate_of_zero_nothing_moves(source: Path, tmp_path: Path) -> None:
    still = train_dpo(config_of(source, tmp_path, "dpo.learning_rate=0"), tmp_path, Silent())
    assert still.ref_kl_per_sequence == 0.0 and still.margin_accuracy_after == 0.5
    assert still.accuracy_before == still.accuracy_after and still.loss_last == still.loss_first
    pairs = records.read_table(Path(still.run_dir), "dpo_pairs")
    assert (pairs["chosen_logprobs"] == pairs["ref_chosen_logprobs"]).all() and (pairs["margins"] == 0.0).all()
    assert still.policy_digest == manifest.load(source).final["initial_policy_digest"]


def test_the_divergence_is_its_definition_on_the_unmodified_models(trained: DPOResult, source: Path) -> None:
    config = small_config()
    prepared = prepare(config, Silent().warm_start, source / "checkpoints" / "reference")
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(folder / "checkpoints" / name)
        for folder, name in ((Path(trained.run_dir), "final"), (source, "reference"))
    )
    prepared.state.policy.load_state_dict(policy.state_dict())
    found = sequence_kl(config, prepared, 2)
    assert found == trained.ref_kl_per_sequence
    total, problems = 0.0, prepared.task.problems.held_out
    requests = [Request(prepared.task.prompt_ids[p.key], sample_seed(2, 0, p.key, 0)) for p in problems]
    for request, done in zip(requests, prepared.engine.generate(requests, sampling_of(config)), strict=True):
        ids = torch.tensor([[*request.prompt_ids, *done.response_ids[:-1]]])
        with torch.no_grad():
            log_p, log_q = (m.double()(input_ids=ids).logits[0].log_softmax(-1) for m in (policy, reference))
        per_position = (log_p.exp() * (log_p - log_q)).sum(-1)
        total += float(per_position[len(request.prompt_ids) - 1 :].sum())
    # logits of deterministic numerics are within 3e-6 of float64
    assert found == pytest.approx(total / len(problems), rel=1e-3)


def test_the_records_hold_what_was_done(trained: DPOResult, source: Path) -> None:
    folder = Path(trained.run_dir)
    pairs, steps = (records.read_table(folder, name) for name in ("dpo_pairs", "dpo_steps"))
    assert len(pairs) == trained.pairs + trained.eval_pairs == len(pairs_from_run(source))
    held = pairs[pairs["held_out"]]
    assert len(held) == trained.eval_pairs and held["prompt_key"].nunique() == 6
    assert not set(held["prompt_key"]) & set(pairs["prompt_key"][~pairs["held_out"]])
    gained = pairs["chosen_logprobs"] - pairs["ref_chosen_logprobs"]
    lost = pairs["rejected_logprobs"] - pairs["ref_rejected_logprobs"]
    assert ((gained - lost) * 0.1 == pairs["margins"]).all()
    assert len(steps) == trained.steps == 2 * -(-trained.pairs // 17) and steps["pairs"].sum() == 2 * trained.pairs
    assert steps["loss"].iloc[-1] == trained.loss_last and steps["digest"].iloc[-1] == trained.policy_digest
    stock = AutoModelForCausalLM.from_pretrained(folder / "checkpoints" / "final")
    assert weights_digest(stock.named_parameters()) == trained.policy_digest
    found = records.load(folder)
    assert found.fingerprint == trained.fingerprint and found.run_fingerprint == manifest.load(source).fingerprint
    assert load_dpo_config(folder / "config.yaml").digest() == found.config_digest


def _tree(text: str) -> dict[str, Any]:
    tree = json.loads(text)
    tree.pop(sealed_json.OWN_DIGEST)
    return tree


def test_every_changed_byte_and_every_other_file_is_named(cli: Cli, trained: DPOResult, tmp_path: Path) -> None:
    folder = shutil.copytree(trained.run_dir, tmp_path / "copy")
    assert cli("verify", folder)[:2] == (0, "\n".join(records.verify(folder).lines()) + "\n")
    names = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    assert {"manifest.json", "config.yaml", "environment.json", "checkpoints/final/model.safetensors"} <= set(
        map(str, names)
    )
    for name in names:
        whole = (folder / name).read_bytes()
        for content in (whole[:-1], whole[:40] + bytes([whole[40] ^ 1]) + whole[41:], b""):
            (folder / name).write_bytes(content)
            code, out, err = cli("verify", folder)
            assert (code, out) == (2, "") and one_line(err), name
        (folder / name).unlink()
        assert cli("verify", folder)[0] == 2, name
        (folder / name).write_bytes(whole)
    (folder / "records" / "other.parquet").write_bytes(b"")
    code, _, err = cli("verify", folder)
    assert code == 2 and "other.parquet: is no file of this DPO training" in one_line(err)


def test_changed_records_are_refused(trained: DPOResult, tmp_path: Path) -> None:
    folder = shutil.copytree(trained.run_dir, tmp_path / "copy")
    manifest_path = folder / "manifest.json"
    text = manifest_path.read_text()
    manifest_path.write_text(text.replace(f'"accuracy_after": {trained.accuracy_after}', '"accuracy_after": 0.875'))
    assert manifest_path.read_text() != text
    with pytest.raises(UserError, match="does not match its own SHA-256"):
        records.load(folder)
    manifest_path.write_text(sealed_json.sealed({**_tree(text), "fingerprint": "0" * 64}))
    with pytest.raises(UserError, match="does not follow from the digests"):
        records.load(folder)
    manifest_path.write_text(sealed_json.sealed({**_tree(text), "format": 1}))
    with pytest.raises(UserError, match="format = 1; this ppo_repro reads 2 alone"):
        records.load(folder)
    manifest_path.write_text(text)
    steps, pairs = (records.table_path(folder, name) for name in ("dpo_steps", "dpo_pairs"))
    steps.write_bytes(pairs.read_bytes())
    with pytest.raises(UserError, match=r"dpo_steps\.parquet"):
        records.read_table(folder, "dpo_steps")
    steps.unlink()
    with pytest.raises(UserError, match=r"dpo_steps\.parquet: is missing"):
        records.read_table(folder, "dpo_steps")
    manifest_path.unlink()
    with pytest.raises(UserError, match="is not the manifest of a DPO training"):
        records.load(folder)


def test_a_reference_that_was_not_kept_is_made_again(trained: DPOResult, source: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(source, tmp_path / "bare")
    shutil.rmtree(bare / "checkpoints")
    again = train_dpo(config_of(bare, tmp_path), tmp_path, Silent())
    assert again.fingerprint == trained.fingerprint
    with pytest.raises(UserError, match="its warm start was in other numerics; choose the numerics of the run"):
        train_dpo(config_of(bare, tmp_path, "numerics.mode=native"), tmp_path, Silent())


def test_another_reference_than_the_recorded_one_is_a_broken_promise(source: Path, tmp_path: Path) -> None:
    changed = shutil.copytree(source, tmp_path / "changed")
    shutil.rmtree(changed / "checkpoints" / "reference")
    shutil.copytree(changed / "checkpoints" / "final", changed / "checkpoints" / "reference")
    with pytest.raises(PromiseBroken, match="the starting policy has digest"):
        train_dpo(config_of(changed, tmp_path), tmp_path, Silent())


def test_the_command(cli: Cli, trained: DPOResult, source: Path, tmp_path: Path) -> None:
    path = write_config(source, tmp_path)
    code, out, _ = cli("dpo", path, "--out", tmp_path, "--json")
    found = json.loads(out)
    assert code == 0 and found["fingerprint"] == trained.fingerprint and found["pairs"] == trained.pairs
    code, out, err = cli("dpo", path, "--out", tmp_path)
    assert (code, out) == (2, "") and "exists already; choose another --out" in one_line(err)
    code, out, _ = cli("dpo", path, "--out", tmp_path, "--set", "layout.padding=left")
    # all but the seconds and the folders
    assert code == 0 and out.splitlines()[:4] == lines(trained)[:4]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run=nowhere", "no such folder"),
        ("dpo.beta=0", "dpo.beta = 0: input should be greater than 0"),
        ("dpo.gamma=1", "dpo.gamma: unknown field"),
        ("num_eval_prompts=1000", "num_eval_prompts = 1000: the pairs have"),
        ("run_iterations=3", "iterations = 3:"),
        ("numerics.max_context=6", "rollout.max_response_tokens = 6 must be smaller than numerics.max_context"),
    ],
)
def test_mistakes_are_one_line(cli: Cli, source: Path, tmp_path: Path, override: str, message: str) -> None:
    code, out, err = cli("dpo", write_config(source, tmp_path), "--out", tmp_path / "out", "--set", override)
    assert (code, out) == (2, "") and message in one_line(err)
    assert not list((tmp_path / "out").rglob("*"))


def test_every_field_has_a_description_of_one_sentence() -> None:
    for path, field in {**leaf_fields(DPOConfig), **leaf_fields(RewardModelTraining)}.values():
        assert re.fullmatch(r"[A-Z0-9`][^\n]*\.", field.description or ""), f"{path}: {field.description}"
        assert not re.search(r"[.!?] +[A-Z]", field.description or ""), f"{path} has more than one sentence"


def test_the_experiment_of_the_checkout_needs_a_run_only() -> None:
    path = ROOT / "experiments" / "dpo.yaml"
    with pytest.raises(UserError, match="run: missing; add it"):
        load_dpo_config(path)
    assert load_dpo_config(path, ["run=somewhere"]).dpo.beta == 1.0


def test_the_training_has_a_page_and_the_times_of_its_copy(trained: DPOResult, tmp_path: Path) -> None:
    from analysis.report import build
    from tests.support.html_page import check

    folder = tmp_path / "copy"
    shutil.copytree(trained.run_dir, folder)
    path, _ = build.write_report([folder], None, None)
    page = path.read_text()
    assert page == build.page_of(folder, None) and path.name == "report.html"
    titles = [n.text for n in check(page).iter("h3")]
    assert titles == ["Loss", "Margin", "Pairs in the right order", "Gradient norm", "Margins after training"]
    assert f"{trained.accuracy_after:.3f}" in page and trained.fingerprint in page
    assert records.verify(folder).fingerprint == trained.fingerprint, "a report is no part of the training"
    with pytest.raises(UserError, match="--responses 3: a DPO training has no token view"):
        build.page_of(folder, 3)
    began, ended = records.span(folder)
    assert 0 < began < ended and ended - began == pytest.approx(trained.seconds, abs=60)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_training_can_be_copied_into_mlflow(
    cli: Cli, trained: DPOResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ppo_repro.tracking.mlflow_copy import answering

    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # the second copy takes the place of the first
        code, out, _ = cli("track", trained.run_dir, "--uri", "sqlite:///m.db", "--json")
        assert code == 0
    with answering(f"sqlite:///{tmp_path}/m.db") as client:
        (found,) = client.search_runs([json.loads(out)["experiment_id"]])
        steps = client.get_metric_history(found.info.run_id, "step/loss")
        names = {artifact.path for artifact in client.list_artifacts(found.info.run_id)}
    assert [m.value for m in steps] == records.read_table(Path(trained.run_dir), "dpo_steps")["loss"].tolist()
    assert found.data.tags["fingerprint"] == trained.fingerprint and "report.html" in names
    began, ended = records.span(Path(trained.run_dir))
    assert (found.info.start_time, found.info.end_time) == (round(began * 1000), round(ended * 1000))
