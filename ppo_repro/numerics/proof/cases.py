"""Fixed cases that every backend must compute with the bits of the eager code. They take about a second."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

from ppo_repro.numerics.device import moved
from ppo_repro.numerics.gradients import GradientAccumulator
from ppo_repro.numerics.layers.activations import ExactGELU
from ppo_repro.numerics.layers.kv_cache import GridCache
from ppo_repro.numerics.layers.linear import ExactLinear
from ppo_repro.numerics.layers.lowering import attach, lower
from ppo_repro.numerics.layers.norms import ExactLayerNorm
from ppo_repro.numerics.logprobs import score, token_statistics
from ppo_repro.numerics.optim.adamw import AdamWSettings, ExactAdamW, exact_norm
from ppo_repro.numerics.products import PreparedWeight
from ppo_repro.numerics.trunk.forward import TrunkForward

CONTEXT = 48
CPU = torch.device("cpu")

Case = Callable[[torch.device], list[Tensor]]


def _small_decoder() -> Qwen3Model:
    """Grouped-query attention, heads wider than a vector of the kernels, sizes that are no multiples of a tile."""
    config = Qwen3Config(
        vocab_size=61,
        hidden_size=72,
        intermediate_size=100,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=40,
        max_position_embeddings=CONTEXT,
    )
    model = Qwen3Model(config).float().eval()
    for number, parameter in enumerate(model.parameters()):
        parameter.data = _numbers(CPU, number, *parameter.shape) * 0.2 + (parameter.dim() == 1)
    return model


def _numbers(device: torch.device, seed: int, *shape: int) -> Tensor:
    """Normal numbers, the same on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def _with_outliers(x: Tensor) -> Tensor:
    """Rows with one number far above the others, and a row of zeros."""
    x[::3, x.shape[1] // 2] *= 1e4
    x[1] = 0.0
    return x


def _sums(accumulator: GradientAccumulator) -> list[Tensor]:
    """Integer gradients in the order of the parameters, then the float32 ones that take their place."""
    integers = [accumulator.sums[name].clone() for name in accumulator.parameters if name in accumulator.sums]
    return [*integers, *(accumulator.finish() or {}).values()]


def products(device: torch.device) -> list[Tensor]:
    """Products in both directions, short and long, with outliers and without."""
    results = []
    for rows, terms, columns in ((37, 200, 50), (5, 4200, 30), (56, 2100, 30)):
        x, w, bias = (
            _with_outliers(_numbers(device, 0, rows, terms)),
            _numbers(device, 1, columns, terms),
            _numbers(device, 2, columns),
        )
        w[::4, 3] = 1e3
        results += [PreparedWeight("case").contract(x, w, 1, bias), PreparedWeight("case").contract(x, w.t(), 0)]
    return results


def gradients(device: torch.device) -> list[Tensor]:
    """A linear layer and a layer norm behind an activation: gradients of the input and integer sums."""
    model = nn.Sequential(nn.Linear(70, 90), nn.GELU(), nn.LayerNorm(90))
    for number, parameter in enumerate(model.parameters()):
        parameter.data = _numbers(device, number, *parameter.shape) * 0.1
    layers = ExactLinear(model[0], "linear"), ExactGELU(), ExactLayerNorm(model[2], "norm")  # type: ignore[arg-type]
    accumulator = GradientAccumulator(nn.ModuleList(layers).named_parameters())
    for layer in layers:
        layer.accumulator = accumulator
    x = _with_outliers(_numbers(device, 9, 45, 70)).requires_grad_()
    for _ in range(2):  # the first backward finds the grids
        accumulator.begin()
        y = layers[2](layers[1](layers[0](x)))
        y.backward(_numbers(device, 10, *y.shape))
        sums = _sums(accumulator)
    assert x.grad is not None
    return [y.detach(), x.grad, *sums]


def statistics(device: torch.device) -> list[Tensor]:
    """Log-probs, entropies, divergences and their gradients, with all tokens eligible and with some."""
    logits, other, targets = _numbers(device, 0, 7, 131) * 3, _numbers(device, 1, 7, 131), torch.arange(7).to(device)
    eligible = _numbers(device, 2, 7, 131) > -0.5
    eligible[torch.arange(7).to(device), targets] = True
    results: list[Tensor] = []
    for mask in (None, eligible):
        scores = score(logits, other, targets, 0.7, mask, "exact")
        results += [scores.logprobs, scores.entropies, scores.prob_sq_sums, scores.ref_logprobs, scores.ref_kl]
        variable = logits.clone().requires_grad_()
        logprobs, entropies = token_statistics(variable, targets, 0.7, mask, "exact")
        (logprobs + 0.1 * entropies).sum().backward()
        assert variable.grad is not None
        results.append(variable.grad)
    return results


def _tokens(device: torch.device, rows: int) -> tuple[Tensor, Tensor]:
    """Rows of 30, and their positions."""
    ids = torch.randint(0, 61, (rows, 30), generator=torch.Generator().manual_seed(5))
    return ids.to(device), torch.arange(30).expand(rows, -1).to(device)


def training(device: torch.device) -> list[Tensor]:
    """A small model over a batch, with its gradients."""
    trunk = moved(lower(_small_decoder(), CONTEXT), device)
    accumulator = GradientAccumulator(trunk.named_parameters())
    attach(trunk, accumulator)
    (ids, positions), first_key = _tokens(device, 3), torch.zeros(3, 30, dtype=torch.int64).to(device)
    for _ in range(2):
        accumulator.begin()
        hidden = TrunkForward(trunk).over_batch(ids, positions, first_key, torch.arange(90).to(device))
        hidden.backward(_numbers(device, 6, *hidden.shape))
        sums = _sums(accumulator)
    return [hidden.detach(), *sums]


def decoding(device: torch.device) -> list[Tensor]:
    """The small model over a cache: a prompt, then one token of each row after the other."""
    rows = 8  # enough of them for the digits that are kept of weights
    trunk, (ids, positions) = moved(lower(_small_decoder(), CONTEXT), device), _tokens(device, rows)
    cache, forward = GridCache(trunk.config, rows, CONTEXT, device), TrunkForward(trunk)
    results = []
    for begin, end in ((0, 27), (27, 28), (28, 29), (29, 30)):
        valid = torch.ones(rows, end - begin, dtype=torch.bool).to(device)
        cache.aim(torch.arange(rows).to(device), positions[:, begin:end], valid)
        results.append(forward.over_cache(ids[:, begin:end], cache))
    return results


def optimizer(device: torch.device) -> list[Tensor]:
    """Steps of AdamW with the norm of their gradients."""
    parameters = {"a": nn.Parameter(_numbers(device, 0, 33, 7)), "b": nn.Parameter(_numbers(device, 1, 130))}
    adamw, settings = ExactAdamW(parameters), AdamWSettings(1e-2, 0.9, 0.95, 1e-8, 0.1, 1.0)
    for step in range(3):
        grads = {name: _numbers(device, step, *p.shape) * 10.0 ** (step - 1) for name, p in parameters.items()}
        adamw.apply(settings, grads, exact_norm(grads.values()))
    return [p.detach() for p in parameters.values()]


CASES: dict[str, Case] = {
    "products": products,
    "gradients": gradients,
    "log-probs": statistics,
    "decoding": decoding,
    "optimizer": optimizer,
    "training": training,
}
