"""The real model beside stock programs: `python -m experiments.smollm2.speed [--peers DIR]`.

Sampling beside `generate` of transformers, log-probs of given responses beside one stock forward pass, and with
`--peers` a small PPO step beside TRL's PPOTrainer, whose environment is made in DIR. Candidates take turns; prompts are
16 words, and nothing stops early.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from experiments.benchmarks import ppo_step, rollout, timing
from experiments.benchmarks.peers import environment
from experiments.benchmarks.timing import Cost, Measured
from experiments.benchmarks.workload import PROMPT, RESPONSE, SEQUENCES, Size, Work, prompt_ids
from ppo_repro.errors import UserError
from ppo_repro.models.batches import TokenBatch, lay_out
from ppo_repro.models.load import load_folder
from ppo_repro.models.networks import hidden_states, make_policy
from ppo_repro.numerics import library
from ppo_repro.numerics.families import trunk_of
from ppo_repro.numerics.network import logits
from ppo_repro.numerics.rows import Rows
from ppo_repro.numerics.token_statistics import token_statistics
from ppo_repro.seeding import permutation
from ppo_repro.stages.chunks import in_chunks

NAME = "SmolLM2-135M"
SIZE = Size(NAME, 30, 576, 1536, 3, 49_152)
STOCK = "transformers, one forward"
SMALL = Work(sequences=8, response=32, epochs=1)
PROMPTS = 64
FEW = 8  # responses that are sampled in one execution
LONG = (256, 384, 512, 1024)  # tokens of the long answers


def prompts_of(tokenizer: PreTrainedTokenizerBase, count: int) -> list[str]:
    """Texts of PROMPT words that are one token each, and that the tokenizer gives back as such."""
    words = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    words = [word[1:] for word in words if word[:1] == "Ġ" and len(word) > 4]
    words = [word for word in words if word.isascii() and word.isalpha()]
    rows = [permutation(len(words), "benchmark words", row)[:PROMPT] for row in range(count)]
    texts = ["".join(f" {words[i]}" for i in row) for row in rows]
    if any(len(tokenizer(text)["input_ids"]) != PROMPT for text in texts):
        raise UserError("--model: its tokenizer cuts words that are tokens; give what `ppo-repro fetch smollm2` writes")
    return texts


@torch.no_grad()
def score(policy: PreTrainedModel, batch: TokenBatch) -> None:
    """Log-probs and entropies of the tokens of a batch."""

    def of_rows(hidden: torch.Tensor, rows: slice, _: Rows) -> tuple[torch.Tensor, ...]:
        return token_statistics(logits(policy, hidden), batch.targets[rows], 1.0, None, "deterministic")

    found = in_chunks(of_rows, hidden_states(trunk_of(policy), batch), batch.rows, SIZE.vocabulary)
    assert len(found[0]) == len(batch.targets)


def scoring(model: PreTrainedModel, threads: int, lengths: Sequence[int]) -> dict[str, Callable[[], Cost]]:
    """Log-probs of responses of these lengths in one pass: stock rows are padded on the right, the kernels' are not."""
    flat = [token for row in prompt_ids(SIZE, sum(lengths) // PROMPT, 1) for token in row]
    ends = list(accumulate(lengths))
    answers = [flat[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    prompts, longest = prompt_ids(SIZE, len(lengths)), max(lengths)
    ids = torch.tensor([[*p, *a, *[0] * (longest - len(a))] for p, a in zip(prompts, answers, strict=True)])
    batch, policy = lay_out(prompts, answers), make_policy(model, "deterministic", PROMPT + longest)

    @torch.no_grad()
    def stock() -> None:
        found = model(ids[:, :-1], use_cache=False, logits_to_keep=longest).logits.log_softmax(-1)
        assert found.gather(-1, ids[:, PROMPT:, None]).numel() == len(lengths) * longest

    def run(work: Callable[[], None]) -> Cost:
        library.use_threads(threads)
        return timing.cost_of(work)

    return {STOCK: lambda: run(stock), "deterministic": lambda: run(lambda: score(policy, batch))}


def sampling(model: PreTrainedModel, threads: int) -> dict[str, Callable[[], Cost]]:
    """FEW responses of RESPONSE tokens, by `generate` and by the built-in engine."""
    return {
        rollout.PEER: rollout.stock(model, SIZE, threads, FEW),  # type: ignore[arg-type]
        "deterministic": rollout.engine(model, SIZE, "deterministic", threads, FEW),  # type: ignore[arg-type]
    }


QUESTIONS = {
    rollout.QUESTION: sampling,
    "scoring": partial(scoring, lengths=[RESPONSE] * SEQUENCES),
    "scoring, long answers": partial(scoring, lengths=LONG),
}
TOKENS = dict(zip(QUESTIONS, (FEW * RESPONSE, SEQUENCES * RESPONSE, sum(LONG)), strict=True))


def alone(folder: Path, asked: Sequence[str], threads: Sequence[int], rounds: int) -> Iterator[Measured]:
    """The questions that need no other program; the first candidate of each is the peer of the other."""
    model, _ = load_folder(folder)
    for question in asked:
        for count in threads:
            candidates = QUESTIONS[question](model, count)
            costs = timing.interleaved(candidates, rounds)
            yield from timing.compared(question, NAME, count, TOKENS[question], costs, next(iter(candidates)))


def beside_trl(python: Path, folder: Path, threads: Sequence[int], rounds: int) -> Iterator[Measured]:
    """A PPO step of SMALL size with all weights in training and a value model of its own."""
    _, tokenizer = load_folder(folder)
    with tempfile.TemporaryDirectory() as text:
        copy = Path(text) / "model"
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("SHA256SUMS"))  # a file is added
        lines = [json.dumps({"prompt": prompt, "answer": "none"}) for prompt in prompts_of(tokenizer, PROMPTS)]
        (copy / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        mine = ppo_step.own(copy, "deterministic", SMALL)
        with ppo_step.trl(python, copy, SMALL) as peer:
            for count in threads:
                candidates: dict[str, Callable[[], Cost]] = {
                    ppo_step.PEER: lambda count=count: peer(count),
                    "deterministic": lambda count=count: mine.step(count),
                }
                tokens = SMALL.sequences * SMALL.response
                costs = timing.interleaved(candidates, rounds)
                yield from timing.compared(ppo_step.QUESTION, NAME, count, tokens, costs, ppo_step.PEER)


def main(arguments: argparse.Namespace) -> int:
    """Prints the table; 2 and one line on a user error."""
    try:
        asked = [name for name in QUESTIONS if arguments.only in (None, name)]
        rows = list(alone(arguments.model, asked, arguments.threads, arguments.rounds))
        if arguments.only == ppo_step.QUESTION and arguments.peers is None:
            raise UserError(f"--only '{ppo_step.QUESTION}': needs --peers DIR, where the environment of TRL is made")
        if arguments.peers is not None and arguments.only in (None, ppo_step.QUESTION):
            python = environment.make(arguments.peers / "trl")
            rows += beside_trl(python, arguments.model, arguments.threads, arguments.rounds)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    timing.report(rows, arguments.json)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"), metavar="FOLDER")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="also beside TRL, whose environment is made in DIR")
    parser.add_argument("--only", choices=[*QUESTIONS, ppo_step.QUESTION], help="one question, not all")
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    timing.add_options(parser, rounds=2)
    sys.exit(main(parser.parse_args()))
