"""What `device` compares: digests of every stage of exact numerics, computed on one device by one backend."""

from __future__ import annotations

import hashlib
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.benchmarks import device_speed
from ppo_repro.models.batches import TokenBatch, lay_out
from ppo_repro.models.lora import add_lora
from ppo_repro.models.lora_optimizer import make_lora_optimizer
from ppo_repro.models.networks import make_policy, policy_logits
from ppo_repro.numerics.arithmetic.elementwise import exp, log
from ppo_repro.numerics.device import moved
from ppo_repro.numerics.layers.kv_cache import GridCache
from ppo_repro.numerics.logprobs import token_statistics
from ppo_repro.numerics.optim.optimizer import AdamWSettings, make_optimizer
from ppo_repro.numerics.proof import cases
from ppo_repro.numerics.trunk.forward import TrunkForward


def _small_models() -> Any:
    """The module `ppo_repro.testing.small_models` by its file: its package needs pytest, which may be missing."""
    found = importlib.util.find_spec("ppo_repro")
    assert found is not None and found.submodule_search_locations
    path = Path(found.submodule_search_locations[0], "testing", "small_models.py")
    spec = importlib.util.spec_from_file_location("small_models", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_models = _small_models()
CONTEXT, VOCAB = int(_models.CONTEXT), int(_models.VOCAB)
CONFIGS = {**_models.CONFIGS, **_models.MIXTURES}
SETTINGS = AdamWSettings(1e-3, 0.9, 0.95, 1e-8, 0.01, 1.0)
Compute = Callable[[torch.device], dict[str, str]]


@dataclass(frozen=True)
class Work:
    """How much is compared."""

    families: tuple[str, ...]  # of `testing.small_models`, the most used first
    proofs: tuple[str, ...]  # of the cases by which backends prove themselves
    steps: int  # of the optimizer
    sequences: int  # of a batch
    elements: int  # of elementary functions
    tokens: int  # decoded and computed in one pass
    iterations: int  # of the quickstart; 0 leaves it out
    speed: device_speed.Scale


WHOLE = Work(tuple(CONFIGS), tuple(cases.CASES), 4, 9, 1_000_001, 1 << 20, 2, device_speed.WHOLE)
SMALL = Work(("llama",), ("optimizer",), 1, 2, 1_001, 64, 0, device_speed.SMALL)


def digest(*tensors: Tensor) -> str:
    """First 16 hex digits of the SHA-256 of the raw bits."""
    h = hashlib.sha256()
    for t in tensors:
        h.update(t.detach().cpu().contiguous().numpy().tobytes())
    return h.hexdigest()[:16]


def elementary(work: Work, place: torch.device) -> dict[str, str]:
    """Digests of the elementary functions on many numbers; the library's exp promises nothing."""
    x = torch.linspace(-90.0, 90.0, work.elements).to(place)
    return {"exp": digest(exp(x)), "log": digest(log(x.double().abs() + 0.5)), "torch.exp": digest(torch.exp(x))}


def proven(case: str, place: torch.device) -> dict[str, str]:
    """The digest of a case by which backends prove themselves."""
    return {f"proof: {case}": digest(*cases.CASES[case](place))}


def _batches(work: Work, parts: int) -> list[TokenBatch]:
    generator = torch.Generator().manual_seed(0)
    longest = 30 if work.sequences > 2 else 6
    lengths = torch.randint(2, longest, (work.sequences, 2), generator=generator).tolist()
    pairs = [[torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in pair] for pair in lengths]
    groups = [pairs[i::parts] for i in range(parts)]
    return [lay_out([p for p, _ in some], [r for _, r in some], "right") for some in groups if some]


def trained(
    family: str, work: Work, place: torch.device, mode: str = "exact", parts: int = 1, rank: int = 0
) -> dict[str, str]:
    """Digests of log-probs and entropies, and of all weights after each optimizer step, in micro-batches or adapters.

    `parts`: micro-batches that the sequences are dealt to; log-probs are digested where there is one. `rank`: of LoRA,
    0 trains all weights.
    """
    policy = moved(make_policy(_models.small_model(CONFIGS[family](), seed=0), mode, CONTEXT), place)
    lora = add_lora(policy, rank, 2.0 * rank, (), 0) if rank else None
    optimizer = make_lora_optimizer(policy, lora, SETTINGS) if lora else make_optimizer(policy, SETTINGS, mode)
    batches, digests = _batches(work, parts), dict[str, str]()
    count = sum(len(batch.targets) for batch in batches)

    def backward() -> None:
        for batch in batches:
            logprobs, entropies = token_statistics(policy_logits(policy, batch), batch.targets, 1.0, None, mode)
            if parts == 1:
                digests.setdefault("log-probs and entropies", digest(logprobs, entropies))
            loss = -logprobs - entropies * 0.01
            torch.autograd.backward(loss, torch.full_like(loss, 1.0 / count))

    for step in range(work.steps):
        optimizer.step(backward, sum(batch.real_tokens for batch in batches))
        digests[f"weights after step {step + 1}"] = digest(*policy.parameters())
    return digests


@torch.no_grad()
def parity(family: str, work: Work, place: torch.device, until: float) -> tuple[int, int]:
    """How many tokens have other hidden states over a cache, in two parts, than in one pass; and of how many.

    It ends at `until` on the clock of `time.perf_counter`, where that is before all tokens are compared.
    """
    policy = moved(make_policy(_models.small_model(CONFIGS[family](), seed=0), "exact", CONTEXT), place)
    length = min(CONTEXT, work.tokens // 2)
    rows, cut, unequal, compared = min(512, work.tokens // length), length - length // 4, 0, 0
    cache = GridCache(policy.config, rows, CONTEXT, place)
    trunk = TrunkForward(policy.get_decoder())
    places, slots = torch.arange(length, device=place).expand(rows, -1), torch.arange(rows, device=place)
    generator = torch.Generator().manual_seed(1)
    while compared + rows * length <= work.tokens and not (compared and time.perf_counter() > until):
        ids = torch.randint(0, VOCAB, (rows, length), generator=generator).to(place)
        flat = torch.arange(rows * length, device=place)
        whole = trunk.over_batch(ids, places, torch.zeros_like(ids), flat).view(rows, length, -1)
        for part in (slice(0, cut), slice(cut, length)):
            cache.aim(slots, places[:, part], torch.ones_like(places[:, part], dtype=torch.bool))
            decoded = trunk.over_cache(ids[:, part], cache).view(rows, -1, whole.shape[-1])
            unequal += int((decoded.view(torch.int32) != whole[:, part].view(torch.int32)).any(-1).sum())
        compared += rows * length
    return unequal, compared
