"""Compare sampling with `generate` of transformers: 32 prompts of 16 tokens, 64 new tokens each, no early stop.

`python -m experiments.benchmarks.rollout` interleaves the built-in engine in both numerics and stock `generate`
(float32, dynamic cache) in one process. The engines also return the log-prob of every token; `generate` only tokens.
With `--peers DIR`, llama.cpp takes part too (weights, keys and values in float32), in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel

from experiments.benchmarks import timing
from experiments.benchmarks.peers import environment, process
from experiments.benchmarks.timing import Cost, Measured
from experiments.benchmarks.workload import CONTEXT, RESPONSE, SEQUENCES, SIZES, Size, make_model, prompt_ids
from ppo_repro.base.mode import Mode
from ppo_repro.models.networks import make_policy
from ppo_repro.numerics import library
from ppo_repro.rollout.engine import Request, Sampling
from ppo_repro.rollout.torch_engine import TorchEngine

QUESTION = "rollout"
PEER = "transformers generate"
LLAMA_CPP = Path(__file__).parent / "peers" / "llama_sampling.py"
# of the largest logit, between llama.cpp and transformers: float32 sums of a few thousand terms in another order
SAME_LOGITS = 1e-4
SAMPLING = Sampling(temperature=1.0, top_k=0, top_p=1.0, max_response_tokens=RESPONSE)


def engine(
    model: PreTrainedModel, size: Size, mode: Mode, threads: int, sequences: int = SEQUENCES
) -> Callable[[], Cost]:
    """Return a function that samples once with the built-in engine; threads are set before the clock starts."""
    sampler = TorchEngine(make_policy(model, mode, CONTEXT), frozenset(), mode, CONTEXT, sequences, 0)
    requests = [Request(ids, seed) for seed, ids in enumerate(prompt_ids(size, sequences))]

    def work() -> None:
        completions = sampler.generate(requests, SAMPLING)
        assert sum(len(c.response_ids) for c in completions) == sequences * RESPONSE

    def run() -> Cost:
        library.use_threads(threads, mode == "native")
        return timing.cost_of(work)

    return run


def stock(model: PreTrainedModel, size: Size, threads: int, sequences: int = SEQUENCES) -> Callable[[], Cost]:
    """Return a function that runs `generate` once."""
    ids = torch.tensor(prompt_ids(size, sequences))
    mask = torch.ones_like(ids)

    def work() -> None:
        out = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=RESPONSE,
            max_new_tokens=RESPONSE,
            past_key_values=DynamicCache(config=model.config),
            pad_token_id=0,
        )
        assert out.shape == (sequences, CONTEXT)

    def run() -> Cost:
        torch.set_num_threads(threads)
        return timing.cost_of(work)

    return run


@contextmanager
def llama_cpp(python: Path, model: LlamaForCausalLM, size: Size) -> Iterator[Callable[[int], Cost]]:
    """Start llama.cpp in a process, and yield the function that samples all responses on a number of threads.

    Raises RuntimeError if its logits differ from transformers' logits, because it would compute another model.
    """
    prompts = prompt_ids(size, SEQUENCES)
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        model.save_pretrained(folder)
        (folder / "prompt_ids.json").write_text(json.dumps(prompts))
        with process.started([str(python), str(LLAMA_CPP), text, str(RESPONSE)], folder / "log") as peer:
            with torch.no_grad():
                expected = model(torch.tensor(prompts[:1])).logits[0, -1]
            error = float((torch.tensor(peer.answer()) - expected).abs().max() / expected.abs().max())
            if not error < SAME_LOGITS:
                raise RuntimeError(
                    f"logits of llama.cpp differ from those of transformers by {error:.1e} of the largest"
                )
            yield peer.step


def candidates(model: LlamaForCausalLM, size: Size, threads: int) -> dict[str, Callable[[], Cost]]:
    """Return all candidates in this process, with the same weights and prompts."""
    own = {mode: engine(model, size, mode, threads) for mode in ("deterministic", "native")}
    return {PEER: stock(model, size, threads), **own}


def measure(sizes: Sequence[str], threads: Sequence[int], rounds: int, python: Path | None = None) -> list[Measured]:
    """Measure every size with every number of threads; with llama.cpp if `python` is its environment's Python."""
    rows, tokens = [], SEQUENCES * RESPONSE
    for name in sizes:
        size, model = SIZES[name], make_model(SIZES[name])
        with ExitStack() as stack:
            peer = stack.enter_context(llama_cpp(python, model, size)) if python else None
            for count in threads:
                compared = candidates(model, size, count)
                if peer:
                    compared["llama.cpp"] = partial(peer, count)
                rows += timing.compared(QUESTION, size.name, count, tokens, timing.interleaved(compared, rounds), PEER)
    return rows


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Sampling with the built-in engine and with transformers generate.")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["small", "large"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--peers", type=Path, metavar="DIR", help="also llama.cpp, whose environment is made in DIR")
    timing.add_options(parser, rounds=5)
    arguments = parser.parse_args()
    python = environment.make_llama_cpp(arguments.peers / "llama_cpp") if arguments.peers else None
    rows = measure(arguments.sizes, arguments.threads, arguments.rounds, python)
    timing.report(rows, arguments.json)


if __name__ == "__main__":
    main()
