"""A fork without changed fields equals its origin, and does not need the origin's folder."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from ppo_repro.base.errors import UserError
from ppo_repro.base.watcher import Silent
from ppo_repro.records import manifest, reader
from ppo_repro.records.changes import setup_changes
from ppo_repro.records.diff import first_difference
from ppo_repro.records.folder import load_recorded_config
from ppo_repro.runs.fork_plan import plan_fork
from ppo_repro.runs.language import LanguageKind
from ppo_repro.runs.results import score_of
from ppo_repro.runs.resume import Resumed
from ppo_repro.runs.resume import resume as language_resume
from ppo_repro.runs.verify_files import verify_files
from tests.support.cli import Cli
from tests.support.disk import recorded
from tests.support.language import fork, rerun, resume, tiny_run
from tests.support.recipes import OTHER_LAYOUT
from tests.support.resume import Snapshots, require_as_uninterrupted
from tests.support.runs import manifests_read, recomputed
from tests.support.synthetic_run import cut_back

USUAL = ("model.warm_start_steps=5", "ppo.iterations=4", "checkpoints.every=2", "checkpoints.keep=1")


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four iterations; of its checkpoints after 2 and 4 the second is the state that it ended with."""
    return tiny_run(tmp_path_factory.mktemp("origin"), *USUAL, "checkpoints.keep=2")


def test_a_fork_that_changes_nothing_is_its_origin(origin: Path, tmp_path: Path) -> None:
    forked = fork(origin, tmp_path, None)
    found = manifest.load(forked).origin
    assert found is not None
    assert found.iteration == 2, "the newest checkpoint that leaves something to compute"
    require_as_uninterrupted(forked, origin)
    assert first_difference(origin, forked) is None
    assert forked.name != origin.name


