"""Print errors of log-probs, logits, best tokens and gradients against the model in float64.

A run measures the log-probs of its own policy (ppo_repro/runs/accuracy.py). This benchmark measures any model on a
text, in deterministic numerics, stock float32 and stock bfloat16. The reference is the unmodified class of transformers
with every number in float64. A gradient's error is max |g - g64| / max |g64|. A ratio is the deterministic error
divided by stock float32's error. A best token is "wrong" if it differs from the best token in float64, and stock
float32 can tell the two logits apart.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.base.errors import UserError
from ppo_repro.base.output import Parser, tell
from ppo_repro.base.processes import SLOTS
from ppo_repro.base.program import program
from ppo_repro.models.batches import lay_out
from ppo_repro.models.load import load_folder
from ppo_repro.models.networks import make_policy, policy_logits
from ppo_repro.models.stock import float64
from ppo_repro.numerics import library
from ppo_repro.numerics.gradient_sums import GradientSums
from ppo_repro.numerics.sequences import slots_of
from ppo_repro.numerics.token_statistics import token_statistics
from ppo_repro.runs.accuracy import (
    Error,
    Errors,
    Scores,
    Text,
    error,
    errors,
    policy_scores,
    reference_scores,
    spacing,
    stock_scores,
)

GRADIENT_RESOLUTION = 2.0**-24  # rounding a tensor's largest gradient to float32 may cost this share of it


def deterministic_scores(model: PreTrainedModel, text: Text, max_context: int) -> Scores:
    """Score a text with an unmodified model by the kernels."""
    return policy_scores(make_policy(model, "deterministic", max_context), text)


def stock_gradients(model: PreTrainedModel, text: Text) -> dict[str, Tensor]:
    """Compute the gradients of the mean of -log p over the tokens by autograd, on a copy of the model in its dtype."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.grad = None
    for prompt, response in zip(text.prompts, text.responses, strict=True):
        ids = torch.tensor([[*prompt, *response[:-1]]])
        logits = model(input_ids=ids, use_cache=False).logits[0][len(prompt) - 1 :]
        logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])
        (-logprobs.sum() / text.tokens()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def reference_gradients(model: PreTrainedModel, text: Text) -> dict[str, Tensor]:
    """Compute the gradients of the mean of -log p in float64, on a copy of the model in float64."""
    wide = copy.deepcopy(model).double()
    with float64(wide):
        return stock_gradients(wide, text)


def deterministic_gradients(model: PreTrainedModel, text: Text, max_context: int) -> dict[str, Tensor]:
    """Compute the gradients of the mean of -log p by the kernels, float32."""
    policy, count = make_policy(model, "deterministic", max_context), len(text.prompts)
    sums = GradientSums(policy.named_parameters(), SLOTS)
    batch = lay_out(text.prompts, text.responses, slots=slots_of(range(count), count, SLOTS)).with_sums(sums)
    logprobs, _ = token_statistics(policy_logits(policy, batch), batch.targets, 1.0, None, "deterministic")
    torch.autograd.backward(-logprobs, torch.full_like(logprobs, 1.0 / text.tokens()))
    return sums.finish()


@dataclass(frozen=True)
class Greedy:
    """Counts of rows whose best token differs from the reference's, and of rows that float32 cannot resolve."""

    tokens: int
    deterministic_differs: int
    stock_differs: int
    unresolved: int  # the two best logits are closer than twice stock float32's largest error in that row
    wrong: int  # deterministic differs where float32 does resolve them


def greedy(deterministic: Scores, stock: Scores, reference: Scores) -> Greedy:
    """Compare the best token of each row of logits."""
    best = reference.logits.topk(2, -1)
    stock_error = (stock.logits.to(torch.float64) - reference.logits).abs().amax(-1)
    gap = best.values[:, 0] - best.values[:, 1]
    unresolved = gap <= torch.maximum(2 * stock_error, spacing(best.values[:, 0]))
    deterministic_differs, stock_differs = (s.logits.argmax(-1) != best.indices[:, 0] for s in (deterministic, stock))
    counts = (deterministic_differs, stock_differs, unresolved, deterministic_differs & ~unresolved)
    return Greedy(len(gap), *(int(c.sum()) for c in counts))


def by_expert(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Split the matrices [E, outputs, inputs] of mixtures by expert, because frequent experts would hide a rare one."""
    found: dict[str, Tensor] = {}
    for name, gradient in gradients.items():
        experts = {f"{name}.{e}": expert for e, expert in enumerate(gradient)} if gradient.dim() == 3 else {}
        found |= experts or {name: gradient}
    return found


def relative(found: Tensor, reference: Tensor) -> float:
    """Return max |g - g64| / max |g64|; 0 if both are all zeros."""
    distance = (found.to(torch.float64) - reference).abs().max()
    return float(distance / reference.abs().max()) if distance else 0.0


def gradient_errors(found: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the relative error of each parameter, and of each expert.

    Raises ValueError unless both have the same parameters.
    """
    if found.keys() != reference.keys():
        raise ValueError(f"parameters of one side only: {sorted(found.keys() ^ reference.keys())}")
    parts = by_expert(found)
    return {name: relative(parts[name], gradient) for name, gradient in by_expert(reference).items()}


@dataclass(frozen=True)
class Comparison:
    """Errors of deterministic numerics and stock float32 on one text."""

    logprobs: Errors
    logits: Errors
    bfloat16: Error | None  # of the log-probs by the stock model in bfloat16
    greedy: Greedy


def compare(
    model: PreTrainedModel, text: Text, max_context: int, given: PreTrainedModel | None = None, bfloat16: bool = False
) -> Comparison:
    """Compare log-probs, logits and best tokens. The deterministic numerics compute `given`, or the model itself."""
    reference, stock = reference_scores(model, text), stock_scores(model, text)
    deterministic = deterministic_scores(model if given is None else given, text, max_context)
    half = stock_scores(copy.deepcopy(model).bfloat16(), text).logprobs if bfloat16 else None
    return Comparison(
        errors(deterministic.logprobs, stock.logprobs, reference.logprobs),
        errors(deterministic.logits, stock.logits, reference.logits),
        None if half is None else error(half, reference.logprobs),
        greedy(deterministic, stock, reference),
    )


@dataclass(frozen=True)
class GradientComparison:
    """Relative error max |g - g64| / max |g64| of each parameter, in both numerics."""

    deterministic: dict[str, float]
    stock: dict[str, float]

    def worst(self) -> tuple[str, str]:
        """Return the parameters with the largest error: of deterministic numerics, and of stock."""
        return max(self.deterministic, key=self.deterministic.__getitem__), max(self.stock, key=self.stock.__getitem__)

    def ratio(self) -> float:
        """Return deterministic / stock error of the worst parameters; the stock error is at least the resolution."""
        deterministic, stock = self.worst()
        return self.deterministic[deterministic] / max(self.stock[stock], GRADIENT_RESOLUTION)


def compare_gradients(
    model: PreTrainedModel, text: Text, max_context: int, given: PreTrainedModel | None = None
) -> GradientComparison:
    """Compare the gradients of the mean of -log p. The deterministic numerics compute `given`, or the model itself."""
    reference = reference_gradients(model, text)
    deterministic = deterministic_gradients(model if given is None else given, text, max_context)
    return GradientComparison(
        gradient_errors(deterministic, reference), gradient_errors(stock_gradients(model, text), reference)
    )


def typical(ratios: Sequence[float]) -> float:
    """Return the geometric mean of ratios, which one lucky model changes little."""
    return float(np.exp(np.mean(np.log(ratios))))


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
    for name, of_both in (("log-probs", found.logprobs), ("logits", found.logits)):
        for side in ("deterministic", "stock"):
            e = getattr(of_both, side)
            lines.append(f"{f'{name}, {side}':<28}{e.rms:>10.2g}{e.mean:>10.2g}{e.largest:>10.2g}")
    if found.bfloat16 is not None:
        e = found.bfloat16
        lines.append(f"{'log-probs, stock bfloat16':<28}{e.rms:>10.2g}{e.mean:>10.2g}{e.largest:>10.2g}")
    ratios = ", ".join(f"{name} {e.ratio('rms'):.2f}" for name, e in vars(found).items() if name.startswith("log"))
    counts = ", ".join(f"{name.replace('_', ' ')} {n}" for name, n in asdict(found.greedy).items())
    return "\n".join([*lines, f"deterministic / stock, rms: {ratios}", f"best tokens: {counts}"])


@program
def main(given: Sequence[str] | None) -> None:
    parser = Parser(prog="python -m experiments.benchmarks.float64", description=__doc__)
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
