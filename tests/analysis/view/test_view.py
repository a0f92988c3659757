"""`ppo-repro view`: nothing without the token, texts stay texts, queries as in the files, a run that still works."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
import shutil
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import duckdb
import numpy as np
import pandas as pd
import pytest

from ppo_repro.analysis.report.data.chosen_responses import choose_responses
from ppo_repro.analysis.report.data.page_numbers import read_page_numbers
from ppo_repro.analysis.report.data.run_facts import read_facts
from ppo_repro.analysis.tokenization.recorded_tokenizer import RecordedTokenizer, load_tokenizer
from ppo_repro.analysis.view import database
from ppo_repro.analysis.view import index as index_module
from ppo_repro.analysis.view.database import Judged, Responses, parquet_sql, responses_sql
from ppo_repro.analysis.view.index import judged_by
from ppo_repro.analysis.view.query import NUMBERS, PAGE, parsed, snippet
from ppo_repro.analysis.view.server import Server, rows_as_csv
from ppo_repro.base.errors import UserError
from ppo_repro.base.files import MANIFEST
from ppo_repro.config.tasks import RewardConfig, Verifier
from ppo_repro.records import manifest, reader
from tests.analysis.report.hostile_run import make_hostile_run
from tests.support.cli import Cli
from tests.support.html_page import tree
from tests.support.language import small_run, tiny_run
from tests.support.synthetic_run import cut_back
from tests.support.view import served
from tests.support.waiting import until


def get(server: Server, path: str, asked: Mapping[str, Any] | None = None, **headers: str) -> tuple[int, str, Any]:
    """Status, text and headers; the token is in `asked`."""
    base = f"http://{urlsplit(server.address).netloc}"
    request = urllib.request.Request(f"{base}{path}?{urlencode(asked or {})}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as reply:
            return reply.status, reply.read().decode(), reply.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers


def api(server: Server, name: str, **asked: Any) -> Any:
    code, text, _ = get(server, f"/api/{name}", {"token": server.token, **asked})
    assert code == 200, text
    return json.loads(text)


def whole_runs(server: Server) -> dict[int, str]:
    """The folder, by number, of each run whose iterations are all in the table."""
    runs = api(server, "state")["runs"]
    return {run["number"]: run["folder"] for run in runs if run["read"] == run["iterations"]}


@pytest.fixture(scope="module")
def hostile(native_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(make_hostile_run(native_run, tmp_path_factory.mktemp("it's [1]") / "run *")) as server:
        yield server


PATHS = ["/", "/api/state", "/api/responses", "/api/response", "/api/diff", "/api/csv", "/api/snippet", "/elsewhere"]


@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_answered_without_the_token_or_under_another_host(hostile: Server, path: str) -> None:
    whole = {"token": hostile.token, "run": 0, "iteration": 0, "sequence": 0}
    for wrong in ({}, {"token": ""}, {"token": hostile.token[:-1]}, {"token": "ä"}):
        code, text, headers = get(hostile, path, {**whole, "token": "", **wrong})
        assert code == 403
        assert len(text) < 100
        assert headers["Referrer-Policy"] == "no-referrer"
    assert get(hostile, path, whole, Host="example.org")[0] == 400
    assert hostile.socket.getsockname()[0] == "127.0.0.1"


def test_every_answer_forbids_frames_caches_referrers_and_other_origins(hostile: Server) -> None:
    whole = {"token": hostile.token, "run": 0, "iteration": 0, "sequence": 0}
    answers = [get(hostile, path, whole, Origin="http://example.org") for path in PATHS]
    answers += [get(hostile, "/"), get(hostile, "/", whole, Host="example.org"), get(hostile, "/api/diff", whole)]
    assert {code for code, _, _ in answers} == {200, 400, 403, 404}
    for _, _, headers in answers:
        assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
        assert headers["X-Frame-Options"] == "DENY"
        assert headers["Cache-Control"] == "no-store"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cross-Origin-Resource-Policy"] == headers["Cross-Origin-Opener-Policy"] == "same-origin"
        assert not [name for name in headers if name.lower().startswith("access-control-")]


def test_hostile_texts_stay_text(hostile: Server) -> None:
    code, page, _ = get(hostile, "/", {"token": hostile.token})
    root = tree(page)
    policy = next(n.get("content", "") for n in root.iter("meta") if n.get("http-equiv"))
    assert code == 200
    assert "connect-src 'self'" in policy
    assert "unsafe" not in policy
    assert "innerHTML" not in page
    assert not {"src", "onclick"} & {name for n in root.iter() for name in n.attrib}
    found = api(hostile, "responses", text="<SCRIPT>", sort="sequence", order="asc")["rows"]
    assert found
    assert all("<script>" in row["response"] for row in found)
    headers = get(hostile, "/api/responses", {"token": hostile.token, "text": "<script>"})[2]
    assert (headers["Content-Type"], headers["X-Content-Type-Options"]) == ("application/json", "nosniff")
    row = found[0]
    one = api(hostile, "response", run=0, iteration=row["iteration"], sequence=row["sequence"])
    assert "".join(one["tokens"]["responses"][0]["texts"]) == row["response"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"score_min": "1; drop table responses"}, "score_min = 1; drop table responses: must be a finite number"),
        ({"advantage_max": "nan"}, "advantage_max = nan: must be a finite number"),
        ({"score_min": "-inf"}, "score_min = -inf: must be a finite number"),
        ({"sort": "score desc, (select 1)"}, "sort = score desc, (select 1): must be one of run, iteration"),
        ({"order": "sideways"}, "order = sideways: must be asc or desc"),
        ({"run": "7"}, "run = 7: must be a whole number from 0 to 0"),
        ({"limit": "1000000"}, "limit = 1000000: must be a whole number from 1 to 1000"),
        ({"where": "1=1"}, "where: is no filter; there are"),
    ],
)
def test_a_bad_query_is_one_line(hostile: Server, asked: dict[str, str], said: str) -> None:
    for name in ("responses", "csv", "snippet"):
        code, text, _ = get(hostile, f"/api/{name}", {"token": hostile.token, **asked})
        found = json.loads(text)["error"]
        assert code == 400
        assert found.startswith(said)
        assert "\n" not in found
    code, text, _ = get(hostile, "/api/response", {"token": hostile.token, "run": 0, "iteration": 99, "sequence": 0})
    assert (code, json.loads(text)["error"]) == (400, "run 0: has no response 0 in iteration 99")


QUERIES: list[tuple[dict[str, str], str]] = [
    ({}, "score == score"),
    ({"text": "6", "correct": "no"}, "response.str.contains('6') and not is_correct"),
    (
        {"score_min": "0.5", "finish": "stop", "iteration_max": "1"},
        "score >= 0.5 and finish == 'stop' and iteration <= 1",
    ),
    ({"mismatch_min": "1e-9", "clipped_min": "1", "sort": "mismatch"}, "mismatch >= 1e-9 and clipped >= 1"),
    (
        {"advantage_max": "0", "length_min": "2", "prompt": "1+"},
        "advantage <= 0 and length >= 2 and prompt.str.contains('1+', regex=False)",
    ),
    # three values that are equal: 0.0, False and the run's number
    (
        {"score_min": "0", "length_min": "2", "correct": "no", "run": "0"},
        "score >= 0 and length >= 2 and not is_correct",
    ),
]


def expected(run: Path) -> pd.DataFrame:
    """The responses computed from the records another way."""
    rows, tokens, updates = reader.read_sequences(run), reader.read_tokens(run), reader.read_updates(run)
    delta = tokens["old_logprobs"].astype(np.float64) - tokens["rollout_logprobs"].astype(np.float64)
    key = ["iteration", "sequence"]
    tokens = tokens.assign(mismatch=delta.abs(), advantage=tokens["advantages"].astype(np.float64))
    by_token = tokens.groupby(key).agg(mismatch=("mismatch", "max"), advantage=("advantage", "mean"))
    clipped = updates["clip_flag"].isin(["clip_high", "clip_low", "clip_dual"])
    by_update = updates.assign(clipped=clipped).groupby(key)["clipped"].sum()
    found = rows.set_index(key).join(by_token).join(by_update)
    return found.rename(columns={"scores": "score", "response_length": "length", "finish_reason": "finish"})


def test_queries_find_what_the_files_hold_and_the_snippet_and_the_csv_find_the_same(native_run: Path) -> None:
    whole = expected(native_run)
    with served(native_run) as server:
        for asked, condition in QUERIES:
            wanted = whole.reset_index().query(condition, engine="python").set_index(["iteration", "sequence"])
            found = api(server, "responses", **asked, limit=1000)
            rows = pd.DataFrame(found["rows"])
            assert found["total"] == len(rows) == len(wanted) > 0, asked
            ordered = wanted.loc[list(zip(rows["iteration"], rows["sequence"], strict=True))]
            for name in ("score", "mismatch", "advantage", "clipped", "length"):
                np.testing.assert_allclose(rows[name].astype(float), ordered[name].astype(float), rtol=1e-12)
            assert rows["response"].tolist() == ordered["response"].tolist()
            by = rows[asked.get("sort", "iteration")]
            assert by.is_monotonic_decreasing
            space: dict[str, Any] = {}
            exec(api(server, "snippet", **asked)["snippet"], space)
            pd.testing.assert_frame_equal(space["found"][rows.columns[1:]], rows[rows.columns[1:]], check_dtype=False)
            _, text, headers = get(server, "/api/csv", {"token": server.token, **asked})
            lines = list(csv.DictReader(io.StringIO(text)))
            assert [line["response"].removeprefix("'") for line in lines] == rows["response"].tolist()
            assert headers["Content-Disposition"].startswith("attachment")
        pages = [api(server, "responses", sort="score", limit=5, offset=k)["rows"] for k in (0, 5)]
        both = api(server, "responses", sort="score", limit=10)["rows"]
        assert pages[0] + pages[1] == both
        first = both[0]
        one = api(server, "response", run=0, iteration=first["iteration"], sequence=first["sequence"])
        assert one["row"] == first
        assert first in one["samples"]
        assert first["prompt"] in one["rendered"]
        assert {s["prompt_key"] for s in one["samples"]} == {first["prompt_key"]}
        other = {f"other_{name}": both[-1][name] for name in ("run", "iteration", "sequence")}
        parts = api(server, "diff", run=0, iteration=first["iteration"], sequence=first["sequence"], **other)["parts"]
        assert "".join(text for kind, text in parts if kind != "+") == first["response"]
        assert "".join(text for kind, text in parts if kind != "-") == both[-1]["response"]


def test_the_ranges_of_the_page_are_numbers_of_a_query() -> None:
    script = (Path(database.__file__).parent / "list.js").read_text(encoding="utf-8")
    assert re.findall(r'name: "(\w+)".* isNumber: true', script) == [*NUMBERS]


@pytest.mark.parametrize("broken", [False, True])
def test_a_response_has_the_same_numbers_as_on_the_page_of_its_run(
    native_run: Path, tmp_path: Path, broken: bool
) -> None:
    """With `broken`, the first log-prob of the trainer in each iteration is NaN."""
    facts = read_facts(make_hostile_run(native_run, tmp_path / "run", broken=broken))
    of_page = read_page_numbers(facts).responses
    with served(facts.run_dir) as server:
        of_view = server.index.responses.frame(
            "select iteration, sequence, length as tokens, score, mismatch, clipped from responses "
            "order by iteration, sequence"
        )
        first = api(server, "responses", sort="mismatch")["rows"][0]
    pd.testing.assert_frame_equal(of_view, of_page, check_dtype=False, check_exact=True)
    assert np.isinf(of_view["mismatch"]).sum() == (len(facts.iterations) if broken else 0)
    assert (first["mismatch"] == "inf") == broken
    assert np.isinf(choose_responses(of_page, 1)[0].mismatch) == broken


def test_the_tokenizer_of_a_run_is_loaded_once_until_its_file_changes(
    native_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, loads = Path(shutil.copytree(native_run, tmp_path / "run")), list[Path]()

    def counted(path: Path) -> RecordedTokenizer:
        loads.append(path)
        return load_tokenizer(path)

    monkeypatch.setattr(index_module, "load_tokenizer", counted)
    with served(run) as server:
        prompts = [api(server, "response", run=0, iteration=0, sequence=k)["rendered"] for k in (0, 1)]
        assert all(prompts)
        assert len(loads) == 1
        os.utime(loads[0], ns=(0, 0))
        assert api(server, "response", run=0, iteration=0, sequence=0)["rendered"] == prompts[0]
        assert len(loads) == 2


def test_the_runs_have_one_order_on_the_page_and_in_python(native_run: Path, tmp_path: Path) -> None:
    for name in ("b", "a"):  # by number `b` is before `a`
        shutil.copytree(native_run, tmp_path / name / "run")
    with served(tmp_path / "b", tmp_path / "a") as server:
        Path(shutil.copytree(native_run, tmp_path / "copy")).rename(tmp_path / "a" / "first")
        until(lambda: whole_runs(server).keys() == {0, 1, 2}, "the newest run")
        names = whole_runs(server)
        assert list(names.values()) == ["run", "run", "first"], "the newest run has the last number"
        for sort in ("iteration", "run"):
            rows = api(server, "responses", sort=sort, order="asc", limit=1000)["rows"]
            space: dict[str, Any] = {}
            exec(api(server, "snippet", sort=sort, order="asc")["snippet"], space)
            assert space["found"]["run"].tolist() == [names[row["run"]] for row in rows]


def test_a_response_that_is_neither_right_nor_wrong_is_found_as_neither(native_run: Path, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def score(prompt, response, answer):\n    return 0.25\n")
    term = f"{{kind: function, path: '{tmp_path}/reward.py:score'}}"
    other = tiny_run(tmp_path / "other", f"reward.terms=[{term}]", "ppo.iterations=1")
    judged = Path(shutil.copytree(native_run, tmp_path / "judged"))
    with served(judged, other) as server:
        assert [run["judged"] for run in api(server, "state")["runs"]] == [True, False]
        for found in ({"run": 0}, {}):
            right, wrong = (api(server, "responses", correct=word, limit=1000, **found) for word in ("yes", "no"))
            assert {row["run"] for row in right["rows"] + wrong["rows"]} == {0}
        unjudged = api(server, "responses", run=1)
        assert {row["correct"] for row in unjudged["rows"]} == {unjudged["correct"]} == {None}


def test_a_verifier_judges_responses_to_prompts_without_answers(native_run: Path, tmp_path: Path) -> None:
    recorded = reader.read_sequences(native_run, iterations=[0])
    recorded.assign(answer="").to_parquet(tmp_path / "sequences.parquet")
    tables = {name: parquet_sql([str(manifest.table_path(native_run, name, 0))]) for name in ("tokens", "updates")}
    tables["sequences"] = parquet_sql([str(tmp_path / "sequences.parquet")])

    def correct(judged: Judged) -> list[bool | None]:
        rows = duckdb.sql(f"select correct from ({responses_sql(tables, judged)}) order by sequence").fetchall()
        return [row[0] for row in rows]

    assert correct("all") == recorded["is_correct"].tolist()
    assert set(correct("all")) == {True, False}
    assert set(correct("those with an answer")) == set(correct("none")) == {None}
    assert judged_by(RewardConfig(terms=(Verifier(kind="verifier"),))) == "all"
    assert judged_by(RewardConfig()) == "those with an answer"


def test_a_snippet_survives_any_path_and_text(hostile: Server) -> None:
    for text in ('"""\\', "'; drop", "\u202e", "\n\n"):
        space: dict[str, Any] = {}
        exec(api(hostile, "snippet", text=text, run=0)["snippet"], space)
        assert len(space["found"]) == api(hostile, "responses", text=text, run=0)["total"]


