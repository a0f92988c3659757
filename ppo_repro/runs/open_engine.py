"""The engine that a configuration asks for."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ppo_repro.config.rollout import SGLangServers
from ppo_repro.config.run import RunConfig
from ppo_repro.errors import UserError
from ppo_repro.models.networks import make_policy
from ppo_repro.numerics.families import routers
from ppo_repro.ranks import Ranks
from ppo_repro.rollout.engine import Engine
from ppo_repro.rollout.torch_engine import StockEngine, TorchEngine, in_dtype
from ppo_repro.watcher import Watcher


def check_routes(config: RunConfig, source: PreTrainedModel) -> None:
    """Raise UserError where a mixture of experts has stock servers, or a model without router is to replay routes."""
    kind, mixture, engine = type(source).__name__, bool(routers(source)), config.rollout.engine
    if mixture and isinstance(engine, SGLangServers) and engine.numerics == "stock":
        raise UserError(
            f"rollout.engine.numerics = stock: SGLang's own experts have not the weights of a {kind} here; set "
            "deterministic, or rollout.engine.kind = torch"
        )
    if config.ppo.replay_routes and not mixture:
        raise UserError(f"ppo.replay_routes = true: needs a mixture of experts, and {kind} has no router; remove it")


def require_same_sampler(recorded: RunConfig, config: RunConfig) -> None:
    """Raise UserError where the engine of `config` would sample other bits than the one of `recorded`.

    In deterministic numerics both programs give the same bits. In others the program, its device, its arguments and
    the number of servers that share its batches may each change a bit; addresses, transport and timeouts do not.
    """
    before, now = _sampler(recorded), _sampler(config)
    if before != now:
        raise UserError(
            f"rollout.engine: would sample with {now}, and the run samples with {before}, which gives other bits; "
            "leave rollout.engine as it is recorded, or use `ppo-repro run` for a run of its own"
        )


def _sampler(config: RunConfig) -> str:
    """What decides which bits are sampled, in words."""
    engine = config.rollout.engine
    if not isinstance(engine, SGLangServers):
        return f"{config.numerics.mode} numerics"
    if engine.numerics == "deterministic":
        return "deterministic numerics"
    if engine.urls:
        return f"SGLang's own numerics (servers that run already: {len(engine.urls)})"
    arguments = " ".join(engine.arguments) or "none"
    return f"SGLang's own numerics (servers: {engine.servers}, arguments: {arguments})"


def built_in_engine(
    config: RunConfig, source: PreTrainedModel, sampled: PreTrainedModel, end_tokens: frozenset[int]
) -> TorchEngine:
    """The built-in engine on the policy as the sampler has it, or on a stock copy of it."""
    mode, max_context, layout = config.numerics.mode, config.numerics.max_context, config.layout
    about = end_tokens, mode, max_context, layout.rollout_slots, layout.prefill_chunk, layout.prefix_cache
    stock = config.mismatch.sampler.stock
    if stock is None:
        return TorchEngine(sampled, *about)
    copy = in_dtype(make_policy(source, "native", max_context), getattr(torch, stock))
    return StockEngine(copy, sampled, *about)


@contextmanager
def rollout_engine(
    config: RunConfig, built_in: TorchEngine, folder: Path | None, watcher: Watcher, ranks: Ranks
) -> Iterator[Engine]:
    """`built_in`, or one of SGLang servers with its policy and end tokens; they end with the block.

    The first of several processes has the servers. `folder` is for their logs and notes; None for a temporary one.
    """
    settings = config.rollout.engine
    if not isinstance(settings, SGLangServers):
        yield built_in
        return
    from ppo_repro.rollout.sglang.engine import SharedEngine, sglang_engine

    if not ranks.is_first:
        yield SharedEngine(ranks, None)
        return
    with ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ppo-sglang-")))

        def waiting(seconds: int) -> None:
            watcher.servers(seconds, settings.timeout_s)

        about = config, settings, built_in.policy, built_in.stop_ids, folder, waiting
        servers = stack.enter_context(sglang_engine(*about))
        yield servers if ranks.size == 1 else SharedEngine(ranks, servers)
