"""A strict look at a page: it is well-formed, links hold, ids are unique."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import Any

# contents that the parser must skip because they are not markup
RAW = re.compile(r"(<(script|style)[^>]*>)(.*?)(</\2>)", re.DOTALL)
REFERENCES = ("for", "aria-labelledby", "aria-describedby", "aria-controls")


def tree(page: str) -> ET.Element:
    """The page as a tree; raises ParseError unless every tag is closed in its place and every attribute quoted."""
    doctype, _, rest = page.partition("\n")
    assert doctype == "<!DOCTYPE html>"
    return ET.fromstring(RAW.sub(r"\1\4", rest))


def tags(root: ET.Element) -> list[str]:
    """Every tag in document order."""
    return [node.tag for node in root.iter()]


def embedded(page: str) -> Any:
    """The data of the token view."""
    import json

    found = re.findall(r'<script type="application/json" id="token-data">(.*?)</script>', page, re.DOTALL)
    assert len(found) == 1
    return json.loads(found[0])


def check(page: str) -> ET.Element:
    """The tree of a page that keeps the rules; AssertionError names the one that is broken.

    Links lead to places in the page, save a table as CSV, or lead to a run of the grid whose folder has the page.
    """
    root = tree(page)
    ids = [node.get("id") for node in root.iter() if node.get("id")]
    assert len(ids) == len(set(ids)), "an id is given twice"
    for node in root.iter():
        for name in REFERENCES:
            assert set((node.get(name) or "").split()) <= set(ids), f"{name}={node.get(name)} leads nowhere"
        link = node.get("href") or "#" + ids[0]
        saved = node.get("download") and link.startswith("data:text/csv;charset=utf-8,")
        inside = link[1:] in ids if link.startswith("#") else link == "data:," or saved or link.startswith("cells/")
        assert inside, f"a link leaves the page: {link[:80]}"
        assert not {"src", "style", "srcset"} & set(node.attrib), f"{node.tag} loads or styles by attribute"
        assert not any(name.startswith("on") for name in node.attrib), f"{node.tag} has a handler in its markup"
    pictures = [node for node in root.iter("svg")]
    assert all(node.get("role") == "img" and node.get("aria-label") for node in pictures)
    figures = list(root.iter("figure"))
    assert all(len(list(figure.iter("table"))) == 1 for figure in figures), "a figure has no table of its numbers"
    # charts have titles too, which are said under the pointer
    assert [len(root.findall(path)) for path in ("head/title", ".//h1", ".//main")] == [1, 1, 1]
    return root
