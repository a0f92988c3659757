"""The unmodified model of transformers with the weights of a policy, and any model in float64.

In float64 every number is: norms and rotary positions too, which transformers computes in float32 in every model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.models.gemma.modeling_gemma import GemmaTextScaledWordEmbedding


class _Widening(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        def wider(x: Any) -> Any:
            if isinstance(x, Tensor):
                return x.double() if x.dtype == torch.float32 else x
            if type(x) in (list, tuple):
                return type(x)(map(wider, x))
            return torch.float64 if x is torch.float32 else x

        call = Tensor.double if func is Tensor.float else func
        if getattr(func, "__name__", "") in ("__get__", "__set__"):  # attributes are of the tensor itself
            return call(*args, **(kwargs or {}))
        result = call(*map(wider, args), **{name: wider(x) for name, x in (kwargs or {}).items()})
        if isinstance(result, Tensor) and result.dtype == torch.float32:
            raise TypeError(f"{getattr(func, '__name__', func)} gave float32 inside a float64 model")
        return result


@contextmanager
def float64(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Let `model` compute in float64 throughout inside the block: float32 weights are widened where they are used.

    No weight is copied. Rotary frequencies, which transformers rounds to float32, are computed again. TypeError where
    a float32 result appears all the same.
    """
    before, narrow = torch.get_default_dtype(), dict[str, torch.nn.Module]()
    experts = getattr(model.config, "_experts_implementation", None)
    torch.set_default_dtype(torch.float64)
    try:
        model.config._experts_implementation = "eager"  # grouped products take no float64
        with _Widening():
            for name, module in list(model.named_modules()):
                if type(module).__name__.endswith("RotaryEmbedding") and hasattr(module, "config"):
                    narrow[name] = module
                    model.set_submodule(name, type(module)(module.config).to(model.device))
            yield model
    finally:
        for name, module in narrow.items():
            model.set_submodule(name, module)
        model.config._experts_implementation = experts
        torch.set_default_dtype(before)


def stock_model(policy: PreTrainedModel) -> PreTrainedModel:
    """Return the unmodified model with the weights of `policy`, whose memory it shares: nothing may write to them."""
    config = copy.deepcopy(policy.config)
    config._attn_implementation = "sdpa"
    config._experts_implementation = "eager"
    config.pad_token_id = None  # a prompt may hold it, of which transformers would warn
    with torch.device("meta"):
        model = type(policy)(config)
    model.load_state_dict(policy.state_dict(), assign=True)
    for name, module in list(model.named_modules()):  # what no state holds
        if type(module).__name__.endswith("RotaryEmbedding"):
            model.set_submodule(name, type(module)(config))
        elif isinstance(module, GemmaTextScaledWordEmbedding):
            module.embed_scale = torch.tensor(module.scalar_embed_scale)
    return model.eval()
