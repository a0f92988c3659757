"""Serve the page on 127.0.0.1 only, for addresses with the token only; answers are JSON and CSV."""

from __future__ import annotations

import csv
import io
import secrets
import socket
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ppo_repro.analysis.csv_text import cell
from ppo_repro.analysis.html.markup import differences
from ppo_repro.analysis.html.page import document
from ppo_repro.analysis.html.token_area import token_area
from ppo_repro.analysis.view.database import RESPONSE_COLUMNS, TIMEOUT_SECONDS, Slow
from ppo_repro.analysis.view.index import Index
from ppo_repro.analysis.view.one_response import open_response
from ppo_repro.analysis.view.query import parsed, response_key, snippet
from ppo_repro.base.errors import UserError
from ppo_repro.base.output import finite, one_line

HERE = Path(__file__).parent
HTML = HERE.parent / "html"
# no page of another origin may frame, embed or open the pages: their address holds the token
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
SAMPLES = 64  # responses to one prompt, side by side
LONGEST_DIFF = 100_000  # characters of both together
SELECTED = ", ".join(RESPONSE_COLUMNS)
Parameters = Mapping[str, str]  # of a request
Answer = dict[str, Any]  # the JSON that the scripts of the page read


class Guard:
    """Middleware that answers 403 to every address without the token, and adds security headers to every answer."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in HEADERS.items())]
            await send(message)

        given = Request(scope).query_params.get("token", "")
        allowed = secrets.compare_digest(given.encode(), self.token.encode())
        refused = PlainTextResponse("403: open the address that `ppo-repro view` printed, with its token\n", 403)
        await (self.app if allowed else refused)(scope, receive, with_headers)


def _state(index: Index, parameters: Parameters) -> Answer:
    runs = [
        {
            "number": run.number, "folder": run.name, "state": run.state, "iterations": run.head.num_iterations,
            "read": run.read, "judged": run.judged != "none", "short": setting.short, "whole": setting.whole,
            **run.label.model_dump(),
        }
        for run, setting in index.settings()
    ]  # fmt: skip
    finishes = [row["finish"] for row in index.responses.rows("select distinct finish from responses order by finish")]
    damaged = [line for run in index.present() for line in run.damaged.values()]
    return {
        "version": index.version, "runs": runs, "finishes": finishes, "damaged": damaged, "others": index.others,
        "failure": index.failure,
    }  # fmt: skip


def _responses(index: Index, parameters: Parameters) -> Answer:
    query = parsed(parameters, len(index.runs))
    matches = index.responses.rows(query.page(), query.values)
    ids = [row["id"] for row in matches if row["id"] is not None]
    rows = index.responses.rows(
        f"select rowid as id, {SELECTED} from responses where rowid in (select unnest(?::bigint[]))", [ids]
    )
    by_id = {row.pop("id"): row for row in rows}
    summary = {name: matches[0][name] for name in ("total", "score", "correct", "runs")}
    page = {"offset": query.offset, "limit": query.limit, "rows": [by_id[i] for i in ids if i in by_id]}
    return {**summary, **page}


def _stored_row(index: Index, parameters: Parameters) -> Answer:
    key = response_key(parameters, len(index.runs))
    rows = index.responses.rows(
        f"select {SELECTED} from responses where run = ? and iteration = ? and sequence = ?", key
    )
    if not rows:
        raise UserError(f"run {key.run}: has no response {key.sequence} in iteration {key.iteration}")
    return rows[0]


def _response(index: Index, parameters: Parameters) -> Answer:
    row = _stored_row(index, parameters)
    where = "run = ? and iteration = ? and prompt_key = ?"
    sql = f"select {SELECTED} from responses where {where} order by sample_index, sequence limit {SAMPLES}"
    samples = index.responses.rows(sql, [row["run"], row["iteration"], row["prompt_key"]])
    prompt, tokens = open_response(index.responses, index.runs[row["run"]], row)
    return {"row": row, "samples": samples, "rendered": prompt, "tokens": tokens}


def _diff(index: Index, parameters: Parameters) -> Answer:
    other = {name: parameters.get(f"other_{name}", "") for name in ("run", "iteration", "sequence")}
    a, b = (_stored_row(index, key)["response"] for key in (parameters, other))
    if len(a) + len(b) > LONGEST_DIFF:
        raise UserError(f"diff: the two have {len(a) + len(b):,} characters; at most {LONGEST_DIFF:,} are compared")
    return {"parts": differences(a, b)}


def _snippet(index: Index, parameters: Parameters) -> Answer:
    return {"snippet": snippet(parsed(parameters, len(index.runs)), index.present())}


Endpoint = Callable[[Index, Parameters], Answer]
API: dict[str, Endpoint] = {
    "state": _state, "responses": _responses, "response": _response, "diff": _diff, "snippet": _snippet,
}  # fmt: skip


def application(index: Index, token: str) -> ASGIApp:
    """Return the application that serves the page and answers its requests; an error is one line of JSON."""
    styles = [HTML / "style.css", HERE / "view.css"]
    scripts = [HTML / "token_view.js", *(HERE / f"{name}.js" for name in ("state", "list", "response", "view"))]
    body = (HERE / "view.html").read_text(encoding="utf-8").replace("<!-- tokens -->", token_area())
    html = document("ppo-repro view", body, styles, scripts, connect="'self'")

    def as_json(answer: Endpoint) -> Callable[[Request], Response]:
        return lambda request: JSONResponse(finite(answer(index, request.query_params)))

    def as_csv(request: Request) -> Response:
        query = parsed(request.query_params, len(index.runs))
        headers = {"Content-Disposition": 'attachment; filename="responses.csv"'}
        return StreamingResponse(rows_as_csv(index, query.everything(), query.values), 200, headers, "text/csv")

    def mistake(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": one_line(error)}, 400)

    def slow(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": f"the query took more than {TIMEOUT_SECONDS:g} s; ask for less"}, 503)

    routes = [Route(f"/api/{name}", as_json(answer)) for name, answer in API.items()]
    answers = Starlette(
        routes=[Route("/", lambda request: Response(html, media_type="text/html")), Route("/api/csv", as_csv), *routes],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])],
        exception_handlers={UserError: mistake, Slow: slow},
    )
    return Guard(answers, token)  # outside, so that it also guards Starlette's answers to errors


def rows_as_csv(index: Index, query: str, values: Sequence[Any]) -> Generator[str, None, None]:
    """Yield all rows of a query as CSV (`csv_text`), in chunks, with the names of the runs."""
    with index.responses.cursor() as cursor:
        cursor.execute(query, list(values))
        rows: list[Sequence[Any]] = [list(RESPONSE_COLUMNS)]
        while rows:
            buffer = io.StringIO()
            csv.writer(buffer).writerows(map(cell, row) for row in rows)
            yield buffer.getvalue()
            rows = [(index.runs[row[0]].name, *row[1:]) for row in cursor.fetchmany(10_000)]


class Server:
    """Server of the page over `targets` on a port of 127.0.0.1 (0: a free port).

    Raises UserError if the port is taken.
    """

    def __init__(self, targets: Sequence[Path], port: int) -> None:
        for target in targets:
            if not target.is_dir():
                raise UserError(f"{target}: no such folder; give the folder of a run, or one with runs in it")
        if port > 65535:
            raise UserError(f"--port {port}: cannot be used (above 65535); leave it out for a free one")
        try:
            self.socket = socket.create_server(("127.0.0.1", port))
        except OSError as error:
            raise UserError(f"--port {port}: cannot be used ({error.strerror}); leave it out for a free one") from error
        self.token = secrets.token_urlsafe(16)
        self.index = Index(targets)
        app = application(self.index, self.token)
        self._uvicorn = uvicorn.Server(
            uvicorn.Config(app, log_level="error", access_log=False, timeout_graceful_shutdown=1)
        )

    @property
    def address(self) -> str:
        """Return the address of the page, with the token."""
        return f"http://127.0.0.1:{self.socket.getsockname()[1]}/?token={self.token}"

    def serve(self) -> None:
        """Answer requests until a signal or `stop`."""
        self.index.start()
        try:
            self._uvicorn.run(sockets=[self.socket])
        finally:
            self.index.close()
            self.socket.close()

    def stop(self) -> None:
        """End `serve` from another thread."""
        self._uvicorn.should_exit = True
