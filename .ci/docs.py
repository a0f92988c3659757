"""Pages of the public names and of all configuration fields: `python .ci/docs.py FOLDER`. Needs the extra [docs]."""

from __future__ import annotations

import inspect
import pkgutil
import re
import sys
import typing
from importlib import import_module
from pathlib import Path

import pdoc
from jinja2 import pass_context
from jinja2.runtime import Context
from markupsafe import Markup, escape

ROOT = Path(__file__).resolve().parents[1]
NAME = "ppo_repro"
LIBRARY = (NAME, f"{NAME}.testing")  # `__all__` says what of them is public
ANALYSES = ("ppo_repro.analysis", "ppo_repro.statistics")  # with every module below


# an array of one dtype, as numpy writes it, and the modules of a type; types of analyses are links
ARRAY = re.compile(r"numpy\.ndarray\[tuple\[(?:typing\.)?Any, \.\.\.\], numpy\.dtype\[numpy\.(\w+)\]\]")
MODULES = re.compile(r"(?<![\w.])(?!ppo_repro\.(?:analysis|statistics)\b)(?:[a-z_]\w*\.)+(?=[A-Z])")
CALLABLE = re.compile(r"Callable\[(?!\.\.\.)([^\[\],]+), ")  # Python 3.11 loses the brackets of a single argument
STANDARD = re.compile(r"\b(?:typing|collections\.abc)\.(?=[A-Z])")  # before types in the value of an alias
LINKED = re.compile(r"(?<=>)ppo_repro\.(?:analysis|statistics)\.[\w.]*?(?=[A-Z]\w*</a>)")
LONGEST_DEFAULT = 60  # characters of a default value in a signature


class Long:
    """Stands for a default value that is too long to read."""

    def __repr__(self) -> str:
        return "..."


def shorten_types() -> None:
    """Let pages say Path and NDArray[float64], not pathlib.Path and what numpy makes of it; `...` for long defaults."""
    filters = pdoc.render.env.filters
    whole, value = inspect.formatannotation, pdoc.doc.Variable.default_value_str.func
    signature_html, links = filters["format_signature"], filters["linkify"]

    def annotation(of: object, *rest: object) -> str:
        short = MODULES.sub("", ARRAY.sub(r"NDArray[\1]", whole(of, *rest)))
        return CALLABLE.sub(r"Callable[[\1], ", short)

    def signature(of: inspect.Signature, colon: bool) -> object:
        given = of.parameters.values()
        return signature_html(of.replace(parameters=[_with_short_default(p) for p in given]), colon)

    def alias(variable: pdoc.doc.Variable) -> str:
        return STANDARD.sub("", ARRAY.sub(r"NDArray[\1]", value(variable)))

    @pass_context
    def linkify(context: Context, code: str, namespace: str = "", shorten: bool = True) -> Markup:
        return Markup(LINKED.sub("", links(context, code, namespace, shorten)))

    inspect.formatannotation = pdoc.doc.formatannotation = annotation
    pdoc.doc.Variable.default_value_str = property(alias)
    filters["format_signature"], filters["linkify"] = signature, linkify


def _with_short_default(parameter: inspect.Parameter) -> inspect.Parameter:
    is_long = parameter.default is not parameter.empty and len(repr(parameter.default)) > LONGEST_DEFAULT
    return parameter.replace(default=Long()) if is_long else parameter


def name_field_types() -> None:
    """Give the constructors of named tuples their types, which stand there as text that pdoc cannot read."""
    for package in map(import_module, ANALYSES):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            module = import_module(found.name)
            for _, value in inspect.getmembers(module, inspect.isclass):
                if hasattr(value, "_fields") and value.__module__ == module.__name__:
                    value.__new__.__annotations__ = typing.get_type_hints(value)


def main() -> None:
    """Write one page for each module, and an index, into a folder."""
    (folder,) = sys.argv[1:]
    sys.path.insert(0, str(ROOT))
    for name in LIBRARY:
        module = import_module(name)
        for public in module.__all__:  # loaded at their first use, and pages list what is loaded
            setattr(module, public, getattr(module, public))
    shorten_types()
    name_field_types()
    pdoc.render.configure(
        docformat="google", show_source=False, footer_text=f"ppo_repro {import_module(NAME).__version__}"
    )
    pdoc.pdoc(*LIBRARY, *ANALYSES, output_directory=Path(folder))
    fields_of = import_module(f"{NAME}.config.fields")
    fields = escape("\n".join(fields_of.text(fields_of.groups())))
    page = f'<!doctype html><meta charset="utf-8"><title>All fields</title><h1>All fields</h1><pre>{fields}</pre>\n'
    (Path(folder) / "fields.html").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
