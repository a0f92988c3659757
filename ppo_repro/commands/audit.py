"""Implement `ppo-repro audit`, which finds the wrong side of another stack."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from ppo_repro.base.errors import UserError
from ppo_repro.base.files import require_ours, whole_file
from ppo_repro.base.output import print_result, say
from ppo_repro.commands.values import count, number, path, positive, run_folder

if TYPE_CHECKING:
    from ppo_repro.testing.audit.recorded_run import RunDump
    from ppo_repro.testing.audit.subject import Subject
    from ppo_repro.testing.dumps import DumpedResponse

FORMATS = "ppo_repro, verl, trl, slime, prime-rl or areal (default: told from the columns)"
MEANS = ("auto", "raw", "tempered", "processed")


# of the sampling settings, by their names in StackSampling
DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def add_options(add: Callable[..., argparse.Action]) -> None:
    """Add the options of the command."""
    about = "responses with two log-probs a token; or a run folder or `latest`, which has all"
    add("dump", metavar="DUMP", type=run_folder, help=about)
    add("--model", metavar="FOLDER", type=path, help="the weights it was made with")
    add("--format", help=FORMATS)
    temperature = number(lambda x: 1e-6 <= x < math.inf, "a finite number of at least 1e-06")
    add("--temperature", type=temperature, help="what both sides divide logits by (default 1, if that explains them)")
    fraction = number(lambda x: 0 < x <= 1, "a number above 0 and at most 1")
    add("--top-p", type=fraction, help="of the sampler (default 1, all tokens)")
    add("--top-k", type=count, help="of the sampler (default 0, all tokens)")
    below_1 = number(lambda x: 0 <= x < 1, "a number of at least 0 and below 1")
    add("--min-p", type=below_1, help="of the sampler (default 0, all tokens)")
    above_0 = number(lambda x: 0 < x < math.inf, "a finite number above 0")
    add("--repetition-penalty", type=above_0, help="of the sampler (default 1, none)")
    for side in ("sampler", "trainer"):
        what = "raw (at temperature 1), tempered (over all tokens), processed (after penalty and cuts)"
        add(f"--{side}-logprobs", choices=MEANS, default="auto", help=f"what they are of: {what}, or auto (default)")
    add("--also", metavar="FOLDER", type=path, action="append", default=[], help="older weights to try")
    add("--responses", type=positive, default=64, help="how many, from the first on (default 64)")
    add("--threads", type=positive, help="of the processor (default: one for each core)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where the model computes (default cpu)")
    add("--out", metavar="PARQUET", type=path, help="write the tokens, with the log-probs of the model in float64")


def _complete(options: argparse.Namespace) -> RunDump | None:
    """Fill in model and sampling from a run folder, or the defaults of a dump; return the run's data, None for a dump.

    Raises UserError for an option that the run's configuration answers, and for a dump without a model.
    """
    found = None
    if options.dump.is_dir():
        from ppo_repro.testing.audit.recorded_run import dump_of_run

        for name in ("model", "format", *DEFAULTS):
            if getattr(options, name) is not None:
                raise UserError(f"{_option(name)}: {options.dump} is a run, which has it; leave it out")
        found = dump_of_run(options.dump)
        rollout, options.model, options.format = found.config.rollout, found.model, "ppo_repro"
        options.temperature, options.top_p, options.top_k = rollout.temperature, rollout.top_p, rollout.top_k
    if options.model is None:
        raise UserError("--model FOLDER: missing; give the weights that the dump was made with")
    options.is_temperature_given = options.temperature is not None
    for name, default in DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, default)
    return found


def _check_out(options: argparse.Namespace) -> None:
    if options.out is not None:
        if options.out.resolve() == options.dump.resolve():
            raise UserError(f"--out {options.out}: is the dump itself; choose another file")
        require_ours(options.out, _is_audit)


def _is_audit(path: Path) -> bool:
    """Return whether a file is a Parquet file with the columns that an audit writes. Raises OSError."""
    from pyarrow import ArrowException
    from pyarrow.parquet import read_schema

    from ppo_repro.testing.audit.audit import TOKENS

    try:
        return tuple(read_schema(path).names) == TOKENS
    except ArrowException:
        return False


def _responses(options: argparse.Namespace, run: RunDump | None) -> tuple[list[DumpedResponse], int, int]:
    """Return the responses to audit, and how many others were skipped before them and are left after them.

    Raises UserError if a model folder cannot be used, or if no response has a token that counts.
    """
    from ppo_repro.models.folder_files import check_config, check_weights
    from ppo_repro.testing.dumps import read_dump

    for option, folder in (("--model", options.model), *(("--also", folder) for folder in options.also)):
        check_config(folder, f"{option} {folder}")
        check_weights(folder, f"{option} {folder}")
    rows = read_dump(options.dump if run is None else run.rows, options.format)
    responses = list(islice(rows, options.responses))
    if not responses:
        raise UserError(f"{options.dump}: has no response with a token that counts; there is nothing to audit")
    return responses, responses[-1].row - len(responses), sum(1 for _ in rows)


def _subject(options: argparse.Namespace, run: RunDump | None) -> Subject:
    """Load the model, the other weights to try, and the tokenizer."""
    import torch

    from ppo_repro.testing.audit.load_model import last_matrices, load_model, load_tokenizer
    from ppo_repro.testing.audit.subject import Subject

    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device here; take cpu")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model, tokenizer = load_model("--model", options.model, options.device), load_tokenizer(options.model)
    padding = None
    if tokenizer is not None:
        padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    begin, end = (getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id"))
    others = {f"weights of {folder}": load_model("--also", folder, options.device) for folder in options.also}
    if run is not None and run.checkpoint is not None:
        others["weights that the run started with"], model = model, run.weights(model)
    # a sampler may take over new weights but for the last matrix, of which it has a copy in another layout
    others |= {f"the last matrix of the {name}": of for name, of in last_matrices(model, others).items()}
    return Subject(model, others, begin, end, padding, tokenizer)


def audit_command(options: argparse.Namespace) -> int:
    """Say which side of a run, or of another stack's dump, is wrong, by the model in float64; exit 1 if one is."""
    run = _complete(options)
    _check_out(options)
    which = "" if run is None else f"iteration {run.iteration}, "
    say(f"{options.dump}: {which}both sides beside the model of {options.model} in float64")
    responses, skipped, unread = _responses(options, run)

    from ppo_repro.testing.audit.audit import audit
    from ppo_repro.testing.audit.report import draw_fields, fields, lines, verdict
    from ppo_repro.testing.audit.subject import StackSampling

    sampling = StackSampling(
        **{name: getattr(options, name) for name in DEFAULTS},
        sampler_logprobs=options.sampler_logprobs,
        trainer_logprobs=options.trainer_logprobs,
        is_temperature_given=options.is_temperature_given,
    )
    found = audit(_subject(options, run), responses, sampling)
    said = lines(found, skipped, unread)
    if options.out is not None:
        with whole_file(options.out) as path:
            found.tokens.to_parquet(path)
        said.append(f"tokens  {options.out}")
    described = {
        **{"verdict": verdict(found), "responses": found.responses, "skipped": skipped, "tokens": len(found.tokens)},
        **{"float32_rms": found.floor, "sampler": fields(found.sampler), "trainer": fields(found.trainer)},
        "draws": draw_fields(found),
    }
    print_result(options.json, described, said)
    return 0 if found.is_right else 1
