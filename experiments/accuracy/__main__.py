"""How accurate are the deterministic numerics and stock transformers, beside the model in float64?

`python -m experiments.accuracy` measures small random models of every family, without and with the outliers of real
checkpoints; `--model FOLDER --text FILE` a model folder on the beginning of a text.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from experiments.accuracy.tables import Subject, show, tables_of, write
from ppo_repro.accuracy.distances import compare, compare_gradients
from ppo_repro.accuracy.scores import Text
from ppo_repro.errors import UserError
from ppo_repro.models.load import load_folder
from ppo_repro.numerics import library
from ppo_repro.testing.outliers import cases_of, outlier_model, sequences_of
from ppo_repro.testing.small_models import CONFIGS, CONTEXT


def text_of_file(ids: Sequence[int], rows: int, prompt: int, response: int) -> Text:
    """`rows` consecutive pieces of a text, each a prompt and a response of so many tokens."""
    width = prompt + response
    if len(ids) < rows * width:
        raise UserError(f"--text has {len(ids)} tokens; {rows} rows of {prompt} + {response} need {rows * width}")
    pieces = [list(ids[i * width : (i + 1) * width]) for i in range(rows)]
    return Text([p[:prompt] for p in pieces], [p[prompt:] for p in pieces])


def measure_folder(folder: Path, file: Path, rows: int, prompt: int, response: int, gradients: bool) -> list[Subject]:
    """A model folder on a text."""
    model, tokenizer = load_folder(folder)
    text = text_of_file(tokenizer(file.read_text(encoding="utf-8"))["input_ids"], rows, prompt, response)
    context = prompt + response
    compared = [compare(model, text, context, bfloat16=True)]
    trained = [compare_gradients(model, text, context)] if gradients else []
    return [Subject(folder.name, "as it is", compared, trained)]


def measure_small(families: Sequence[str], cases: Sequence[str], models: int, gradients: bool) -> list[Subject]:
    """Small random models of some families, `models` for each case."""
    subjects = []
    for family in families:
        for case in [c for c in cases_of(family) if not cases or c in cases]:
            drawn = [(outlier_model(family, case, i), Text(*sequences_of(case, i))) for i in range(models)]
            compared = [compare(model, text, CONTEXT, bfloat16=True) for model, text in drawn]
            trained = [compare_gradients(model, text, CONTEXT) for model, text in drawn if gradients]
            subjects.append(Subject(family, case, compared, trained))
    return subjects


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="errors of deterministic and stock numerics beside the model in float64"
    )
    parser.add_argument("--model", type=Path, help="a transformers folder; without it small random models")
    parser.add_argument("--text", type=Path, help="with --model: a text file")
    parser.add_argument("--rows", type=int, default=6, help="with --model: pieces of the text")
    parser.add_argument("--prompt", type=int, default=16, help="with --model: tokens before those that are scored")
    parser.add_argument("--response", type=int, default=96, help="with --model: tokens that are scored in each piece")
    parser.add_argument("--family", nargs="*", default=list(CONFIGS), choices=list(CONFIGS), help="small models: which")
    parser.add_argument("--case", nargs="*", default=[], help="small models: which outliers (default all)")
    parser.add_argument("--models", type=int, default=4, help="small models: how many of each kind")
    parser.add_argument("--no-gradients", action="store_true", help="leave out the gradients")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="also write the tables as Parquet files to this folder")
    arguments = parser.parse_args(given)
    if (arguments.model is None) != (arguments.text is None):
        parser.error("--model and --text go together")
    library.use_threads(arguments.threads)
    gradients = not arguments.no_gradients
    if arguments.model is None:
        subjects = measure_small(arguments.family, arguments.case, arguments.models, gradients)
    else:
        shape = (arguments.rows, arguments.prompt, arguments.response)
        subjects = measure_folder(arguments.model, arguments.text, *shape, gradients)
    tables = tables_of(subjects)
    show(tables)
    if arguments.out is not None:
        write(tables, arguments.out)


if __name__ == "__main__":
    main()
