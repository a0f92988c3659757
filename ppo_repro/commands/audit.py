"""`ppo-repro audit`: which side of another stack is wrong."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ppo_repro.audit.page_file import PAGE
from ppo_repro.errors import UserError
from ppo_repro.files import check_replaceable, write_over_earlier
from ppo_repro.output import print_result, say

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ppo_repro.audit.dump import Response
    from ppo_repro.audit.ways import Special

FORMATS = "ppo_repro (default), verl, trl, slime, prime-rl or areal"


def add_options(parser: argparse.ArgumentParser, path: Callable[[str], Path]) -> None:
    """The options of the command; `path` reads one."""
    parser.add_argument("dump", metavar="DUMP", type=path, help="responses with two log-probs a token")
    parser.add_argument("--model", metavar="FOLDER", type=path, required=True, help="the weights it was made with")
    parser.add_argument("--format", default="ppo_repro", help=FORMATS)
    parser.add_argument("--temperature", type=float, default=1.0, help="what both sides divide logits by (default 1)")
    parser.add_argument("--top-p", type=float, default=1.0, help="of the sampler (default 1, all tokens)")
    parser.add_argument("--top-k", type=int, default=0, help="of the sampler (default 0, all tokens)")
    parser.add_argument("--also", metavar="FOLDER", type=path, action="append", default=[], help="older weights to try")
    parser.add_argument("--responses", type=int, default=64, help="how many, from the first on (default 64)")
    parser.add_argument("--threads", type=int, default=1, help="of the processor (default 1)")
    parser.add_argument("--out", metavar="PAGE", type=path, help="write an HTML page")


def _length(response: Response) -> int:
    return len(response.prompt_ids) + len(response.response_ids)


def _check(arguments: argparse.Namespace) -> None:
    if not 0 < arguments.temperature < float("inf"):
        raise UserError(f"--temperature {arguments.temperature}: must be greater than 0")
    if not 0 < arguments.top_p <= 1:
        raise UserError(f"--top-p {arguments.top_p}: must be greater than 0 and at most 1")
    counts = (
        ("--top-k", arguments.top_k, 0),
        ("--responses", arguments.responses, 1),
        ("--threads", arguments.threads, 1),
    )
    for name, value, least in counts:
        if value < least:
            raise UserError(f"{name} {value}: must be at least {least}")
    if arguments.out is not None and not arguments.out.parent.is_dir():
        raise UserError(f"--out {arguments.out}: there is no folder {arguments.out.parent}; make it")
    if arguments.out is not None:
        check_replaceable(arguments.out, PAGE)


def audit_command(arguments: argparse.Namespace) -> int:
    """Say which side of another stack's dump is wrong, by the model in float64, and why; exit 1 if one is."""
    _check(arguments)
    say(f"{arguments.dump}: both sides beside the model of {arguments.model} in float64")
    from ppo_repro.audit.dump import FORMATS, read_dump

    if arguments.format not in FORMATS:
        raise UserError(f"--format {arguments.format}: must be one of {', '.join(FORMATS)}")
    for option, folder in (("--model", arguments.model), *(("--also", folder) for folder in arguments.also)):
        _look(option, folder)
    dump = read_dump(arguments.dump, arguments.format, arguments.responses)

    from ppo_repro.audit.conditions import Settings, Subject
    from ppo_repro.audit.judge import audit
    from ppo_repro.audit.page import page
    from ppo_repro.audit.words import fields, lines
    from ppo_repro.models.load import load_folder
    from ppo_repro.numerics import library

    library.use_threads(arguments.threads)
    model, tokenizer = load_folder(arguments.model)
    special = _special(model, tokenizer)
    for response in dump.responses:
        if special.positions is not None and _length(response) > special.positions:
            raise UserError(
                f"{arguments.dump}: row {response.row}: {_length(response)} tokens; the model has {special.positions} "
                "positions; give the folder of the model that the dump was made with"
            )
    others = {f"weights of {folder}": load_folder(folder)[0] for folder in arguments.also}
    subject = Subject(model, others, special)
    found = audit(subject, dump.responses, Settings(arguments.temperature, arguments.top_p, arguments.top_k))
    said = lines(found, dump.skipped)
    if arguments.out is not None:
        title = f"Audit of {arguments.dump.name}"
        html = page(found, title, arguments.temperature, lambda i: str(tokenizer.decode([i])), dump.skipped)
        write_over_earlier(arguments.out, PAGE, html.encode())
        said.append(f"page    {arguments.out}")
    print_result(arguments.json, fields(found, dump.skipped), said)
    return 0 if found.sampler.is_right and found.trainer.is_right else 1


def _look(option: str, folder: Path) -> None:
    """Check the files of a model folder before torch is imported, which takes seconds."""
    from ppo_repro.models.folder_files import check_config, check_tokenizer, check_weights

    for check in (check_config, check_tokenizer, check_weights):
        check(folder, f"{option} {folder}")


def _special(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Special:
    from ppo_repro.audit.ways import Special
    from ppo_repro.numerics.families import ROTARIES

    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return Special(
        bos_token_id=tokenizer.bos_token_id,
        pad_token_id=padding,
        tokenizer=tokenizer,
        positions=getattr(model.config, "max_position_embeddings", None),
        learned=not any(type(module) in ROTARIES for module in model.modules()),
    )
