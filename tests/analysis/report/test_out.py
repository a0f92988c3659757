"""Where the report goes: over nothing, or over an earlier report; `--out` never costs another file."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.cli import Cli, one_line


def of_today(page: bytes) -> bytes:
    """The page as it was before pages named who wrote them."""
    generator = b'<meta name="generator" content="ppo-repro report" />'
    assert page.count(generator) == 1 and page.index(generator) < 100
    return page.replace(generator, b"")


@pytest.mark.parametrize("name", ["manifest.json", "config.yaml", "checkpoints/final/model.safetensors", "user.html"])
def test_out_never_costs_a_file(cli: Cli, native_run: Path, tmp_path: Path, name: str) -> None:
    copy = Path(shutil.copytree(native_run, tmp_path / "run"))
    (tmp_path / "user.html").write_text('<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8" /><title>')
    path = tmp_path / name if name == "user.html" else copy / name
    before = path.read_bytes()
    for runs in ([copy], [copy, copy], [tmp_path]):
        code, out, err = cli("report", *runs, "--out", path)
        said = f"--out {path}: is not an earlier report; must be a new file or an earlier report; choose another --out"
        assert (code, out) == (2, "") and said in one_line(err) and path.read_bytes() == before
    assert cli("verify", copy)[0] == 0


@pytest.mark.slow
def test_an_earlier_report_is_replaced(cli: Cli, native_run: Path, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    assert cli("report", native_run, "--out", path)[0] == 0
    page = path.read_bytes()
    for earlier in (page, of_today(page)):
        path.write_bytes(earlier)
        assert cli("report", native_run, "--out", path)[0] == 0 and path.read_bytes() == page


def test_what_has_the_name_of_the_page_by_chance_is_kept(cli: Cli, native_run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(native_run, tmp_path / "run"))
    (copy / "report.html").write_text("my own words")
    code, _, err = cli("report", copy)
    assert code == 2 and "report.html: is not an earlier report" in one_line(err)
    assert (copy / "report.html").read_text() == "my own words"
