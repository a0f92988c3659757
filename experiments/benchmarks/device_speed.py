"""How fast a device computes a model in exact numerics, beside stock torch in float32 and bfloat16."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2Model

from ppo_repro.models.networks import make_policy
from ppo_repro.numerics import backend
from ppo_repro.numerics.device import moved
from ppo_repro.numerics.gradients import GradientAccumulator
from ppo_repro.numerics.layers.kv_cache import GridCache
from ppo_repro.numerics.layers.lowering import attach
from ppo_repro.numerics.trunk.forward import TrunkForward

STOCK = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Scale:
    """The shape of the model, and how much it computes."""

    config: Qwen2Config
    sequences: int
    length: int
    slots: int  # of decoding, each with one new token after `length` others
    rounds: int


def qwen(layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, vocabulary: int) -> Qwen2Config:
    """A configuration of the structure of Qwen2.5."""
    return Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=1024, use_cache=False,
    )  # fmt: skip


WHOLE = Scale(qwen(24, 896, 14, 2, 4864, 151_936), 4, 512, 64, 3)  # the shape of Qwen2.5-0.5B
SMALL = Scale(qwen(1, 16, 2, 1, 24, 32), 1, 4, 2, 1)


@dataclass(frozen=True)
class Speed:
    """Median seconds of one execution."""

    work: str
    numerics: str
    tokens: int
    seconds: float


def _seconds(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    found = []
    for _ in range(rounds + 1):  # the first compiles
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return median(found[1:])


def _stock(model: PreTrainedModel, scale: Scale, device: torch.device, name: str) -> Iterator[Speed]:
    ids = torch.zeros(scale.sequences, scale.length, dtype=torch.int64, device=device)
    new = torch.zeros(scale.slots, 1, dtype=torch.int64, device=device)

    def forward() -> None:
        with torch.no_grad():
            model(input_ids=ids)

    def training() -> None:
        model(input_ids=ids).last_hidden_state.sum().backward()
        model.zero_grad()

    with torch.no_grad():
        start = torch.zeros(scale.slots, scale.length, dtype=torch.int64, device=device)
        cache = model(input_ids=start, use_cache=True).past_key_values

    def decode() -> None:
        with torch.no_grad():
            model(input_ids=new, past_key_values=cache, use_cache=True)
        cache.crop(scale.length)

    return _measured(name, scale, device, forward, training, decode)


def _measured(
    name: str,
    scale: Scale,
    device: torch.device,
    forward: Callable[[], None],
    training: Callable[[], None],
    decode: Callable[[], None],
) -> Iterator[Speed]:
    tokens = scale.sequences * scale.length
    kinds = (("decode", scale.slots, decode), ("forward", tokens, forward), ("forward + backward", tokens, training))
    for work, count, run in kinds:
        yield Speed(work, name, count, _seconds(run, device, scale.rounds))


def _exact(source: PreTrainedModel, scale: Scale, device: torch.device, kernels: str) -> Iterator[Speed]:
    context = scale.length + 1
    trunk = moved(make_policy(source, "exact", context), device)
    accumulator = GradientAccumulator(trunk.named_parameters())
    attach(trunk, accumulator)
    count = scale.sequences * scale.length
    ids = torch.zeros(scale.sequences, scale.length, dtype=torch.int64, device=device)
    positions = torch.arange(scale.length, device=device).expand_as(ids)
    rows = torch.arange(count, device=device)
    cache = GridCache(trunk.config, scale.slots, context, device)
    slots = torch.arange(scale.slots, device=device)

    def forward() -> None:
        with torch.no_grad():
            TrunkForward(trunk).over_batch(ids, positions, torch.zeros_like(ids), rows)

    def training() -> None:
        accumulator.begin()
        TrunkForward(trunk).over_batch(ids, positions, torch.zeros_like(ids), rows).sum().backward()

    def over_cache(first: int, last: int) -> None:
        places = torch.arange(first, last, device=device).expand(scale.slots, -1)
        cache.aim(slots, places, torch.ones_like(places, dtype=torch.bool))
        TrunkForward(trunk).over_cache(torch.zeros_like(places), cache)

    backend.use(kernels, 1)
    over_cache(0, scale.length)
    return _measured(
        f"exact, {kernels}", scale, device, forward, training, lambda: over_cache(scale.length, scale.length + 1)
    )


def speeds(scale: Scale, device: torch.device, numerics: str) -> Iterator[Speed]:
    """One step of decoding, forward, forward + backward: in exact numerics by `eager` or `triton`, or by stock torch in
    `float32` (without TF32) or `bfloat16`.
    """
    torch.manual_seed(0)  # weights of any size compute equally fast
    source = Qwen2Model(scale.config).float().eval()
    if numerics in STOCK:
        yield from _stock(moved(source.to(STOCK[numerics]), device), scale, device, f"torch {numerics}")
        return
    try:
        yield from _exact(source, scale, device, numerics)
    finally:
        backend.use("eager", 1)


def table(found: list[Speed]) -> str:
    """Tokens per second, and seconds over those of torch's float32 and bfloat16; `-` where those were not measured."""
    lines = [f"{'work':<22}{'numerics':<18}{'seconds':>10}{'tokens / s':>14}{'/ float32':>11}{'/ bfloat16':>12}"]
    for row in sorted(found, key=lambda row: row.work):
        ratios = [_ratio(row, found, f"torch {name}") for name in STOCK]
        lines.append(
            f"{row.work:<22}{row.numerics:<18}{row.seconds:>10.4f}{row.tokens / row.seconds:>14.0f}"
            f"{ratios[0]:>11}{ratios[1]:>12}"
        )
    return "\n".join(lines)


def _ratio(row: Speed, found: list[Speed], name: str) -> str:
    own = [other.seconds for other in found if other.work == row.work and other.numerics == name]
    return f"{row.seconds / own[0]:.2f}" if own else "-"
