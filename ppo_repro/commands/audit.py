"""Implement `ppo-repro audit`, which finds the wrong side of another stack."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppo_repro.base.errors import UserError
from ppo_repro.base.files import require_ours, whole_file
from ppo_repro.base.output import print_result, say
from ppo_repro.commands.values import count, number, path, positive, run_path
from ppo_repro.testing.dump_formats import FORMATS

if TYPE_CHECKING:
    from ppo_repro.testing.audit.recorded_run import RunDump
    from ppo_repro.testing.audit.stack import StackModel, StackSampling
    from ppo_repro.testing.dumps import DumpedResponse

MEANS = ("auto", "raw", "tempered", "processed")
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # options, as StackSampling names them


def add_options(add: Callable[..., argparse.Action]) -> None:
    """Add the options of the command."""
    about = "responses with two log-probs a token; or a run folder or `latest`, which has all"
    add("dump", metavar="DUMP", type=run_path, help=about)
    add("--model", metavar="FOLDER", type=path, help="the weights that made the dump")
    *stacks, last = FORMATS
    about = f"the stack that wrote the dump: {', '.join(stacks)} or {last} (default: told from the columns)"
    add("--format", help=about)
    temperature = number(lambda x: 1e-6 <= x < math.inf, "a finite number of at least 1e-06")
    add("--temperature", type=temperature, help="what both sides divide logits by (default 1, if that explains them)")
    fraction = number(lambda x: 0 < x <= 1, "a number above 0 and at most 1")
    add("--top-p", type=fraction, help="the top-p that the sampler used (default 1, all tokens)")
    add("--top-k", type=count, help="the top-k that the sampler used (default 0, all tokens)")
    below_1 = number(lambda x: 0 <= x < 1, "a number of at least 0 and below 1")
    add("--min-p", type=below_1, help="the min-p that the sampler used (default 0, all tokens)")
    above_0 = number(lambda x: 0 < x < math.inf, "a finite number above 0")
    add("--repetition-penalty", type=above_0, help="the penalty that the sampler used (default 1, none)")
    for side in ("sampler", "trainer"):
        what = "raw (at temperature 1), tempered (over all tokens), processed (after penalty and cuts)"
        about = f"the distribution that the {side}'s log-probs are of: {what}, or auto (default)"
        add(f"--{side}-logprobs", choices=MEANS, default="auto", help=about)
    add("--also", metavar="FOLDER", type=path, action="append", default=[], help="older weights that are tried too")
    add("--responses", type=positive, default=64, help="how many responses are judged, from the first on (default 64)")
    add("--threads", type=positive, help="how many threads compute (default: one for each core)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where the model computes (default cpu)")
    add("--out", metavar="PARQUET", type=path, help="write the tokens, with the log-probs of the model in float64")


def _run_of(options: argparse.Namespace) -> RunDump | None:
    """Return the data of a run folder, None for a dump.

    Raises UserError for an option that the run's configuration answers, and for a dump without a model.
    """
    if not options.dump.is_dir():
        if options.model is None:
            raise UserError("--model FOLDER: missing; give the weights that the dump was made with")
        return None
    from ppo_repro.testing.audit.recorded_run import dump_of_run

    for name in ("model", "format", *SAMPLING):
        if getattr(options, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"{option}: {options.dump} is a run, which has it; leave it out")
    return dump_of_run(options.dump)


def _sampling(options: argparse.Namespace, run: RunDump | None) -> StackSampling:
    """Return how the stack sampled: as the run's configuration says, or as the user says."""
    from ppo_repro.testing.audit.stack import StackSampling

    source = options if run is None else run.config.rollout
    given: dict[str, Any] = {n: value for n in SAMPLING if (value := getattr(source, n, None)) is not None}
    return StackSampling(
        **given,
        sampler_logprobs=options.sampler_logprobs,
        trainer_logprobs=options.trainer_logprobs,
        is_temperature_given="temperature" in given,
    )


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
        return {*read_schema(path).names} | {"trainer_reference"} == {*TOKENS}  # earlier versions had one reference
    except ArrowException:
        return False


def _responses(options: argparse.Namespace, model: Path, run: RunDump | None) -> tuple[list[DumpedResponse], int]:
    """Return the responses to audit, and how many others before the last one have no token that counts.

    Raises UserError if a model folder cannot be used, or if no response has a token that counts.
    """
    from ppo_repro.models.folder_files import check_folder, check_weights
    from ppo_repro.testing.dumps import read_dump

    for option, folder in (("--model", model), *(("--also", folder) for folder in options.also)):
        check_folder(folder, f"{option} {folder}")
        check_weights(folder, f"{option} {folder}")
    rows = read_dump(options.dump, options.format) if run is None else read_dump(run.rows, "ppo_repro")
    responses = list(islice((row for row in rows if row.counts.any()), options.responses))
    if not responses:
        raise UserError(f"{options.dump}: has no response with a token that counts; there is nothing to audit")
    return responses, responses[-1].row - len(responses)


def _stack_model(options: argparse.Namespace, folder: Path, run: RunDump | None) -> StackModel:
    """Load the model, the other weights to try, and the tokenizer."""
    import torch

    from ppo_repro.testing.audit.load_model import last_matrices, load_model, load_tokenizer
    from ppo_repro.testing.audit.stack import StackModel

    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no CUDA device here; take cpu")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model, tokenizer = load_model("--model", folder, options.device), load_tokenizer(folder)
    padding = None
    if tokenizer is not None:
        padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    begin, end = (getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id"))
    others = {f"weights of {other}": load_model("--also", other, options.device) for other in options.also}
    if run is not None and run.checkpoint is not None:
        others["weights that the run started with"], model = model, run.weights(model)
    # a sampler may take over new weights but for the last matrix, of which it has a copy in another layout
    others |= {f"the last matrix of the {name}": of for name, of in last_matrices(model, others).items()}
    return StackModel(model, others, begin, end, padding, tokenizer)


def audit_command(options: argparse.Namespace) -> int:
    """Say which side of a run, or of another stack's dump, is wrong, by the model in float64; exit 1 if one is."""
    run = _run_of(options)
    model = options.model if run is None else run.model
    _check_out(options)
    which = "" if run is None else f"iteration {run.iteration}, "
    say(f"{options.dump}: {which}both sides beside the model of {model} in float64")
    responses, skipped = _responses(options, model, run)

    from ppo_repro.testing.audit.audit import audit
    from ppo_repro.testing.audit.report import as_fields, lines

    found = audit(_stack_model(options, model, run), responses, _sampling(options, run))
    said = lines(found, skipped, is_limited=len(responses) == options.responses)
    if options.out is not None:
        with whole_file(options.out) as path:
            found.tokens.to_parquet(path)
        said.append(f"tokens  {options.out}")
    print_result(options.json, as_fields(found, skipped), said)
    return 0 if found.is_right else 1
