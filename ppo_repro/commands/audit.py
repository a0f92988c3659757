"""`ppo-repro audit`: which side of another stack is wrong."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ppo_repro.errors import UserError
from ppo_repro.output import print_result

if TYPE_CHECKING:
    from ppo_repro.audit.dump import Response


def add_options(parser: argparse.ArgumentParser, path: Callable[[str], Path]) -> None:
    """The options of the command; `path` reads one."""
    parser.add_argument("dump", metavar="DUMP", type=path, help="responses with two log-probs a token")
    parser.add_argument("--model", metavar="FOLDER", type=path, required=True, help="the weights it was made with")
    parser.add_argument("--format", default="ppo_repro", help="ppo_repro (default), verl, trl, slime or prime-rl")
    parser.add_argument("--temperature", type=float, default=1.0, help="what both sides divide logits by (default 1)")
    parser.add_argument("--top-p", type=float, default=1.0, help="of the sampler (default 1, all tokens)")
    parser.add_argument("--top-k", type=int, default=0, help="of the sampler (default 0, all tokens)")
    parser.add_argument("--also", metavar="FOLDER", type=path, action="append", default=[], help="older weights to try")
    parser.add_argument("--responses", type=int, default=64, help="how many, from the first on (default 64)")
    parser.add_argument("--out", metavar="PAGE", type=path, help="write an HTML page")


def _length(response: Response) -> int:
    return len(response.prompt_ids) + len(response.response_ids)


def audit_command(arguments: argparse.Namespace) -> int:
    """Say which side of another stack's dump is wrong, by the exact model, and why; exit 1 if one is."""
    from ppo_repro.audit.dump import FORMATS, read_dump

    if arguments.format not in FORMATS:
        raise UserError(f"--format {arguments.format}: must be one of {', '.join(FORMATS)}")
    if not 0 < arguments.temperature < float("inf"):
        raise UserError(f"--temperature {arguments.temperature}: must be greater than 0")
    if not 0 < arguments.top_p <= 1:
        raise UserError(f"--top-p {arguments.top_p}: must be greater than 0 and at most 1")
    for name, value, least in (("--top-k", arguments.top_k, 0), ("--responses", arguments.responses, 1)):
        if value < least:
            raise UserError(f"{name} {value}: must be at least {least}")
    if arguments.out is not None and not arguments.out.parent.is_dir():
        raise UserError(f"--out {arguments.out}: there is no folder {arguments.out.parent}; make it")
    responses = read_dump(arguments.dump, arguments.format, arguments.responses)

    from ppo_repro.audit.conditions import Subject
    from ppo_repro.audit.judge import audit
    from ppo_repro.audit.page import fields, lines, page
    from ppo_repro.audit.trials import Settings
    from ppo_repro.disk.durable import atomic_write
    from ppo_repro.models.load import load_folder
    from ppo_repro.numerics.proof import proof

    proof.use("auto", 1)
    model, tokenizer = load_folder(arguments.model)
    positions = getattr(model.config, "max_position_embeddings", None)
    for response in responses:
        if positions is not None and _length(response) > positions:
            raise UserError(
                f"{arguments.dump}: row {response.row}: {_length(response)} tokens; the model has {positions} "
                "positions; give the folder of the model that the dump was made with"
            )
    others = {f"weights of {folder}": load_folder(folder)[0] for folder in arguments.also}
    # the last token is no input, and a BOS token may be put in front
    subject = Subject(model, others, tokenizer.bos_token_id, max(_length(r) for r in responses))
    found = audit(subject, responses, Settings(arguments.temperature, arguments.top_p, arguments.top_k))
    said = lines(found)
    if arguments.out is not None:
        atomic_write(arguments.out, page(found, f"Audit of {arguments.dump.name}", arguments.temperature).encode())
        said.append(f"page    {arguments.out}")
    print_result(arguments.json, fields(found), said)
    return 0 if found.sampler.is_right and found.trainer.is_right else 1
