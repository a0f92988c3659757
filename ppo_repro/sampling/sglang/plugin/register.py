"""Define the entry point that each process of SGLang calls before it parses arguments.

The entry point adds names and wraps two functions. It changes no server without `--attention-backend ppo_repro`. SGLang
logs and ignores every exception of a plugin. So a failure must show later: without the names the server refuses to
start, and `attention.make_backend` checks everything else.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ppo_repro.sampling.sglang.plugin.names import ARCHITECTURES, ATTENTION_BACKEND

if TYPE_CHECKING:
    import torch
    from sglang.srt.layers.sampler import Sampler

BATCH_INVARIANT_MODE = "sglang.srt.model_executor.model_runner.ModelRunner.maybe_enable_batch_invariant_mode"
SUPPORT_TRITON = "sglang.srt.utils.common.support_triton"


def register() -> None:
    """Make `--attention-backend ppo_repro` and its model class known to this process."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.layers.sampler import register_sampler_backend
    from sglang.srt.models.registry import ModelRegistry
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from ppo_repro.sampling.sglang.plugin.attention import make_backend
    from ppo_repro.sampling.sglang.plugin.model import PpoReproForCausalLM

    choices.add_attention_backend_choices([ATTENTION_BACKEND])
    choices.add_deterministic_attention_backend_choices([ATTENTION_BACKEND])
    choices.add_radix_supported_deterministic_attention_backend_choices([ATTENTION_BACKEND])
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        # SGLang has no batch-invariant kernels for a CPU; its seeded sampler, which comes with the mode, needs none
        choices.add_deterministic_attention_backend_choices(["torch_native"])
        from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

        ALLOC_MEMORY_FUNCS["cpu"] = _plain_memory
    register_attention_backend(ATTENTION_BACKEND)(make_backend)
    # deterministic mode forces the sampling backend of this name; a registered one has priority over the built-in one
    register_sampler_backend("pytorch", _make_sampler)
    ModelRegistry.models.update(dict.fromkeys(ARCHITECTURES.values(), PpoReproForCausalLM))
    HookRegistry.register(BATCH_INVARIANT_MODE, _without_kernels, HookType.AROUND)
    HookRegistry.register(SUPPORT_TRITON, _no_triton, HookType.AROUND)


def is_asked_for() -> bool:
    """Return whether this server was started with deterministic numerics."""
    from sglang.srt.runtime_context import get_server_args

    return bool(get_server_args().attention_backend == ATTENTION_BACKEND)


def _make_sampler() -> Sampler:
    from sglang.srt.layers.sampler import Sampler

    from ppo_repro.sampling.sglang.plugin.sampler import DeterministicSampler

    return DeterministicSampler() if is_asked_for() else Sampler()


def _plain_memory(dims: tuple[int, ...], dtype: torch.dtype, device: str, *_: Any, **__: Any) -> torch.Tensor:
    """Allocate memory for a server's numbers per token. SGLang's function would need a CUDA driver."""
    import torch

    return torch.empty(dims, dtype=dtype, device=device)


def _without_kernels(original: Callable[[Any], None], runner: Any) -> None:
    """Skip the batch-invariant kernels for torch's products in deterministic numerics, which do not use them."""
    if runner.device != "cpu" and not is_asked_for():
        original(runner)


def _no_triton(original: Callable[[str], bool], backend: str) -> bool:
    return backend != ATTENTION_BACKEND and original(backend)
