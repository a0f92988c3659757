"""The report as a file: its text, that it is complete, safe and reproducible; the command."""

from __future__ import annotations

import base64
import hashlib
import math
import re
import shutil
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from ppo_repro.analysis.html.page import Card, page
from ppo_repro.analysis.report import build
from ppo_repro.analysis.report.data.folder_runs import Final
from ppo_repro.analysis.report.data.grid_differences import Limits, axis_effects, setting_differences
from ppo_repro.analysis.report.data.page_numbers import read_mismatch, read_page_numbers
from ppo_repro.analysis.report.data.run_facts import Facts, read_facts
from ppo_repro.analysis.report.run_page import run_page
from ppo_repro.analysis.report.sections.grid_answer import answer_statements, differences_card, effects_card
from ppo_repro.analysis.report.sections.responses import samples_section
from ppo_repro.analysis.report.sections.verdicts import learning, troubles
from ppo_repro.analysis.report.two_runs_page import two_runs_page
from ppo_repro.base.errors import UserError
from ppo_repro.config.files import load_config
from ppo_repro.records import reader
from ppo_repro.records.label import Label, write_label
from ppo_repro.records.notes import read_accuracy
from ppo_repro.runs.results import Change, LanguageResults, ppo_results
from ppo_repro.runs.summary import summarise
from ppo_repro.statistics.draws import NONE
from tests.analysis.report.hostile_run import make_hostile_run, pieces_of
from tests.support.cli import Cli
from tests.support.control import run as record_control
from tests.support.control import small_control
from tests.support.html_page import check, embedded, tree
from tests.support.language import fork
from tests.support.language import run as record
from tests.support.paths import TINY
from tests.support.synthetic_run import cut_back, rewrite_cell, start_run


