"""Every link of every Markdown file leads to a file or heading that exists."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.support.paths import ROOT

LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.*?)#* *$", re.MULTILINE)
NAMED_TEST = re.compile(r"`(?:tests/)?([\w/]+\.py)::(\w+)`")
OUTSIDE = ("http://", "https://", "mailto:")


def pages() -> list[Path]:
    """Every Markdown file git knows or would add."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    try:
        names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
    except (OSError, subprocess.CalledProcessError):  # an archive without git
        names = [str(path.relative_to(ROOT)) for path in ROOT.glob("*/**/*.md")] + ["README.md"]
    return sorted({ROOT / name for name in names if name and (ROOT / name).exists()})


def without_code(text: str) -> str:
    """The text without fenced blocks and code spans, where brackets are no links."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def anchors(text: str) -> set[str]:
    """The anchors GitHub gives the headings: lower case, no punctuation, hyphens for spaces, a number for repeats."""
    found: set[str] = set()
    fenced = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for heading in HEADING.findall(fenced):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        anchor = re.sub(r"[^\w\- ]", "", words.lower()).strip().replace(" ", "-")
        name, repeat = anchor, 0
        while name in found:
            repeat += 1
            name = f"{anchor}-{repeat}"
        found.add(name)
    return found


def broken(page: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    missing = []
    for link in LINK.findall(without_code(page.read_text(encoding="utf-8"))):
        if link.startswith(OUTSIDE):
            continue
        name, _, anchor = unquote(link).partition("#")
        target = (page.parent / name).resolve() if name else page
        exists = target.is_relative_to(ROOT) and target.exists()
        if not exists or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            missing.append(link)
    return missing


def test_every_link_leads_somewhere() -> None:
    assert {str(page.relative_to(ROOT)): links for page in pages() if (links := broken(page))} == {}


def test_every_test_that_is_named_exists() -> None:
    named = {pair for page in pages() for pair in NAMED_TEST.findall(page.read_text(encoding="utf-8"))}
    files = {name: ROOT / "tests" / name for name, _ in named}
    texts = {name: path.read_text(encoding="utf-8") if path.exists() else "" for name, path in files.items()}
    assert named
    assert [pair for pair in named if f"def {pair[1]}(" not in texts[pair[0]]] == []


def test_a_broken_link_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    (tmp_path / "there.md").write_text("# A `b`, c\n# Twice\n# Twice\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](there.md) [b](there.md#a-b-c) [c](there.md#twice-1) [d](https://example.org) `[e](no.md)`\n"
        "[f](gone.md) ![g](gone.svg) [h](there.md#no) [i](#no) [j](../outside.md)\n"
        "# Own\n[k](#own) [l [m]](gone2.md)\n"
    )
    assert broken(page) == ["gone.md", "gone.svg", "there.md#no", "#no", "../outside.md", "gone2.md"]


@pytest.mark.parametrize("name", ["runs", "records", "grids", "tracking", "numerics"])
def test_the_page_of_a_folder_says_what_each_of_its_files_does(name: str) -> None:
    folder = ROOT / "ppo_repro" / name
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert [p.name for p in folder.glob("*.py") if p.name != "__init__.py" and f"]({p.name})" not in text] == []
