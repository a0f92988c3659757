"""Pages from the docstrings of the public names: `python .ci/docs.py FOLDER`. Needs the extra [docs], no network."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path

import pdoc
from markupsafe import Markup

ROOT = Path(__file__).resolve().parents[1]
NAME = "ppo_repro"
LIBRARY = (NAME, f"{NAME}.testing")  # `__all__` says what of them is public
ANALYSES = ("analysis", "!analysis.notebooks")  # with every module below, and without the notebooks


# the modules of a type in a signature, as pdoc marks them up; those of analysis are links
MODULES = re.compile(
    r'(?:<span class="n">(?!analysis)[a-z_]\w*</span><span class="o">\.</span>)+(?=<span class="n">[A-Z])'
)


def shorten_types() -> None:
    """Let signatures say Path, not pathlib.Path."""
    filters = pdoc.render.env.filters
    whole = filters["format_signature"]
    filters["format_signature"] = lambda signature, colon: Markup(MODULES.sub("", str(whole(signature, colon))))


def main() -> None:
    """Write one page for each module, and an index, into a folder."""
    (folder,) = sys.argv[1:]
    sys.path.insert(0, str(ROOT))
    for name in LIBRARY:
        module = import_module(name)
        for public in module.__all__:  # loaded at their first use, and pages list what is loaded
            setattr(module, public, getattr(module, public))
    shorten_types()
    pdoc.render.configure(
        docformat="google", show_source=False, footer_text=f"ppo_repro {import_module(NAME).__version__}"
    )
    pdoc.pdoc(*LIBRARY, *ANALYSES, output_directory=Path(folder))


if __name__ == "__main__":
    main()
