"""Steps of `device_check` that time the GPU in both precisions beside stock torch, float32 without TF32 and bfloat16.

Every time is in seconds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from ppo_repro.base.mode import Precision
from ppo_repro.base.processes import SLOTS
from ppo_repro.config.files import load_config
from ppo_repro.models.batches import TokenBatch, lay_out
from ppo_repro.models.networks import make_policy, policy_logits
from ppo_repro.numerics import library
from ppo_repro.numerics.adamw import AdamWSettings
from ppo_repro.numerics.linear import linear
from ppo_repro.numerics.matrices import PRECISIONS
from ppo_repro.numerics.optimizer import Optimizer
from ppo_repro.numerics.sequences import slots_of
from ppo_repro.numerics.token_sampling import sample_tokens
from ppo_repro.numerics.token_statistics import token_statistics
from ppo_repro.numerics.weights import weights_digest
from ppo_repro.runs.plan import plan_run
from ppo_repro.runs.summary import summarise
from ppo_repro.sampler import Request, Sampling
from ppo_repro.sampling.built_in import BuiltInSampler
from ppo_repro.tasks.tokenizer import character_tokenizer
from tests.gpu.check import Check, Results, unequal
from tests.support.paths import SMALL

VOCABULARY = 151936


def _shape(check: Check) -> Qwen3Config:
    """Return the shape of Qwen3-0.6B."""
    shape: dict[str, Any] = dict(
        vocab_size=VOCABULARY, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=4096, tie_word_embeddings=True, eos_token_id=1,
        pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    if check.emulated:
        shape |= dict(vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=1, head_dim=16)
    return Qwen3Config(**shape, dtype="float32")


def _stock(check: Check) -> PreTrainedModel:
    """Return an unmodified model of that shape with random weights, on the GPU."""
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.device(check.device("card")):
        return Qwen3ForCausalLM(_shape(check)).eval()


def _tokens(check: Check, sequences: int, length: int) -> list[list[int]]:
    vocabulary = 300 if check.emulated else VOCABULARY
    return torch.randint(0, vocabulary, (sequences, length), generator=torch.Generator().manual_seed(1)).tolist()


def _batch(sequences: list[list[int]]) -> TokenBatch:
    slots = slots_of(range(len(sequences)), len(sequences), SLOTS)
    return lay_out([s[:1] for s in sequences], [s[1:] for s in sequences], slots=slots)


def _logprobs(policy: PreTrainedModel, batch: TokenBatch) -> Tensor:
    return token_statistics(policy_logits(policy, batch), batch.targets, 1.0, None, "deterministic")[0]


def _policies(source: PreTrainedModel) -> Iterator[tuple[Precision, PreTrainedModel]]:
    """Make the policy of each precision, one after another."""
    for precision in PRECISIONS:
        yield precision, make_policy(source, "deterministic", 4096, precision)


def large(check: Check) -> Results:
    """Compare 256 log-probs of a model of Qwen3-0.6B's shape with the CPU's, in both precisions."""
    batch = _batch(_tokens(check, 2, 24 if check.emulated else 129))
    library.use_threads(1 if check.emulated else 16)
    results: Results = {"tokens": len(batch.targets), "differ": 0}
    with torch.no_grad():
        for precision, policy in _policies(_stock(check)):
            on_card = _logprobs(policy, batch)
            results[precision] = unequal([on_card], [_logprobs(copy.deepcopy(policy).to("cpu"), batch)])
            results["differ"] += results[precision]
    return results


def scoring(check: Check) -> Results:
    """Time the log-probs of 8 sequences of 1,023 tokens."""
    sequences = _tokens(check, 2 if check.emulated else 8, 20 if check.emulated else 1024)
    source, batch, ids = _stock(check), _batch(sequences), torch.tensor(sequences).to(check.device("card"))

    def stock(model: PreTrainedModel) -> Callable[[], Tensor]:
        return lambda: model(input_ids=ids[:, :-1]).logits.log_softmax(-1).gather(-1, ids[:, 1:, None])

    with torch.no_grad():
        in_bfloat16 = check.seconds(stock(copy.deepcopy(source).to(torch.bfloat16)))
        in_float32 = check.seconds(stock(source))
        ours = {name: check.seconds(lambda p=policy: _logprobs(p, batch)) for name, policy in _policies(source)}
    return {"tokens": len(batch.targets), **ours, "stock float32": in_float32, "stock bfloat16": in_bfloat16}


def _stock_step(check: Check, source: PreTrainedModel, ids: Tensor) -> float:
    """Return the seconds of an optimizer step of stock torch, in the dtype of the model."""
    optimizer = torch.optim.AdamW(source.parameters(), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        logits = source(input_ids=ids[:, :-1]).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].reshape(-1)).backward()
        torch.nn.utils.clip_grad_norm_(source.parameters(), 1.0)
        optimizer.step()

    seconds = check.seconds(step, 1)
    optimizer.zero_grad()
    return seconds


def training(check: Check) -> Results:
    """Time an optimizer step on 8 sequences of 1,023 tokens: forward and backward pass, AdamW; then its digest."""
    sequences = _tokens(check, 2 if check.emulated else 8, 20 if check.emulated else 1024)
    source, batch = _stock(check), _batch(sequences)
    ids = torch.tensor(sequences).to(check.device("card"))
    results: Results = {"tokens": len(batch.targets)}
    results["stock bfloat16"] = _stock_step(check, copy.deepcopy(source).to(torch.bfloat16), ids)
    check.free()
    results["stock float32"] = _stock_step(check, source, ids)
    for precision, policy in _policies(source):
        check.free()
        results[precision] = _step_seconds(check, policy, batch)
        free, everything = check.card.free_bytes()
        results[f"bytes in use, {precision}"] = everything - free
    results["digest of the weights"] = check.seconds(lambda: weights_digest(policy.named_parameters()), 1)
    return results


def _step_seconds(check: Check, policy: PreTrainedModel, batch: TokenBatch) -> float:
    settings = AdamWSettings(learning_rate=1e-6, beta1=0.9, beta2=0.98, eps=1e-8, weight_decay=0.01, max_grad_norm=1.0)
    optimizer = Optimizer(policy, settings, "deterministic")

    def backward() -> None:
        logprobs = _logprobs(policy, batch.with_sums(optimizer.sink))
        torch.autograd.backward(-logprobs, torch.full_like(logprobs, 1.0 / len(logprobs)))

    return check.seconds(lambda: optimizer.step(backward), 2)


def sampling(check: Check) -> Results:
    """Time 128 responses of 256 tokens beside `generate`, and the drawing of one token of each."""
    count, new = (2, 3) if check.emulated else (128, 256)
    source, prompts = _stock(check), _tokens(check, count, 16)
    ids = torch.tensor(prompts).to(check.device("card"))
    drawn, seeds = torch.randn(count, source.config.vocab_size, device=check.device("card")), torch.arange(count)

    def stock() -> None:
        source.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=True, top_k=0, pad_token_id=0)

    results: Results = {"tokens": count * new, "generate": check.seconds(stock, 1)}
    requests, settings = [Request(tuple(p), i) for i, p in enumerate(prompts)], Sampling(1.0, 0, 1.0, new, greedy=False)
    for precision, policy in _policies(source):
        engine = BuiltInSampler(policy, frozenset(), "deterministic", 512, count, 0)
        results[precision] = check.seconds(lambda e=engine: e.generate(requests, settings), 1)
    return {**results, "drawing one token each": check.seconds(lambda: sample_tokens(drawn, seeds, seeds, 1.0, None))}


# rows, terms, outputs: those of Qwen3-0.6B in training and in decoding
PRODUCTS = {
    "square": (4096, 4096, 4096),
    **{name: (8192, *shape) for name, shape in {"qkv": (1024, 4096), "up": (1024, 6144), "down": (3072, 1024)}.items()},
    "head": (2048, 1024, VOCABULARY),
    **{f"up, {rows} rows": (rows, 1024, 6144) for rows in (1, 16, 64, 256)},
    "head, 128 rows": (128, 1024, VOCABULARY),
}


def products(check: Check) -> Results:
    """Time products of matrices."""
    results: Results = {}
    for name, shape in PRODUCTS.items():
        rows, terms, outputs = (min(size, 130) for size in shape) if check.emulated else shape
        with torch.device(check.device("card")), torch.no_grad():
            layer, x = torch.nn.Linear(terms, outputs, bias=False), torch.randn(rows, terms)
            half, x_half = copy.deepcopy(layer).bfloat16(), x.bfloat16()
            times = {
                "stock float32": check.seconds(lambda layer=layer, x=x: layer(x)),
                "stock bfloat16": check.seconds(lambda layer=half, x=x_half: layer(x)),
            }
            for precision in PRECISIONS:
                times[precision] = check.seconds(lambda layer=layer, x=x, p=precision: linear(x, layer, precision=p))
        flops = 2e-12 * rows * terms * outputs
        results[name] = times | {f"TFLOP/s of {precision}": flops / times[precision] for precision in PRECISIONS}
        check.free()
    return results


def iteration(check: Check) -> Results:
    """Compute two iterations of PPO with a model of Qwen3-0.6B's shape: seconds by phase, memory beside the plan."""
    folder: Path = check.next_folder() / "model"
    _stock(check).to("cpu").save_pretrained(folder)
    character_tokenizer("0123456789+=").save_pretrained(folder)
    check.free()
    prompts, tokens, minibatch = (2, 6, 4) if check.emulated else (8, 256, 16)
    settings = (
        f"model={{kind: folder, path: '{folder}'}}", "value={kind: none}", "advantages={kind: group}",
        "kl={placement: loss}", "numerics.max_context=512", f"rollout.prompts_per_iteration={prompts}",
        "rollout.samples_per_prompt=4", f"rollout.max_response_tokens={tokens}", f"ppo.minibatch_size={minibatch}",
        "ppo.epochs=1", "ppo.iterations=2", "task.num_eval_prompts=2",
    )  # fmt: skip
    plan = plan_run(load_config(SMALL, [*settings, "layout.device=cuda"]))
    torch.cuda.reset_peak_memory_stats()
    figures = summarise(check.run(SMALL, "card", *settings)).figures
    without = summarise(check.run(SMALL, "card", *settings, "numerics.cross_check=0")).figures
    measured = {"peak of torch": torch.cuda.max_memory_allocated(), "planned": plan.peak, "rows": plan.rows}
    phases = {"phases": figures["seconds"], "phases without cross-check": without["seconds"]}
    return {"tokens": figures["tokens"], **phases, **measured}