def test_a_fork_is_on_the_disk_before_it_has_its_name_and_its_models_before_they_are_listed(
    origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a power cut leaves of it: right after it got its name, and around its end."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    (tmp_path / "disk").mkdir()
    with recorded(tmp_path / "disk") as disk:
        name = fork(origin, tmp_path / "disk", 2).relative_to(tmp_path / "disk")
    named = [state for state in disk.states if str(name) in state.content]
    assert len(named) > 40
    for number, state in enumerate([*named[:10], *named[-10:]]):
        verify_files(state.write(tmp_path / str(number)) / name)


class Mapped(Silent):
    """Lists the checkpoints whose pages this process maps after an iteration."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.calls = 0

    def iteration(self, done: int, total: int, figures: str, seconds: float) -> None:
        self.calls += 1
        self.found += re.findall(r"\S+/(?:iteration-\d+|checkpoint)\.safetensors", Path("/proc/self/maps").read_text())


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system lists no mapped files")
def test_a_checkpoint_is_not_in_memory_while_a_run_goes_on(origin: Path, tmp_path: Path) -> None:
    watcher = Mapped()
    forked = fork(origin, tmp_path, 2, "checkpoints.every=0", watcher=watcher)
    cut_back(forked, 3, "interrupted")
    language_resume(LanguageKind(watcher), forked)
    assert watcher.calls > 0
    assert watcher.found == []


def test_a_finished_run_goes_on_as_if_it_had_been_longer(origin: Path, tmp_path: Path) -> None:
    longer = tiny_run(tmp_path / "longer", *USUAL, "ppo.iterations=6")
    require_as_uninterrupted(fork(origin, tmp_path, None, "ppo.iterations=6"), longer)


def test_a_finished_run_of_adapters_goes_on_as_if_it_had_been_longer(origin: Path, tmp_path: Path) -> None:
    """Its checkpoints have factors and head only, and its end merged weights."""
    model = f"model={{kind: folder, path: '{origin}/checkpoints/final'}}"
    lora = "lora={rank: 2, alpha: 2}", "value={learning_rate: 1e-3, lora: {rank: 2, alpha: 2}}"
    changes = [model, *lora, "checkpoints.every=2"]
    source = tiny_run(tmp_path / "source", *changes, "ppo.iterations=3")
    longer = tiny_run(tmp_path / "longer", *changes, "ppo.iterations=4")
    for at in (2, 3):
        forked = fork(source, tmp_path / str(at), at, "ppo.iterations=4")
        assert first_difference(longer, forked) is None
        assert rerun(forked, OTHER_LAYOUT).difference is None


@pytest.mark.parametrize(
    ("change", "column"),
    [
        ("kl.kl_coef=0.5", "kl_penalty_sum"),
        pytest.param("ppo.learning_rate=1e-2", "new_logprobs", marks=pytest.mark.slow),
        ("rollout.temperature=0.5", "response"),
    ],
)
def test_a_change_is_in_force_from_the_first_iteration_of_a_fork_on(
    origin: Path, tmp_path: Path, change: str, column: str
) -> None:
    """The control of the tests before: what was changed shows at once, and only then."""
    forked = fork(origin, tmp_path, 2, change)
    difference = first_difference(origin, forked)
    assert difference is not None
    assert (difference.iteration, difference.column) == (2, column)
    assert recomputed(forked).difference is None
    field = change.partition("=")[0]
    found = manifest.load(forked).origin
    assert found is not None
    assert (found.iteration, list(found.changed)) == (2, [field])
    assert list(setup_changes(origin, forked)) == [field, "origin"]


def test_an_objective_that_is_new_in_a_fork_begins_with_its_own_coefficient(origin: Path, tmp_path: Path) -> None:
    forked = fork(origin, tmp_path, 2, "ppo.objective={kind: kl_penalty, penalty_coef: 2}")
    assert reader.read_iterations(forked)["penalty_coef"].tolist()[2:] == [2.0, 2.0]


def test_a_fork_resumes_and_reruns_without_its_origin(origin: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(origin, tmp_path / "source"))
    (tmp_path / "reward.py").write_text("def score(prompt, response, answer):\n    return len(response) / 8\n")
    terms = f"reward.terms=[{{kind: function, path: '{tmp_path}/reward.py:score'}}]"
    folder, changes = tmp_path / "forks", (terms, "ppo.iterations=5", "checkpoints.every=0")
    forked = plan_fork(source, 2, changes, folder, None).folder
    assert fork(source, folder, 2, *changes, watcher=Snapshots(forked, tmp_path / "parts")) == forked
    shutil.rmtree(source)
    (tmp_path / "reward.py").unlink()
    assert verify_files(forked).iterations == 5
    found = rerun(forked, OTHER_LAYOUT)
    assert (found.difference, found.iterations) == (None, 3)
    assert found.fingerprint == manifest.load(forked).fingerprint
    partial = tmp_path / "parts" / "4"
    assert resume(partial, OTHER_LAYOUT) == Resumed(2, 4)
    require_as_uninterrupted(partial, forked)
    assert rerun(partial).difference is None


@pytest.mark.slow
def test_a_fork_can_be_forked(origin: Path, tmp_path: Path) -> None:
    first = fork(origin, tmp_path, 2, "kl.kl_coef=0.5", "ppo.iterations=6")
    second = fork(first, tmp_path, 4, "ppo.epochs=1")
    assert manifest.load(second).iterations[:4] == manifest.load(first).iterations[:4]
    assert manifest.load(second).iterations[4] != manifest.load(first).iterations[4]
    assert rerun(second).difference is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--set", "model.hidden_size=32"), "--set model.hidden_size: "),
        (("--set", "seed=8"), "--set seed: "),
        (("--set", "lora={rank: 2, alpha: 2}"), "--set lora.rank: "),
        (("--set", "value.normalize_returns=true"), "--set value.normalize_returns: "),
        (("--set", "mismatch.flip=token"), "--set mismatch.flip: "),
        (("--set", "value={kind: head}"), "--set value.kind: "),
        (("--set", "numerics.mode=native"), "--set numerics.mode: "),
        (("--set", "mismatch.sampler.lag=1"), "--set mismatch.sampler.lag: "),
        (("--at", "3"), "--at 3: .* 2, 4"),
        (("--at", "4"), "ppo.iterations = 4: .*after 4 iterations"),
        (("--set", "reward.terms.1.weight=2"), "'1' must be .* 0 to 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_cannot_be_forked_is_one_line(
    cli: Cli, origin: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    assert re.search(message, cli.refusal("fork", origin, *arguments, "--out", tmp_path))
    assert not list(tmp_path.iterdir())


TASK = """
def prompts():
    sums = [(a, b) for a in range({0}) for b in range({0})]
    return [{{"prompt": f"{{a}}+{{b}}=", "answer": str(a + b), "key": f"{{a}}+{{b}}"}} for a, b in sums]
"""


def other_task(folder: Path, origin: Path, text: str) -> str:
    """The prompts of the origin from a Python file, whose answers are compared."""
    (folder / "task.py").write_text(text.format(load_recorded_config(origin).task.max_operand + 1))  # type: ignore[union-attr]
    held_out = load_recorded_config(origin).task.num_eval_prompts
    return f"task={{kind: python, path: '{folder}/task.py', num_eval_prompts: {held_out}}}"


def test_what_a_fork_must_keep_is_compared_by_value(origin: Path, tmp_path: Path) -> None:
    """The same prompts from elsewhere are no change; the control has another answer to one of them."""
    same = other_task(tmp_path, origin, TASK)
    exact = "reward={terms: [{kind: exact_match}]}"
    forked = fork(origin, tmp_path / "forks", 2, same, exact)
    assert first_difference(origin, forked) is None
    assert rerun(forked).difference is None
    for change in (("str(a + b)", "str(a + b + 1)"), ("a in range({0})", "a in range(1, {0})")):
        text = TASK.replace(*change)
        with pytest.raises(UserError, match=r"^held-out prompts: are not what the run had at iteration 2"):
            fork(origin, tmp_path / "forks", 2, other_task(tmp_path, origin, text), exact)
    with pytest.raises(UserError, match=r"^held-out prompts: are not what the run had"):
        fork(origin, tmp_path / "forks", 2, "task.num_eval_prompts=3")


def test_a_fork_that_has_evaluated_nothing_yet_has_the_score_of_its_origin(
    origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The origin was not evaluated at iteration 3, where the fork would have been. The manifest is read once."""
    forked = fork(origin, tmp_path, 4, "evaluation.every=3", "ppo.iterations=6")
    cut_back(forked, 5, "interrupted")
    head, read = manifest.load_head(forked), manifests_read(monkeypatch)
    score = score_of(forked, head)
    assert read == [forked]
    assert score == reader.read_iterations(origin)["eval_score"][0]


def test_a_fork_without_the_tokenizer_of_its_origin_is_refused(origin: Path, tmp_path: Path) -> None:
    """Its reference is gone, and other prompts make another tokenizer."""
    source = tiny_run(tmp_path / "source", *USUAL, "ppo.iterations=1", "checkpoints.every=0")
    with pytest.raises(UserError, match=r"tokens of the tokenizer: are not what the run had at iteration 1"):
        fork(source, tmp_path / "forks", None, "ppo.iterations=2", "task.max_operand=30")


def test_a_model_that_lies_elsewhere_is_the_same_model(origin: Path, tmp_path: Path) -> None:
    """Its tokenizer has several chat templates, which lie in a folder of their own."""
    model = shutil.copytree(origin / "checkpoints" / "final", tmp_path / "model")
    (model / "SHA256SUMS").unlink()
    (model / "additional_chat_templates").mkdir()
    for name in ("chat_template", "additional_chat_templates/tool_use"):
        (model / f"{name}.jinja").write_text("{{ messages }}")
    changes = [*USUAL, "checkpoints.keep=2", f"model={{kind: folder, path: '{model}'}}"]
    source = tiny_run(tmp_path / "source", *[c for c in changes if "warm_start" not in c])
    moved = shutil.copytree(model, tmp_path / "moved")
    forked = fork(source, tmp_path / "forks", 2, f"model.path={moved}")
    found = manifest.load(forked).origin
    assert found is not None
    assert found.changed == {}
    assert first_difference(source, forked) is None
    (moved / "generation_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"--set model\.path|model\.path/"):
        fork(source, tmp_path / "forks", 2, f"model.path={moved}")
