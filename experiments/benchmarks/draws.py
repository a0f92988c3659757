"""Print how often wrong draws are found, and how often right ones are accused, in a model's own contexts.

The model answers ten questions at temperature 1; each token of an answer is a context. A simulated dump takes contexts
from these, with repetition, and draws a token in each of them from the model's distribution, or from a cut of it.
Responses have 50 tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedTokenizerBase

from ppo_repro.base.output import Parser, tell
from ppo_repro.base.program import program
from ppo_repro.models.load import load_folder
from ppo_repro.statistics.draws import draws_of

Floats = npt.NDArray[np.float32]

QUESTIONS = (
    "Explain why the sky is blue.",
    "What is 17 plus 28?",
    "Write a short story about a fox.",
    "List three uses of a brick.",
    "Who wrote Hamlet?",
    "Give me a recipe for soup.",
    "How do magnets work?",
    "Tell me a joke.",
    "Translate 'good morning' into French.",
    "What is a prime number?",
)
TOKENS = (200, 1000, 4000, 16000)


class Contexts(NamedTuple):
    """Distributions with falling probabilities p [n, V], their sums up to each token, and their entropies [n], nats."""

    p: Floats
    reached: Floats
    entropies: Floats


@torch.no_grad()
def contexts_of(model: Any, tokenizer: PreTrainedTokenizerBase, length: int) -> Contexts:
    """Sample answers of up to `length` tokens, and return the distribution of each token."""
    rows = []
    torch.manual_seed(0)
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(str(text), return_tensors="pt")["input_ids"]
        given = {"attention_mask": torch.ones_like(ids), "do_sample": True, "top_k": 0, "max_new_tokens": length}
        done = model.generate(ids, output_logits=True, return_dict_in_generate=True, **given)
        rows.append(torch.cat(done.logits))
    p = torch.cat(rows).float().softmax(-1).sort(-1, descending=True).values.numpy()
    entropies = -(p * np.log(np.maximum(p, 1e-45))).sum(1)
    return Contexts(p, np.cumsum(p, 1, dtype=np.float64).astype(np.float32), entropies)


def samplers(c: Contexts) -> dict[str, Floats]:
    """Return the probabilities [n, V], up to a factor, that samplers draw with."""
    made = {"right": c.p}
    made |= {f"top-p {mass}": np.where(c.reached - c.p < mass, c.p, 0) for mass in (0.9, 0.95, 0.98, 0.99)}
    made |= {"top-k 50": np.where(np.arange(c.p.shape[1]) < 50, c.p, 0)}
    made |= {"min-p 0.02": np.where(c.p >= np.float32(0.02) * c.p[:, :1], c.p, 0)}
    return made | {f"temperature {t}": c.p ** np.float32(1 / t) for t in (0.9, 0.95, 1.05)}


def found(c: Contexts, sampler: Floats, tokens: int, dumps: int) -> float:
    """Return the share of simulated dumps of a sampler whose draws are judged wrong."""
    sums, rng, wrong = np.cumsum(sampler, 1), np.random.default_rng(tokens), 0
    for seed in range(dumps):
        rows = rng.integers(0, len(c.p), tokens)
        at = rng.random(tokens) * sums[rows, -1]
        drawn = np.array([np.searchsorted(sums[row], u, side="right") for row, u in zip(rows, at, strict=True)])
        drawn = drawn.clip(0, c.p.shape[1] - 1)
        logprobs = np.log(np.maximum(c.p[rows, drawn], 1e-45))
        wrong += draws_of(logprobs, c.entropies[rows], np.arange(tokens) // 50, c.reached[rows, drawn], seed).is_wrong
    return wrong / dumps


@program
def main(given: Sequence[str] | None) -> None:
    parser = Parser(prog="python -m experiments.benchmarks.draws", description=__doc__)
    parser.add_argument("model", type=Path, help="a transformers folder with a chat template")
    parser.add_argument("--length", type=int, default=100, help="tokens of an answer")
    parser.add_argument("--dumps", type=int, default=20, help="simulated dumps of each wrong sampler and size")
    parser.add_argument("--right", type=int, default=1000, help="simulated dumps of the right sampler")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="tokens of a dump")
    options = parser.parse_args(given)
    contexts = contexts_of(*load_folder(options.model), options.length)
    quartiles = ", ".join(f"{x:.2f}" for x in np.quantile(contexts.entropies, (0.25, 0.5, 0.75)))
    tell(f"{len(contexts.p)} contexts, entropies {quartiles} nats at the quartiles")
    tell(f"| sampler | {' | '.join(f'{tokens:,}' for tokens in options.tokens)} |\n|---|{'---|' * len(options.tokens)}")
    for name, sampler in samplers(contexts).items():
        dumps = options.right if name == "right" else options.dumps
        shares = [found(contexts, sampler, tokens, dumps) for tokens in options.tokens]
        tell(f"| {name} | {' | '.join(f'{share:g}' for share in shares)} |")


if __name__ == "__main__":
    sys.exit(main())
