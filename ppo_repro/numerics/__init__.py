"""Compute deterministic numerics: every sum in one fixed order, elementary functions operation by operation.

`from ppo_repro.numerics import exp, log, sigmoid, softplus, sqrt, tanh`: differentiable, for your own loss.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppo_repro.numerics.elementwise import differentiable_exp as exp
    from ppo_repro.numerics.elementwise import differentiable_log as log
    from ppo_repro.numerics.elementwise import differentiable_sigmoid as sigmoid
    from ppo_repro.numerics.elementwise import differentiable_softplus as softplus
    from ppo_repro.numerics.elementwise import differentiable_sqrt as sqrt
    from ppo_repro.numerics.elementwise import differentiable_tanh as tanh

__all__ = ["exp", "log", "sigmoid", "softplus", "sqrt", "tanh"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.elementwise"), f"differentiable_{name}")
