"""Does a server have the settings that the run needs? Read from the server, and kept for the records."""

from __future__ import annotations

from typing import Any

from ppo_repro.config.engine import SGLangServers
from ppo_repro.config.run import NumericsConfig
from ppo_repro.errors import UserError
from ppo_repro.rollout.sglang.client import get
from ppo_repro.rollout.sglang.command import RETURN_ROUTES, SPARE_CONTEXT
from ppo_repro.sglang_plugin.names import ARCHITECTURE, ATTENTION_BACKEND

# recorded of a server: everything that can change a number or explain a speed
RECORDED = (
    *("version", "launch_command", "attention_backend", "sampling_backend", "dtype", "kv_cache_dtype", "quantization"),
    *("enable_deterministic_inference", "rl_on_policy_target", "device", "tp_size", "context_length", "page_size"),
    *("max_total_num_tokens", "max_running_requests", "chunked_prefill_size", "disable_radix_cache"),
    *("disable_overlap_schedule", "speculative_algorithm", "json_model_override_args"),
)


def check_server(
    url: str, engine: SGLangServers, numerics: NumericsConfig, timeout: float, routes: bool = False
) -> dict[str, Any]:
    """The server's settings to record; UserError where it would not sample as the run needs it."""
    info = get(url, "/server_info", timeout)
    model = get(url, "/model_info", timeout)
    if "version" not in info or "is_generation" not in model:
        raise UserError(f"{url}: does not answer like an SGLang server")
    if info.get("enable_deterministic_inference") is not True:
        raise UserError(
            f"{url}: runs without --enable-deterministic-inference, so SGLang ignores every seed; start it with that"
        )
    if routes and info.get("enable_return_routed_experts") is not True:
        raise UserError(
            f"{url}: runs without {RETURN_ROUTES}, and records.level = deep and ppo.replay_routes need the routes of a "
            "mixture of experts; start it with that"
        )
    required: dict[str, Any] = {"sampling_backend": "pytorch", "speculative_algorithm": None}
    if engine.numerics == "deterministic":
        required |= {"attention_backend": ATTENTION_BACKEND, "dtype": "float32"}
        if model.get("architectures") != [ARCHITECTURE]:
            raise UserError(
                f"{url}: serves {model.get('architectures')}; rollout.engine.numerics = deterministic needs the plugin"
            )
    for name, value in required.items():
        if info.get(name) != value:
            raise UserError(f"{url}: has {name} = {info.get(name)!r}; must be {value!r}")
    context, max_context = info.get("context_length"), numerics.max_context
    if isinstance(context, int) and context < max_context + SPARE_CONTEXT:
        raise UserError(
            f"{url}: has --context-length {context}; must be at least numerics.max_context + {SPARE_CONTEXT} "
            f"= {max_context + SPARE_CONTEXT}, because SGLang reserves some of it"
        )
    return {name: info.get(name) for name in RECORDED} | {"architectures": model.get("architectures")}
