"""Print errors of log-probs, logits, best tokens and gradients against the model in float64.

The command compares deterministic numerics, stock float32 and stock bfloat16 on a text. The reference is the unmodified
class of transformers with every number in float64. A gradient's error is max |g - g64| / max |g64|. A ratio is the
deterministic error divided by stock float32's error. A best token is "wrong" if it differs from the best token in
float64, and stock float32 can tell the two logits apart.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from experiments.accuracy.distances import Comparison, compare, compare_gradients
from ppo_repro.analysis.program import program
from ppo_repro.base.errors import UserError
from ppo_repro.base.output import Parser, tell
from ppo_repro.models.load import load_folder
from ppo_repro.numerics import library
from ppo_repro.runs.accuracy import Text


def text_of_file(ids: Sequence[int], rows: int, prompt: int, response: int) -> Text:
    """Return `rows` consecutive chunks of a text, each with `prompt` prompt tokens and `response` response tokens."""
    width = prompt + response
    if len(ids) < rows * width:
        raise UserError(f"the text has {len(ids)} tokens; {rows} rows of {prompt} + {response} need {rows * width}")
    chunks = [list(ids[i * width : (i + 1) * width]) for i in range(rows)]
    return Text([c[:prompt] for c in chunks], [c[prompt:] for c in chunks])


def table(found: Comparison) -> str:
    """Return a table of errors in nats by numerics, and the number of best tokens that differ from float64's."""
    lines = [f"{'':<28}{'rms':>10}{'mean':>10}{'largest':>10}"]
    for name, errors in (("log-probs", found.logprobs), ("logits", found.logits)):
        for side in ("deterministic", "stock"):
            e = getattr(errors, side)
            lines.append(f"{f'{name}, {side}':<28}{e.rms:>10.2g}{e.mean:>10.2g}{e.largest:>10.2g}")
    if found.bfloat16 is not None:
        e = found.bfloat16
        lines.append(f"{'log-probs, stock bfloat16':<28}{e.rms:>10.2g}{e.mean:>10.2g}{e.largest:>10.2g}")
    ratios = ", ".join(f"{name} {e.ratio('rms'):.2f}" for name, e in vars(found).items() if name.startswith("log"))
    counts = ", ".join(f"{name.replace('_', ' ')} {n}" for name, n in asdict(found.greedy).items())
    return "\n".join([*lines, f"deterministic / stock, rms: {ratios}", f"best tokens: {counts}"])


@program
def main(given: Sequence[str] | None) -> None:
    parser = Parser(prog="python -m experiments.accuracy", description=__doc__)
    parser.add_argument("model", type=Path, help="a transformers folder")
    parser.add_argument("text", type=Path, help="a text file")
    parser.add_argument("--rows", type=int, default=6, help="chunks of the text")
    parser.add_argument("--prompt", type=int, default=16, help="tokens before the scored ones")
    parser.add_argument("--response", type=int, default=96, help="scored tokens in each chunk")
    parser.add_argument("--no-gradients", action="store_true", help="leave out the gradients")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(given)
    library.use_threads(options.threads, torch_computes=True)
    model, tokenizer = load_folder(options.model)
    ids = tokenizer(options.text.read_text(encoding="utf-8"))["input_ids"]
    text = text_of_file(ids, options.rows, options.prompt, options.response)
    context = options.prompt + options.response
    tell(table(compare(model, text, context, bfloat16=True)))
    if not options.no_gradients:
        gradients = compare_gradients(model, text, context)
        for side, name in zip(("deterministic", "stock"), gradients.worst(), strict=True):
            tell(f"worst gradient, {side}: {getattr(gradients, side)[name]:.2g} of its largest number, in {name}")


if __name__ == "__main__":
    sys.exit(main())
