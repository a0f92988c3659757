"""A real model in a loop of one's own: what do exact gradients cost, and do micro-batches or padding change a bit?

`python -m experiments.benchmarks.library --model models/smollm2` takes four texts of 7 to 26 tokens through forward and
backward at once, in four passes and padded on the left, then samples and computes the log-probs again; stock torch on
the same weights is the control. One thread; seconds are of one go after a first one that compiled.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import ppo_repro

TEXTS = (
    "The capital of France is Paris.",
    "Water boils at one hundred degrees Celsius at sea level.",
    "2 + 2 = 4",
    "PPO clips the ratio of new and old probabilities, token by token, "
    "so that no single update moves the policy too far.",
)
PROMPTS = ("The capital of France is", "Water boils at", "Once upon a time")
LAYOUTS = {"at once": ("right", 4), "in 4 passes": ("right", 1), "padded left": ("left", 4)}


def gradients(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, padding_side: str, rows: int
) -> dict[str, Tensor]:
    """`.grad` of the mean loss over all labels, from passes of `rows` texts."""
    model.zero_grad(set_to_none=True)
    batch = tokenizer(list(TEXTS), return_tensors="pt", padding=True, padding_side=padding_side)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    labels = ids.masked_fill(mask == 0, -100)
    labels[torch.arange(len(ids)), mask.argmax(1)] = -100  # nothing predicts a first token
    items = torch.tensor(int((labels != -100).sum()))
    for i in range(0, len(ids), rows):
        part = slice(i, i + rows)
        model(ids[part], attention_mask=mask[part], labels=labels[part], num_items_in_batch=items).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def unequal(a: dict[str, Tensor], b: dict[str, Tensor]) -> int:
    """Elements that differ in any bit."""
    return sum(int((a[name].view(torch.int32) != b[name].view(torch.int32)).sum()) for name in a)


def timed(what: str, compute: Callable[[], Any]) -> Any:
    """Print wall and processor seconds."""
    wall, processor = time.perf_counter(), time.process_time()
    result = compute()
    print(f"{what}: {time.perf_counter() - wall:.1f} s, processor {time.process_time() - processor:.1f} s", flush=True)
    return result


def measure(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Gradients under every layout, then responses and their log-probs computed again."""
    first = gradients(model, tokenizer, "right", len(TEXTS))
    for layout, (side, rows) in LAYOUTS.items():
        found = timed(f"{name}, forward and backward {layout}", lambda: gradients(model, tokenizer, side, rows))  # noqa: B023
        print(f"  {unequal(first, found):,} of {sum(map(Tensor.numel, first.values())):,} elements of .grad differ")
        del found
    model.zero_grad(set_to_none=True)
    sampling = ppo_repro.Sampling(temperature=0.8, max_response_tokens=32)
    sampled = timed(f"{name}, generate", lambda: ppo_repro.generate(model, PROMPTS, sampling, tokenizer=tokenizer))
    differ = 0
    for response in sampled:
        tokens = torch.tensor([[*response.prompt_ids, *response.response_ids]])
        with torch.no_grad():
            again = ppo_repro.logprobs(model, tokens, temperature=0.8)[0, len(response.prompt_ids) :]
        differ += int((again != response.logprobs).sum())
    print(f"  {differ} of {sum(len(r.response_ids) for r in sampled)} log-probs differ from the sampler's")


def main() -> None:
    parser = argparse.ArgumentParser(description="exact gradients of a real model")
    parser.add_argument("--model", type=Path, required=True, help="folder of a model, such as `ppo-repro fetch` writes")
    folder = parser.parse_args().model
    torch.set_num_threads(1)
    stock = AutoModelForCausalLM.from_pretrained(
        folder, dtype="float32", trust_remote_code=False, use_safetensors=True
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    measure("exact", timed("exact()", lambda: ppo_repro.exact(stock, max_context=256)), tokenizer)
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB")
    measure("stock", stock, tokenizer)


if __name__ == "__main__":
    main()
