"""Implement `ppo-repro audit`, which finds the wrong side of another stack."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from ppo_repro.base.errors import UserError
from ppo_repro.base.files import require_ours, whole_file
from ppo_repro.base.output import print_result, say

if TYPE_CHECKING:
    from ppo_repro.testing.audit.recorded_run import RunDump
    from ppo_repro.testing.audit.subject import Subject
    from ppo_repro.testing.dumps import DumpedResponse

FORMATS = "ppo_repro, verl, trl, slime, prime-rl or areal (default: told from the columns)"
MEANS = ("auto", "raw", "tempered", "processed")


@dataclass(frozen=True)
class Setting:
    """A sampling setting of a dump: its default, the values that it may have, and its help."""

    default: float  # an int or a float, which is the type of the option
    is_allowed: Callable[[float], bool]
    allowed: str
    help: str

    @property
    def type(self) -> Callable[[str], float]:
        """Return what reads a value."""
        return type(self.default)


SETTINGS = {  # by their names in StackSampling
    "temperature": Setting(
        1.0,
        lambda x: 1e-6 <= x < float("inf"),
        "at least 1e-06 and finite",
        "what both sides divide logits by (default 1, if that explains them)",
    ),
    "top_p": Setting(
        1.0, lambda x: 0 < x <= 1, "greater than 0 and at most 1", "of the sampler (default 1, all tokens)"
    ),
    "top_k": Setting(0, lambda x: x >= 0, "at least 0", "of the sampler (default 0, all tokens)"),
    "min_p": Setting(0.0, lambda x: 0 <= x < 1, "at least 0 and below 1", "of the sampler (default 0, all tokens)"),
    "repetition_penalty": Setting(
        1.0, lambda x: 0 < x < float("inf"), "greater than 0 and finite", "of the sampler (default 1, none)"
    ),
}


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def add_options(
    add: Callable[..., argparse.Action], path: Callable[[str], Path], run_folder: Callable[[str], Path]
) -> None:
    """Add the options of the command; `path` reads a path, `run_folder` takes `latest` too."""
    about = "responses with two log-probs a token; or a run folder or `latest`, which has all"
    add("dump", metavar="DUMP", type=run_folder, help=about)
    add("--model", metavar="FOLDER", type=path, help="the weights it was made with")
    add("--format", help=FORMATS)
    for name, setting in SETTINGS.items():
        add(_option(name), type=setting.type, help=setting.help)
    for side in ("sampler", "trainer"):
        what = "raw (at temperature 1), tempered (over all tokens), processed (after penalty and cuts)"
        add(f"--{side}-logprobs", choices=MEANS, default="auto", help=f"what they are of: {what}, or auto (default)")
    add("--also", metavar="FOLDER", type=path, action="append", default=[], help="older weights to try")
    add("--responses", type=int, default=64, help="how many, from the first on (default 64)")
    add("--threads", type=int, help="of the processor (default: one for each core)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where the model computes (default cpu)")
    add("--out", metavar="PARQUET", type=path, help="write the tokens, with the log-probs of the model in float64")


def _complete(options: argparse.Namespace) -> RunDump | None:
    """Fill in model and sampling from a run folder, or the defaults of a dump; return the run's data, None for a dump.

    Raises UserError for an option that the run's configuration answers, and for a dump without a model.
    """
    found = None
    if options.dump.is_dir():
        from ppo_repro.testing.audit.recorded_run import dump_of_run

        for name in ("model", "format", *SETTINGS):
            if getattr(options, name) is not None:
                raise UserError(f"{_option(name)}: {options.dump} is a run, which has it; leave it out")
        found = dump_of_run(options.dump)
        rollout, options.model, options.format = found.config.rollout, found.model, "ppo_repro"
        options.temperature, options.top_p, options.top_k = rollout.temperature, rollout.top_p, rollout.top_k
    if options.model is None:
        raise UserError("--model FOLDER: missing; give the weights that the dump was made with")
    options.is_temperature_given = options.temperature is not None
    for name, setting in SETTINGS.items():
        if getattr(options, name) is None:
            setattr(options, name, setting.default)
    return found


def _check(options: argparse.Namespace) -> None:
    settings = ((_option(name), getattr(options, name), setting) for name, setting in SETTINGS.items())
    ranges = (
        *((name, value, setting.is_allowed(value), setting.allowed) for name, value, setting in settings),
        ("--responses", options.responses, options.responses >= 1, "at least 1"),
        ("--threads", options.threads, options.threads is None or options.threads >= 1, "at least 1"),
    )
    for name, value, is_good, allowed in ranges:
        if not is_good:
            raise UserError(f"{name} {value}: must be {allowed}")
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
    _check(options)
    which = "" if run is None else f"iteration {run.iteration}, "
    say(f"{options.dump}: {which}both sides beside the model of {options.model} in float64")
    responses, skipped, unread = _responses(options, run)

    from ppo_repro.testing.audit.audit import audit
    from ppo_repro.testing.audit.report import draw_fields, fields, lines, verdict
    from ppo_repro.testing.audit.subject import StackSampling

    sampling = StackSampling(
        **{name: getattr(options, name) for name in SETTINGS},
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
