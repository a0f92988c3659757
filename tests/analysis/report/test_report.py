"""The report as a file: its text, that it is complete, safe and reproducible; the command."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from analysis.report import build
from analysis.report.drawing.page import embedded_json
from analysis.report.pages.grid import cell_labels
from ppo_repro.commands.cli import main
from ppo_repro.errors import UserError
from ppo_repro.records import accuracy, reader
from tests.support.cases.hostile_run import HOSTILE, LONG, make_hostile_run
from tests.support.html_page import check, embedded
from tests.support.synthetic_run import cut_back, start_run


@pytest.fixture(scope="session")
def hostile_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose texts attack the page."""
    return make_hostile_run(tmp_path_factory.mktemp("hostile") / "run")


def text_of(page: str) -> str:
    return " ".join("".join(check(page).itertext()).split())


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["ppo-repro", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


def test_an_exact_run_holds_and_the_control_differs(deterministic_run: Path, native_run: Path) -> None:
    deterministic, native = (text_of(build.page_of(run, 10)) for run in (deterministic_run, native_run))
    tokens = int(reader.read_iterations(deterministic_run)["tokens"].sum())
    assert f"Sampler and trainer agree on every bit of {tokens:,} tokens." in deterministic
    assert (
        "Every ratio of the first minibatches is exactly 1" in deterministic and "differ between" not in deterministic
    )
    rows = reader.read_iterations(native_run)
    unequal, total = int(rows["unequal_old_rollout_logprobs"].sum()), int(rows["tokens"].sum())
    assert f"({unequal:,} of {total:,} tokens" in native and "agree on every bit of" not in native.split("Values")[0]
    assert reader.open_manifest(deterministic_run).fingerprint in deterministic
    measured = accuracy.read(deterministic_run, reader.open_manifest(deterministic_run))
    assert (
        measured is not None
        and f"({measured.tokens:,} tokens, rms)" in deterministic
        and "stock float32" in deterministic
    )
    assert "model in float64" not in native, "native numerics measure nothing"


def test_the_same_run_gives_the_same_bytes_wherever_it_lies(native_run: Path, tmp_path: Path) -> None:
    moved = tmp_path / native_run.name
    shutil.copytree(native_run, moved)
    first, again, elsewhere = (build.page_of(run, 20) for run in (native_run, native_run, moved))
    assert first == again == elsewhere
    assert str(native_run.parent) not in first and str(tmp_path) not in first


def test_the_policy_names_this_very_style_and_script_and_nothing_else(native_run: Path) -> None:
    page = build.page_of(native_run, 5)
    policy = next(
        n.get("content") for n in check(page).iter("meta") if n.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None and policy.startswith("default-src 'none'; ")
    for kind, pattern in (("style", r"<style>(.*?)</style>"), ("script", r"<script>(.*?)</script>")):
        (inside,) = re.findall(pattern, page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy and "http" not in policy
    # not one address of anything elsewhere in the whole file
    assert not re.findall(r"(?:https?:)?//[a-z]", page)


def test_every_figure_of_the_learning_run_is_there(native_run: Path) -> None:
    titles = [n.text for n in check(build.page_of(native_run, 5)).iter("h3")]
    wanted = ["Score", "KL to the reference", "Entropy", "Clip fraction", "Probability, sampler and trainer"]
    wanted += ["Log-prob difference", "Log-ratios over the steps", "Clip flags by iteration", "Ratio and advantage"]
    wanted += ["Extreme ratios", "KL in five units", "Where the entropy lies", "Distribution of the score"]
    wanted += ["Score over the iterations", "Loss of the policy", "Loss of the value model", "Learning rate"]
    assert set(wanted) <= set(titles) and len(titles) == len(set(titles))


def test_hostile_texts_stay_texts(hostile_run: Path) -> None:
    page = build.page_of(hostile_run, 20)
    root = check(page)
    assert [n.tag for n in root.iter() if n.tag in ("img", "b")] == []
    assert len(list(root.iter("script"))) == 2, "one of data, one of code"
    data = embedded(page)
    texts = {tuple(r["texts"]) for r in data["responses"]}
    assert {(*pieces, "") for pieces in HOSTILE} <= texts and max(map(len, texts)) == LONG
    assert not set("\x00\x01\x1b\x7f\x85\u2028\u2029\u202e\u2066\ufeff") & set(page)


@pytest.mark.parametrize("text", ["</script>", "<!--<script>", "]]>", "\u2028\u2029", "\ud800", "&lt;"])
def test_embedded_json_cannot_leave_its_element(text: str) -> None:
    found = embedded_json({"t": [text]})
    assert json.loads(found) == {"t": [text]} and not set("<>&\u2028\u2029") & set(found) and found.isascii()


def test_what_is_not_finite_is_counted_and_shown_as_it_is(hostile_run: Path, tmp_path: Path) -> None:
    page = build.page_of(make_hostile_run(tmp_path / "run", broken=True), 20)
    assert "Not finite: 2 ratios, 2 log-prob differences. No figure includes them." in text_of(page)
    shown = [r for r in embedded(page)["responses"] if r["sequence"] == 0]
    assert [r["columns"]["ratio_0"][0] for r in shown] == ["inf", "inf"]
    assert [r["columns"]["delta"][0] for r in shown] == ["nan", "nan"]
    assert "Not finite" not in text_of(build.page_of(hostile_run, 3))
    with pytest.raises(ValueError, match="JSON"):
        embedded_json({"t": float("nan")})


@pytest.mark.parametrize(("asked", "shown"), [(0, None), (7, 7), pytest.param(1000, 15, marks=pytest.mark.slow)])
def test_as_many_responses_as_asked_for(hostile_run: Path, asked: int, shown: int | None) -> None:
    page = build.page_of(hostile_run, asked)
    check(page)
    if shown is None:
        assert "token-data" not in page and page.count("<script") == 1, "the charts have one"
    else:
        assert len(embedded(page)["responses"]) == shown and f"{shown} of 15 responses" in page


def test_the_command_writes_the_page_and_says_where(
    native_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / native_run.name
    shutil.copytree(native_run, run)
    assert command(monkeypatch, "report", run) == 0
    assert (run / "report.html").read_text() == build.page_of(run, build.DEFAULT_RESPONSES)
    assert str(run / "report.html") in capsys.readouterr().out
    out = tmp_path / "page.html"
    assert command(monkeypatch, "report", run, "--out", out, "--responses", "3", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {"report": str(out), "bytes": out.stat().st_size}
    assert not list(tmp_path.rglob("*.tmp"))
    assert command(monkeypatch, "diff", run, native_run) == 0, "a report is no part of the records"


def test_mistakes_are_one_line(tmp_path: Path, hostile_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no such folder"):
        build.write_report([tmp_path / "nowhere"], None, None)
    with pytest.raises(UserError, match="has no run"):
        build.write_report([tmp_path], None, None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no complete iteration to report; go on with"):
        start_run(tmp_path / "empty" / "run")
        build.write_report([tmp_path / "empty" / "run"], None, None)
    with pytest.raises(UserError, match="--responses 5: a page about two runs has no token view"):
        build.write_report([hostile_run, hostile_run], None, 5)
    with pytest.raises(UserError, match="--responses 5: a grid has no token view"):
        build.write_report([hostile_run.parent], tmp_path / "x.html", 5)
    with pytest.raises(UserError, match="cannot be written"):
        build.write_report([hostile_run], tmp_path / "gone" / "x.html", 1)


def test_without_the_analyses_the_command_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name == "analysis" or name.startswith("analysis.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "analysis", None)
    assert command(monkeypatch, "report", tmp_path) == 2
    assert "`analysis` is not beside this package; install the wheel, or a checkout" in capsys.readouterr().err


def test_a_grid_has_one_line_per_cell(deterministic_run: Path, native_run: Path, tmp_path: Path) -> None:
    for run, name in ((deterministic_run, "a"), (native_run, "b")):
        shutil.copytree(run, tmp_path / "grid" / "cells" / name / "small" / run.name)
    path, size = build.write_report([tmp_path / "grid"], None, None)
    page = path.read_text()
    assert path == tmp_path / "grid" / "report.html" and size == len(page.encode())
    said = text_of(page)
    assert "numerics.mode=deterministic" in said and "numerics.mode=native" in said and "grid: 2 runs" in said
    assert "± one standard error over them" in said and "token-data" not in page
    assert "agree on every bit in 1 of 2 runs" in said and "of log-probs differ in the other 1 (" in said
    assert "Not complete" not in said
    check(page)
    start_run(tmp_path / "grid" / "cells" / "c" / "run")
    (tmp_path / "grid" / "cells" / "c" / "run" / "records").mkdir(exist_ok=True)
    said = text_of(build.write_report([tmp_path / "grid"], None, None)[0].read_text())
    assert "Not complete and not in this page: cells/c/run (running)." in said and "grid: 2 runs" in said


def test_cells_are_what_differs_but_for_the_seed() -> None:
    base = {"seed": 0, "ppo": {"lr": 1.0, "kind": "clip"}}
    other = {"seed": 1, "ppo": {"lr": 2.0, "kind": "clip"}}
    assert cell_labels([base, {**base, "seed": 5}]) == ["all runs", "all runs"]
    assert cell_labels([base, other, {**other, "seed": 2}]) == ["ppo.lr=1.0", "ppo.lr=2.0", "ppo.lr=2.0"]
    assert cell_labels([base, {"seed": 0, "ppo": {"lr": 1.0}}]) == ["ppo.kind=clip", "ppo.kind=null"]


def test_an_interrupted_run_has_a_page_of_what_it_has(deterministic_run: Path, tmp_path: Path) -> None:
    run = tmp_path / deterministic_run.name
    shutil.copytree(deterministic_run, run)
    cut_back(run, 2, "interrupted")
    page = build.page_of(run, 5)
    said = text_of(page)
    assert "The run was interrupted after 2 of 3 iterations" in said and "after the last update (greedy)" not in said
    tokens = int(reader.read_iterations(run, allow_incomplete=True)["tokens"].sum())
    assert f"Sampler and trainer agree on every bit of {tokens:,} tokens." in said
    assert {r["iteration"] for r in embedded(page)["responses"]} <= {0, 1}
    assert "The run was interrupted" not in text_of(build.page_of(deterministic_run, 5)), "the whole run is the control"


def test_a_control_run_has_a_page(tmp_path: Path) -> None:
    from ppo_repro.watcher import Silent
    from tests.support.control import run, small_control

    run_dir = run(small_control("ppo.iterations=2"), tmp_path, Silent())[0]
    page = build.page_of(run_dir, None)
    assert page == build.page_of(run_dir, None)
    titles = [n.text for n in check(page).iter("h3")]
    assert {"Return of training episodes", "Loss of the critic", "Learning rate", "Ratio and advantage"} <= set(titles)
    steps = int(reader.read_iterations(run_dir)["tokens"].sum())
    assert f"agree on every bit of {steps:,} environment steps." in text_of(page)
    with pytest.raises(UserError, match="--responses 3: a control run has no token view"):
        build.page_of(run_dir, 3)


def test_two_runs_side_by_side(deterministic_run: Path, native_run: Path, tmp_path: Path) -> None:
    path, _ = build.write_report([deterministic_run, native_run], tmp_path / "both.html", None)
    said = text_of(path.read_text())
    assert "numerics.modedeterministicnative" in said and "A and B first differ in" in said
    assert "A: sampler and trainer agree on every bit" in said and "B: " in said and "of log-probs differ" in said
    again, _ = build.write_report([deterministic_run, native_run], tmp_path / "again.html", None)
    assert again.read_bytes() == path.read_bytes() and str(deterministic_run.parent) not in path.read_text()
    same = text_of(
        build.write_report([deterministic_run, deterministic_run], tmp_path / "same.html", None)[0].read_text()
    )
    assert "A and B have the same fingerprint" in same and "first differ" not in same


def test_the_last_evaluation_is_among_the_samples(deterministic_run: Path) -> None:
    cards = [
        n for n in check(build.page_of(deterministic_run, 1)).iter("div") if "card" in (n.get("class") or "").split()
    ]
    found = reader.read_evaluations(deterministic_run)
    last = found[found["iteration"] == found["iteration"].max()].set_index("prompt")["response"]
    shown = 0
    for card in cards:
        prompt = "".join(next(card.iter("bdi")).itertext())
        for row in card.iter("tr"):
            cells = ["".join(cell.itertext()) for cell in row]
            if cells[0] == "at the end":
                assert cells[1] == escape_free(last[prompt])
                shown += 1
    assert shown == 6


def escape_free(text: str) -> str:
    """A response of the small run as the page shows it: it has no character that gets another name."""
    assert text.isprintable()
    return text


def test_no_link_and_no_command_depends_on_where_the_page_lies(native_run: Path) -> None:
    root = check(build.page_of(native_run, 3))
    links = [n.get("href") or "" for n in root.iter("a")]
    assert all(link.startswith(("#", "data:text/csv;")) for link in links) and len(links) > 20
    assert f"ppo-repro rerun RUN, where RUN is the folder {native_run.name}" in " ".join(root.itertext())