def test_a_query_that_takes_too_long_is_ended(hostile: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "TIMEOUT_SECONDS", 0.2)
    with pytest.raises(database.Slow):
        hostile.index.responses.rows("select sum(a.range * b.range) from range(10000000) a, range(10000000) b")
    assert api(hostile, "responses")["total"] > 0, "the next one is answered"


def test_the_view_ends_at_once_while_it_reads_a_run(native_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []

    def endless(run_dir: Path, iterations: Sequence[int], is_judged: bool) -> str:
        reads.append(iterations)
        numbers = "range(10000000) as a, range(10000000) as b where a.range * b.range < 0"
        return f"select r.* exclude (run) from responses as r, {numbers}"

    index = index_module.Index([native_run])
    index.look()  # rows, so that the statement takes long
    monkeypatch.setattr(database, "run_responses_sql", endless)
    index.runs[0].read = 0
    index.start()
    until(lambda: reads, "the statement")
    ending = threading.Thread(target=index.close, daemon=True)
    ending.start()
    ending.join(10)
    assert not ending.is_alive()
    assert len(reads) == 1, "no iteration is tried again"


def test_the_table_closes_while_a_page_reads_it() -> None:
    responses, ended = Responses(), threading.Event()

    def read() -> None:
        with contextlib.suppress(duckdb.InterruptException), responses.cursor() as cursor:
            cursor.execute("select count(*) from range(1000000000000) t(i) where i % 7 = 3").fetchall()
        ended.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    time.sleep(0.3)
    responses.close()
    assert ended.wait(10)


def test_a_download_that_is_broken_off_leaves_no_cursor(hostile: Server) -> None:
    download = rows_as_csv(hostile.index, "select * from responses", ())
    assert next(download).startswith("run,iteration")
    (cursor,) = hostile.index.responses._cursors
    download.close()
    with pytest.raises(duckdb.ConnectionException):
        cursor.execute("select 1")


def test_a_run_that_works_is_followed_and_partial_files_are_passed_over(native_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "a" / "run"

    def become(iterations: int) -> None:
        """The run after so many iterations, whatever was there."""
        shutil.copytree(native_run, run, dirs_exist_ok=True)
        if iterations < 3:
            cut_back(run, iterations, "running")

    def counts() -> tuple[int, int]:
        return server.index.responses.rows("select count(*) as n from responses")[0]["n"], len(
            server.index.runs[0].damaged
        )

    def file(table: str, iteration: int) -> Path:
        return manifest.table_path(run, table, iteration)

    each = len(reader.read_sequences(native_run, iterations=[0]))
    become(0)
    server = Server([tmp_path, run, run.parent], 0)
    look = server.index.look
    look()
    assert counts() == (0, 0), "no process has its lock"
    assert server.index.runs[0].state == "killed", "no process has its lock"
    become(1)
    for table in ("sequences", "tokens"):  # a process was killed while it wrote the next iteration
        file(table, 1).write_bytes(b"PAR1 half")
    file("updates", 1).with_suffix(".tmp").write_bytes(b"")
    look()
    assert counts() == (each, 0)
    version = server.index.version
    become(2)  # resumed
    look()
    look()
    assert counts() == (2 * each, 0)
    assert server.index.version > version
    become(3)
    file("tokens", 2).write_bytes(b"PAR1 rubbish")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / MANIFEST).write_text("{")
    look()
    assert counts() == (2 * each, 1)
    assert "iteration 2" in server.index.runs[0].damaged[2]
    assert server.index.others == 1
    space: dict[str, Any] = {}
    exec(snippet(parsed({}, 1), server.index.present()), space)
    assert sorted(space["found"]["iteration"].unique()) == [0, 1], "Python reads what the page reads"
    become(1)  # another run has the folder now
    look()
    assert counts() == (each, 0)
    server.index.close()
    server.socket.close()


def test_a_run_of_the_same_configuration_with_other_bits_replaces_the_rows(native_run: Path, tmp_path: Path) -> None:
    run, again = tmp_path / "run", small_run(tmp_path / "again", "numerics.mode=native")  # without its noise
    shutil.copytree(native_run, run)
    followed, fresh = index_module.Index([run]), index_module.Index([again])
    followed.look()
    fresh.look()
    before, wanted = (one.responses.rows("select * from responses order by all") for one in (followed, fresh))
    assert before != wanted
    shutil.rmtree(run)
    again.rename(run)
    followed.look()
    assert followed.responses.rows("select * from responses order by all") == wanted
    for one in (followed, fresh):
        one.close()


def test_a_run_that_is_removed_leaves_the_list_and_its_number_to_no_other_run(native_run: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for name in "ab":
        shutil.copytree(native_run, runs / name)
    with served(runs) as server:
        until(lambda: whole_runs(server) == {0: "a", 1: "b"}, "both runs")
        of_b = api(server, "responses", run=1)["rows"]
        shutil.rmtree(runs / "a")
        until(lambda: whole_runs(server) == {1: "b"}, "the end of a run")
        assert api(server, "responses")["rows"] == of_b
        assert api(server, "responses", run=0)["total"] == 0
        Path(shutil.copytree(native_run, tmp_path / "copy")).rename(runs / "a")
        until(lambda: whole_runs(server) == {1: "b", 2: "a"}, "another run")
        assert api(server, "responses", run=2)["total"] == api(server, "responses", run=1)["total"] > 0
        space: dict[str, Any] = {}
        exec(api(server, "snippet")["snippet"], space)
        assert set(space["found"]["run"]) == {"a", "b"}


def test_an_unforeseen_error_is_on_the_page_and_on_stderr_once_and_the_index_goes_on(
    native_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read = index_module.folders_with

    def fail(target: Path, name: str) -> Iterator[Path]:
        if target == tmp_path:  # servers of other tests go on
            raise PermissionError(13, "Permission denied", str(target))
        return read(target, name)

    said = f"the responses may be old: PermissionError: [Errno 13] Permission denied: '{tmp_path}'"
    monkeypatch.setattr(index_module, "LOOK_SECONDS", 0.05)
    with served(tmp_path) as server:
        assert api(server, "state")["failure"] == ""
        with monkeypatch.context() as broken:
            broken.setattr(index_module, "folders_with", fail)
            until(lambda: api(server, "state")["failure"] == said, "the error")
        shutil.copytree(native_run, tmp_path / "run")
        until(lambda: api(server, "responses")["total"] > 0, "the run")
        assert api(server, "state")["failure"] == ""
    assert capsys.readouterr().err == f"view: {said}\n"


def test_a_file_that_is_gone_is_one_line(native_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(native_run, tmp_path / "run")
    with served(run) as server:
        manifest.table_path(run, "sequences", 0).unlink()
        code, text, _ = get(server, "/api/response", {"token": server.token, "run": 0, "iteration": 0, "sequence": 0})
    assert code == 400
    assert "the file was changed or damaged" in json.loads(text)["error"]


def test_the_command_prints_the_whole_address(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = []

    def serve(server: Server) -> None:
        addresses.append(server.address)
        server.index.close()
        server.socket.close()

    monkeypatch.setattr(Server, "serve", serve)
    out = cli.done("view", tmp_path)
    assert out.split()[1] == addresses[0]
    assert cli.json("view", tmp_path) == {"view": addresses[1]}


def test_mistakes_of_the_command_are_one_line(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no such folder" in cli.refusal("view", tmp_path / "nowhere")
    with served(tmp_path) as server:
        port = server.socket.getsockname()[1]
        assert f"--port {port}: cannot be used" in cli.refusal("view", tmp_path, "--port", str(port))
        nothing = {"total": 0, "score": None, "correct": None, "runs": [], "offset": 0, "limit": PAGE, "rows": []}
        assert api(server, "responses") == nothing
        code, text, _ = get(server, "/api/snippet", {"token": server.token})
        assert (code, json.loads(text)["error"]) == (400, "there is no run now, so there is nothing to find")
    with pytest.raises(UserError, match="--port 99999: cannot be used"):
        Server([tmp_path], 99999)
    monkeypatch.setattr("ppo_repro.base.analyses.find_spec", lambda name: None if name == "duckdb" else 1)
    assert "needs duckdb; install it with pip install 'ppo_repro[view]'" in cli.refusal("view", tmp_path)
