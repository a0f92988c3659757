"""JSON Lines: every mistake in a file is one line that names FILE:LINE, wherever in the file it is."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppo_repro.base.errors import UserError
from ppo_repro.base.json_lines import read_lines, text_field


def written(folder: Path, content: bytes) -> Path:
    path = folder / "a.jsonl"
    path.write_bytes(content)
    return path


def fields(path: Path, constants: bool = False) -> list[dict[str, Any]]:
    return [line.fields for line in read_lines("file", path, constants)]


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.lists(st.dictionaries(st.text(), PLAIN, max_size=3), min_size=1, max_size=3),
    st.booleans(),
    st.sampled_from(["\n", "\r\n", "\n\n"]),
)
def test_whatever_json_writes_comes_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], escaped: bool, end: str
) -> None:
    text = end.join(json.dumps(row, ensure_ascii=escaped) for row in rows)
    try:
        content = text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which only an escape can write
        return
    for mark in (b"", b"\xef\xbb\xbf"):
        assert fields(written(tmp_path_factory.mktemp("lines"), mark + content)) == rows


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not valid JSON in UTF-8"),
        (b"{} {}", "not valid JSON in UTF-8"),
        (b'{"a": "\x00"}', "not valid JSON in UTF-8"),
        (b'{"a": "\xff"}', "not valid JSON in UTF-8"),
        (b'\xef\xbb\xbf{"a": 1}', "not valid JSON in UTF-8"),
        (b"null", "must be an object, is NoneType; write one object per line"),
        (b'["a"]', "must be an object, is list"),
        (b'{"a": [1, -Infinity]}', "-Infinity is no JSON"),
        (b'{"a": 1, "a": 2}', "field 'a' appears twice"),
        (b'{"a":' + b"[" * 100_000, "not valid JSON in UTF-8"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not valid JSON in UTF-8"),
    ],
)
def test_a_mistake_names_its_line(tmp_path: Path, line: bytes, message: str) -> None:
    path = written(tmp_path, b'{"a": 0}\n\n' + line + b'\n{"a": 1}\n')
    with pytest.raises(UserError) as caught:
        fields(path)
    assert str(caught.value).startswith(f"{path}:3: {message}")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b'{"a": 1}', mtime=0), "is compressed; unpack it"),
        ('{"a": 1}'.encode("utf-16"), "is UTF-16; save it as UTF-8"),
        (b'[{"a": 1}]', "is a JSON array; write one object per line"),
        (b'\n [\n {"a": 1}\n]\n', "is a JSON array; write one object per line"),
    ],
)
def test_another_format_is_named_with_what_to_do(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(UserError, match=f"^file = .*a.jsonl: {message}$"):
        fields(written(tmp_path, content))


@pytest.mark.parametrize("content", [None, b"", b" \r\n\n", b"\xef\xbb\xbf"])
def test_an_empty_or_absent_file_is_refused(tmp_path: Path, content: bytes | None) -> None:
    with pytest.raises(UserError, match=r"file = .*: (is empty; give one JSON object per line|cannot be read)"):
        fields(tmp_path if content is None else written(tmp_path, content))


@pytest.mark.parametrize("character", ["\0", "\ud800", "\udbff", "\udc00", "\udfff"])
def test_what_no_part_of_a_run_could_carry_is_refused(character: str) -> None:
    with pytest.raises(UserError, match=r"f:1: field 'a' has .* \(\\u[0-9a-f]{4}\) at character 3; remove it"):
        text_field("f:1", "a", f"ab{character}c")
