"""PPO on language models whose runs are reproducible to the last bit.

The names below are loaded when they are first used. `import ppo_repro` alone loads neither torch nor pandas.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppo_repro.api.model import deterministic
    from ppo_repro.api.runs import Run, diff, open_run
    from ppo_repro.api.text import generate, logprobs
    from ppo_repro.api.training import train
    from ppo_repro.base.errors import UserError
    from ppo_repro.sampler import Sampling

__version__ = "0.3.0"

_HOMES = {
    "Run": "api.runs",
    "Sampling": "sampler",
    "UserError": "base.errors",
    "deterministic": "api.model",
    "diff": "api.runs",
    "generate": "api.text",
    "logprobs": "api.text",
    "open_run": "api.runs",
    "train": "api.training",
}

__all__ = [
    "Run",
    "Sampling",
    "UserError",
    "deterministic",
    "diff",
    "generate",
    "logprobs",
    "open_run",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value  # so that this function is asked once for each name
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