@pytest.fixture(scope="session")
def hostile_run(native_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose texts attack the page."""
    return make_hostile_run(native_run, tmp_path_factory.mktemp("hostile") / "run")


@cache
def seen(run_dir: Path) -> str:
    """The page of a run that no test changes, with a few responses."""
    return run_page(run_dir, 20)


def results_of(run_dir: Path) -> LanguageResults:
    """The results of a language run, without its draws."""
    results = ppo_results(run_dir, reader.open_manifest(run_dir), reader.read_iterations(run_dir), NONE)
    assert isinstance(results, LanguageResults)
    return results


@cache
def seen_beside(a: Path, b: Path) -> str:
    """The page of two runs that no test changes."""
    return two_runs_page(a, b)


def text_of(page: str) -> str:
    return " ".join("".join(check(page).itertext()).split())


def legend_of(page: ET.Element) -> list[str]:
    """The names in the legend of the first chart."""
    legend = next(n for n in page.iter("g") if n.get("class") == "legend")
    return ["".join(n.itertext()) for n in legend.iter("text")]


def final(run_dir: Path, name: str) -> float:
    return float(reader.open_manifest(run_dir).final[name])


def test_the_first_screen_answers_four_questions(deterministic_run: Path, native_run: Path, tmp_path: Path) -> None:
    exact, native = seen(deterministic_run), seen(native_run)
    questions = ["Did it learn?", "Is it on-policy?", "What went wrong?", "How to repeat it"]
    assert [n.text for n in check(exact).iter("h2")][:4] == questions
    said, control = text_of(exact), text_of(native)
    tokens = int(reader.read_iterations(deterministic_run)["tokens"].sum())
    first = int(reader.read_iterations(deterministic_run)["first_minibatch_tokens"].sum())
    assert f"✓holds: 0 of {tokens:,} training log-probs differ from the sampler's." in said
    assert f"✓holds: {first:,} of {first:,} first-minibatch ratios (anchor rollout) are exactly 1." in said
    assert "Nothing: the run is complete" in said
    rows = reader.read_iterations(native_run)
    unequal, total = int(rows["unequal_old_rollout_logprobs"].sum()), int(rows["tokens"].sum())
    assert f"≠differs: {unequal:,} of {total:,} training log-probs differ from the sampler's." in control
    recorded = reader.open_manifest(deterministic_run)
    measured = read_accuracy(deterministic_run, recorded)
    assert measured is not None
    assert f"Log-probs of {measured.tokens:,} tokens are {measured.deterministic_rms:.2g} nats (rms) from" in said
    assert "stock float32" in said
    assert "model in float64" not in control, "native numerics measure nothing"
    assert recorded.fingerprint in said
    assert f"ppo-repro rerun RUN, where RUN is the folder {deterministic_run.name}" in said
    run = Path(shutil.copytree(deterministic_run, tmp_path / deterministic_run.name))
    cut_back(run, 2, "interrupted")
    cut = run_page(run, 5)
    assert "The run was interrupted after 2 of 3 iterations" in text_of(cut)
    assert "Nothing:" not in text_of(cut)
    assert "after the last update" in said
    assert "after the last update" not in text_of(cut)
    assert {r["iteration"] for r in embedded(cut)["responses"]} <= {0, 1}


def test_a_page_says_how_many_prompts_were_held_out_and_how_many_responses_were_cut(deterministic_run: Path) -> None:
    facts, results = read_facts(deterministic_run), results_of(deterministic_run)
    counts = read_page_numbers(facts).counts
    (said, *_) = learning(facts, results)
    assert said.text.endswith(f"(greedy, {results.config.task.num_eval_prompts} prompts).")
    for cut, begins in ((0.75, "75% of the responses were cut at rollout.max_response_tokens"), (0.5, "Nothing: ")):
        many = replace(results, figures=replace(results.figures, cut_fraction=cut))
        (verdict,) = troubles(facts, many, counts)
        assert verdict.text.startswith(begins)


def test_the_numbers_repeat_no_score_as_accuracy_and_no_setting_that_never_changes(
    deterministic_run: Path, native_run: Path
) -> None:
    for text in (seen(deterministic_run), seen_beside(deterministic_run, native_run)):
        cells = {"".join(n.itertext()) for n in check(text).iter("td")}
        assert {"Score", "Score, held out"} <= cells
        assert not {"Accuracy, sampled", "Accuracy, held out", "Learning rate"} & cells


def test_the_same_run_gives_the_same_bytes_wherever_it_lies(native_run: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(native_run, tmp_path / native_run.name))
    first = seen(native_run)
    assert first == run_page(moved, 20)
    assert str(native_run.parent) not in first
    assert str(tmp_path) not in first
    titles = [n.text for n in check(first).iter("h3")]
    wanted = {"Score", "KL to the reference", "Entropy", "Clip fraction", "Extreme ratios"}
    wanted |= {"Log-prob difference", "Ratios within an iteration", "Clip flags by iteration"}
    wanted |= {"Distribution of the score", "Loss of the policy"}
    rewards = reader.read_iterations(native_run)["reward_mean"]
    said = f"mean reward, the score minus the KL penalty, {rewards.iloc[0]:.3f} -> {rewards.iloc[-1]:.3f}."
    assert said in text_of(first)
    assert wanted <= set(titles)
    assert len(titles) == len(set(titles))


def test_the_policy_names_this_very_style_and_script_and_nothing_else(native_run: Path) -> None:
    page = seen(native_run)
    (policy,) = (
        n.get("content", "") for n in check(page).iter("meta") if n.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    assert "http" not in policy
    for kind, pattern in (("style", r"<style>(.*?)</style>"), ("script", r"<script>(.*?)</script>")):
        (inside,) = re.findall(pattern, page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert not re.findall(r"(?:https?:)?//[a-z]", page), "not one address of anything elsewhere in the whole file"


def test_hostile_texts_stay_texts(hostile_run: Path) -> None:
    page = seen(hostile_run)
    root = check(page)
    assert [n.tag for n in root.iter() if n.tag in ("img", "b")] == []
    assert len(list(root.iter("script"))) == 2, "one of data, one of code"
    lengths = reader.read_sequences(hostile_run).set_index(["iteration", "sequence"])
    for shown in embedded(page)["responses"]:
        row = lengths.loc[(shown["iteration"], shown["sequence"])]
        assert shown["texts"] == pieces_of(shown["sequence"], row["response_length"], row["finish_reason"] == "stop")
    assert not set("\x00\x01\x1b\x7f\x85\u2028\u2029\u202e\u2066\ufeff") & set(page)


def test_what_is_not_finite_is_counted_and_shown_as_it_is(native_run: Path, hostile_run: Path, tmp_path: Path) -> None:
    page = run_page(make_hostile_run(native_run, tmp_path / "run", broken=True), 200)
    assert "Not finite: 3 ratios, 3 log-prob differences. No figure includes them." in text_of(page)
    shown = [r for r in embedded(page)["responses"] if r["sequence"] == 0]
    ratios = [r["columns"][f"ratio_{epoch}"] for r in embedded(page)["responses"] for epoch in (0, 1)]
    assert sum(column.count("inf") for column in ratios) == 3
    assert [r["columns"]["delta"][0] for r in shown] == ["nan"] * 3
    assert "Not finite" not in text_of(seen(hostile_run))


def test_differences_of_which_none_can_be_drawn_are_a_sentence(native_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(native_run, tmp_path / native_run.name))
    tokens = reader.read_tokens(run)
    unequal = tokens["old_logprobs"] != tokens["rollout_logprobs"]
    for iteration, rows in tokens.groupby("iteration"):
        broken = rows["old_logprobs"].where(~unequal, np.nan).to_numpy(np.float32)
        rewrite_cell(run, "tokens", int(str(iteration)), "old_logprobs", lambda _, broken=broken: broken)
    said, control = text_of(run_page(run, 0)), text_of(seen(native_run))
    finite = f"All {int((~unequal).sum()):,} finite differences are exactly 0, so there is no distribution"
    assert [finite in text for text in (said, control)] == [True, False]
    assert f"{int(unequal.sum()):,} log-prob differences. No figure includes them." in said


def test_a_page_without_a_finite_difference_says_so(native_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(native_run, tmp_path / native_run.name))
    for iteration in range(3):
        rewrite_cell(run, "tokens", iteration, "rollout_logprobs", lambda values: np.full(len(values), np.nan))
    said, control = text_of(run_page(run, 0)), text_of(seen(native_run))
    for sentence in (
        "Cause of the difference: no token has two finite log-probs; find out where the others come from.",
        "No difference is finite, so there is no distribution of them to draw.",
    ):
        assert [sentence in text for text in (said, control)] == [True, False]


def test_a_page_without_a_finite_ratio_says_so(native_run: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(native_run, tmp_path / native_run.name))
    for iteration in range(3):
        rewrite_cell(run, "updates", iteration, "ratios", lambda values: np.full(len(values), np.inf, np.float32))
    said, control = text_of(run_page(run, 0)), text_of(seen(native_run))
    finite = "No ratio is finite, so there is no figure of them."
    assert [finite in text for text in (said, control)] == [True, False]
    assert "took no step" not in said


def test_a_difference_that_is_not_finite_is_the_largest_on_the_page_and_in_the_summary(
    native_run: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(native_run, tmp_path / native_run.name))
    rewrite_cell(run, "iterations", 1, "max_abs_old_rollout", lambda _: np.array([np.nan]))
    assert math.isnan(summarise(run).figures["max_abs_old_rollout"])
    assert "largest |old - rollout|, nats–" in text_of(run_page(run, 0)), "a dash is NaN"


@pytest.mark.parametrize("part", [read_mismatch, samples_section])
def test_a_part_is_of_the_iterations_that_the_page_counts(
    native_run: Path, tmp_path: Path, part: Callable[[Facts], object]
) -> None:
    run = Path(shutil.copytree(native_run, tmp_path / native_run.name))
    cut_back(run, 2, "running")
    facts = read_facts(run)
    before = part(facts)
    shutil.copytree(native_run, run, dirs_exist_ok=True)  # the run goes on
    assert repr(part(facts)) == repr(before)
    assert repr(part(read_facts(run))) != repr(before), "the control"


def test_the_command_writes_the_page_and_says_where(native_run: Path, tmp_path: Path, cli: Cli) -> None:
    run = Path(shutil.copytree(native_run, tmp_path / native_run.name))
    out = cli.done("report", run)
    assert str(run / "report.html") in out
    page = tmp_path / "page.html"
    assert cli.json("report", run, "--out", page) == {"report": str(page), "bytes": page.stat().st_size}
    assert page.read_bytes() == (run / "report.html").read_bytes()
    assert not list(tmp_path.rglob("*.tmp")), "a report is no record"
    assert cli("diff", run, native_run)[0] == 0, "a report is no record"


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    start_run(tmp_path / "empty" / "run")
    (tmp_path / "bare").mkdir()
    for target, said in (
        (tmp_path / "nowhere", "no such folder"),
        (tmp_path / "bare", "has no run"),
        (tmp_path / "empty" / "run", "no complete iteration to report; go on with"),
    ):
        with pytest.raises(UserError, match=said):
            build.write_report([target])


def grid_of(folder: Path, native_run: Path, deterministic_run: Path) -> Path:
    """A grid with two settings of two cells each; seeds differ in the table alone."""
    rows = []
    for mode, run in (("deterministic", deterministic_run), ("native", native_run)):
        for name in ("a", "b"):
            path = Path("cells") / f"{mode},{name}" / "small" / run.name
            shutil.copytree(run, folder / path)
            rows.append({"cell": f"{mode},{name}", "axis.numerics.mode": mode, "run_dir": str(path)})
    pd.DataFrame(rows).to_parquet(folder / "cells.parquet")
    (folder / "grid.yaml").write_text('question: "Does `mode` matter?"\nexpectation: It does not.\naxes: {mode: {}}\n')
    return folder


def test_a_grid_has_its_question_its_settings_and_links(
    deterministic_run: Path, native_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = grid_of(tmp_path / "grid", native_run, deterministic_run)
    path, size = build.write_report([folder])
    page = path.read_text()
    assert path == folder / "report.html"
    assert size == len(page.encode())
    assert "token-data" not in page
    said = text_of(page)
    assert "Does mode matter?" in said
    assert "Settings are named by mode." in said
    assert "Expected: It does not." in said
    assert "grid: 4 runs" in said
    assert "agree on every bit in 2 of 4 runs" in said
    assert "of log-probs differ in the other 2 (" in said
    assert "mean (smallest to largest seed)" in said
    assert "Not complete" not in said
    links = [n.get("href") or "" for n in check(page).iter("a")]
    assert f"cells/native,a/small/{native_run.name}" in links
    assert all((folder / link).is_dir() for link in links if link.startswith("cells/"))
    start_run(folder / "cells" / "c" / "run")
    (folder / "cells" / "c" / "run" / "records").mkdir(exist_ok=True)
    cells = pd.read_parquet(folder / "cells.parquet").assign(state="complete")
    failed = pd.DataFrame([{**cells.iloc[0], "cell": "f", "state": "failed", "run_dir": ""}])
    pd.concat([cells, failed]).to_parquet(folder / "cells.parquet")
    elsewhere = build.write_report([folder], tmp_path / "x.html")[0].read_text()
    assert 'href="cells' not in elsewhere
    said = text_of(elsewhere)
    assert "cells/native,a" in said
    assert "Not complete and not in this page: cells/c/run (running), f (failed)." in said
    assert "grid: 4 runs" in said


SENTENCE = "settings differ from deterministic in held-out accuracy (paired t-tests over 3 seeds"


def answered(finals: Sequence[Final], possible: float, recorded: float = math.inf) -> str:
    """What a grid's page says about its differences."""
    found = setting_differences(finals, Limits(possible, recorded))
    assert found is not None
    card = Card("What is the answer?", answer_statements(finals, found, "held-out accuracy"))
    return text_of(page("A grid", [card, differences_card(found)], ()))


def test_a_grid_says_which_difference_it_could_have_seen() -> None:
    results = {"deterministic": [0.5, 0.6, 0.4], "native": [0.52, 0.58, 0.41]}
    finals = [Final(point, seed, value) for point, values in results.items() for seed, value in enumerate(values)]
    said = answered(finals, 1.0)
    assert f"0 of 1 {SENTENCE}" in said
    (could,) = re.findall(r"A difference of ([\d.]+) or more would have been found with probability 0.8\.", said)
    draws = np.random.default_rng(0).normal(float(could), np.std([0.02, -0.02, 0.01], ddof=1), (100_000, 3))
    assert (stats.ttest_1samp(draws, 0.0, axis=1).pvalue < 0.05).mean() == pytest.approx(0.8, abs=0.02)
    assert "`" not in said
    two = [*finals[:2], *finals[3:4], finals[4]._replace(value=0.85)]
    few, anything = (answered(two, possible) for possible in (1.0, 9.0))
    nothing = r"2 seeds can show nothing here: with probability 0\.8 they find a difference of [\d.]+ or more, and two "
    assert re.search(nothing + r"values differ by 1 at most\.", few)
    assert "-1 to 1" in few, "no accuracies differ by more"
    assert "A difference of " not in few
    assert "A difference of " in anything, "the control"
    scored = answered(two, math.inf, 1.2)
    assert "values differ by 1.2 at most." in scored, "of an own reward, whose range is seen, not known"


def test_a_grid_of_two_axes_has_the_main_effect_of_each(tmp_path: Path) -> None:
    rows = [
        {"cell": f"{lr}-{kl}-{seed}", "axis.lr": lr, "axis.kl": kl, "seed": seed}
        for lr in ("low", "high") for kl in ("off", "on") for seed in range(3)
    ]  # fmt: skip
    pd.DataFrame(rows).to_parquet(tmp_path / "cells.parquet")
    finals = [
        Final(f"{lr}, {kl}", seed, 0.1 * (lr == "high") - 0.2 * (kl == "on") + 0.01 * seed**2)
        for lr in ("low", "high") for kl in ("off", "on") for seed in range(3)
    ]  # fmt: skip
    effects = axis_effects(tmp_path, finals)
    said = text_of(page("", [effects_card(effects, "held-out accuracy")], ()))
    assert "Main effects of the axes" in said
    assert "lrhigh minus low+0.100" in said
    assert "klon minus off-0.200" in said
    assert not axis_effects(tmp_path, [final for final in finals if final.point != "high, on"]), "not balanced"
    assert not axis_effects(tmp_path, [final._replace(point="named") for final in finals]), "a name of its own"
    pd.DataFrame(rows).drop(columns="axis.kl").to_parquet(tmp_path / "cells.parquet")
    assert not axis_effects(tmp_path, finals), "one axis"


def test_a_folder_of_runs_has_short_labels_and_no_run_twice(
    deterministic_run: Path, native_run: Path, parted_run: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "runs"
    for name, run in (
        ("a/one", deterministic_run),
        ("b/x/one", deterministic_run),
        ("c", native_run),
        ("d", parted_run),
    ):
        shutil.copytree(run, folder / name)
    write_label(folder / "d", Label(name="large steps"))
    written = build.write_report([folder], tmp_path / "page.html")[0].read_text()
    root, said = check(written), text_of(written)
    assert "runs: 3 runs" in said
    assert "b/x/one has the fingerprint of a/one: they count as one run." in said
    legend = next(n for n in root.iter("g") if n.get("class") == "legend")
    names = legend_of(root)
    assert "large steps" in names
    assert "one run of each setting" in said
    heads = ["".join(n.itertext()) for n in next(root.iter("table")).iter("th")]
    assert heads == ["setting", "held-out accuracy"], "no spread and no seeds where each setting has one run"
    axis = next(n for n in root.iter("text") if n.get("class") == "label" and n.get("x") == "0")
    assert axis.text == "held-out accuracy", "the chart shows what the table has"
    assert "name" not in {"".join(n.itertext()) for n in root.iter("th")}, "the setting has the name"
    assert len(names) == 3
    assert all(name.count(", ") < 3 for name in names)
    hover = [n.text or "" for n in legend.iter("title")]
    assert len(hover) == 3
    assert all("numerics.mode=" in text and "learning_rate=" in text for text in hover)
    first = next(n for n in root.iter("div") if n.get("class") == "answer")
    assert [n.tag for n in first][:2] == ["h2", "svg"], "the chart comes first"
    assert not {"p-value", "Holm", "Student", "interval"} & set(re.findall(r"[A-Za-z-]+", said.partition("Terms")[0]))


def test_a_control_run_has_a_page(tmp_path: Path) -> None:
    run_dir = record_control(small_control("ppo.iterations=2"), tmp_path)[0]
    page = run_page(run_dir)
    assert page == run_page(run_dir)
    titles = [n.text for n in check(page).iter("h3")]
    assert {"Return of training episodes", "Loss of the value model", "Learning rate", "Extreme ratios"} <= set(titles)
    steps = int(reader.read_iterations(run_dir)["tokens"].sum())
    assert f"0 of {steps:,} training log-probs differ from the sampler's." in text_of(page)


def test_two_runs_side_by_side(deterministic_run: Path, native_run: Path, tmp_path: Path) -> None:
    page, page_of_one = (
        build.write_report([run, native_run], tmp_path / "both.html")[0].read_text()
        for run in (deterministic_run, native_run)
    )
    said, same = text_of(page), text_of(page_of_one)
    assert "numerics.modedeterministicnative" in said
    assert re.search(r"A and B first differ: .* in A, .* in B; ", said)
    first, last = (reader.read_iterations(native_run)["eval_score"].iloc[0], final(native_run, "eval_score"))
    assert f"B {Change(first, last)} (score, held out)." in said
    assert legend_of(check(page)) == ["A: mode=deterministic", "B: mode=native"]
    assert legend_of(check(page_of_one)) == ["A", "B"]
    facts = ["".join(n.itertext()) for table in check(page).iter("table") for n in next(table.iter("tbody")).iter("tr")]
    assert any(row.startswith("fingerprint") for row in facts)
    assert not any(row.startswith("run again") for row in facts), "its command is for one run"
    marks = {(n.tag, n.get("class")) for n in check(page).iter() if n.tag in ("del", "ins", "mark")}
    assert marks <= {("mark", "only-a"), ("mark", "only-b")}, "an orange deletion in a run whose lines are blue"
    for name, run in (("A", deterministic_run), ("B", native_run)):
        rows = reader.read_iterations(run)[["unequal_old_rollout_logprobs", "tokens"]].sum()
        assert f"{name}: {rows.iloc[0]:,} of {rows.iloc[1]:,} training log-probs differ from the sampler's." in said
    assert "(A at the end and B at the end)" in said
    assert page == seen_beside(deterministic_run, native_run)
    assert str(deterministic_run.parent) not in page
    assert "A and B have the same fingerprint" in same
    assert "first differ:" not in same


@pytest.fixture(scope="module")
def origin_and_fork(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run, and its fork with another reward, in one folder."""
    out, files = tmp_path_factory.mktemp("forks"), tmp_path_factory.mktemp("reward")
    config = load_config(TINY, ["model.warm_start_steps=3", "ppo.iterations=2", "checkpoints.every=1"])
    origin, _ = record(config, out)
    (files / "reward.py").write_text("def score(prompt, response, answer):\n    return 0.25  # mended\n")
    term = f"{{kind: function, path: '{files}/reward.py:score'}}"
    return origin, fork(origin, out, 1, f"reward.terms=[{term}]", "ppo.iterations=3", "ppo.learning_rate=1e-4")


def test_a_fork_beside_its_origin_has_facts_that_the_origin_lacks(
    origin_and_fork: tuple[Path, Path], tmp_path: Path, cli: Cli
) -> None:
    origin, forked = origin_and_fork
    for runs in ((origin, forked), (forked, origin)):
        cli.done("report", *runs, "--out", tmp_path / "page.html")
        rows = [["".join(n.itertext()) for n in row] for row in tree((tmp_path / "page.html").read_text()).iter("tr")]
        (changed,) = (row[1:] for row in rows if row[0] == "changed")
        assert changed[runs.index(origin)] == ""
        assert "ppo.learning_rate" in changed[runs.index(forked)]
        (began,) = (row[1:] for row in rows if row[0] == "began")
        assert all(began), "facts of both runs stand beside each other"


def test_the_page_of_a_fork_marks_where_it_began_and_shows_the_reward(
    origin_and_fork: tuple[Path, Path], tmp_path: Path
) -> None:
    origin, forked = origin_and_fork
    pages = [run_page(folder, 0) for folder in (forked, origin)]
    of_folder = tree(build.write_report([origin.parents[1]], tmp_path / "page.html")[0].read_text())
    score = next(n for n in of_folder.iter("figure") if next(n.iter("h3")).text == "Score")
    rows = [["".join(cell.itertext()) for cell in row.iter("td")] for row in score.iter("tr")]
    first = {row[-1]: row[0] for row in reversed(rows) if row}
    assert sorted(first.values()) == ["0", "1"], "the fork's line begins where it left its origin"
    assert "The line of a fork begins at the iteration at which it left its origin." in "".join(of_folder.itertext())
    for text in (
        "forked here",
        f"A fork of {origin.name}",
        "return 0.25  # mended",
        "Code: inputs/reward.py",
        "inputs/reward.py: none -&gt; ",
    ):
        assert [text in page for page in pages] == [True, False], text
