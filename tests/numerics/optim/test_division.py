"""Optimizers whose state processes divide (ZeRO): the bits of one process, and fewer bytes in each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ppo_repro.buffers import TensorGradient
from ppo_repro.errors import NumericsError
from ppo_repro.numerics import backend, gradients
from ppo_repro.numerics.layers.linear import ExactLinear
from ppo_repro.numerics.optim.adamw import AdamWSettings, OptimizerState, exact_norm, exact_norms
from ppo_repro.numerics.optimizer import ExactOptimizer, weights_digest
from ppo_repro.numerics.pieces import WHOLE, Divided, Division
from ppo_repro.numerics.sharding.tensor_file import write_tensors
from ppo_repro.ranks import ALONE, Ranks
from tests.support.models import seeded
from tests.support.thread_ranks import in_threads

SETTINGS = AdamWSettings(1e-2, 0.9, 0.95, 1e-8, 0.1, 1.0)
MESHES = [(2, 1), (2, 2), (3, 1), (3, 2), (5, 2)]
TOKENS = 24


def model() -> nn.Module:
    """Sizes that no number of processes divides, and a bias that is smaller than five processes."""
    layers = [nn.Linear(7, 5), nn.Linear(5, 3)]
    with torch.no_grad():
        for i, p in enumerate(p for layer in layers for p in layer.parameters()):
            p.copy_(torch.randn(p.shape, generator=seeded(i)))
    return nn.Sequential(*(ExactLinear(layer, f"layer {i}") for i, layer in enumerate(layers)))


def backward_of(module: nn.Module, ranks: Ranks, step: int) -> Callable[[], None]:
    """The share of a rank of TOKENS tokens: unequal shares, and none at all for the last of three or more."""
    shares = [3, *[1] * (ranks.size - 2), 0] if ranks.size > 2 else [3, 1][: ranks.size]
    mine = slice(ranks.mine(TOKENS, shares).start, ranks.mine(TOKENS, shares).stop)
    x, target = (torch.randn(TOKENS, n, generator=seeded(10 * step + n)) for n in (7, 3))

    def backward() -> None:
        if x[mine].numel():
            y = module(x[mine])
            torch.autograd.backward(y, (y.detach() - target[mine]) * 3.0**step)

    return backward


@dataclass(frozen=True)
class Trained:
    """What some steps leave."""

    weights: str
    norms: list[float]
    tensors: list[tuple[TensorGradient, ...]]
    state: OptimizerState  # of whole tensors
    moments: int  # bytes held
    sums: int


def whole(state: OptimizerState) -> OptimizerState:
    def of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        held = {n: state.division.held(t, state.shapes.get(n, t.shape)) for n, t in tensors.items()}
        return {n: t.whole() if isinstance(t, Divided) else t.clone() for n, t in held.items()}

    return replace(state, first=of(dict(state.first)), second=of(dict(state.second)), shapes={}, division=WHOLE)


def bytes_of(tensors: dict[str, Tensor]) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors.values())


def train(ranks: Ranks, zero: int, start: tuple[dict[str, Tensor], OptimizerState] | None = None) -> Trained:
    module = model()
    optimizer = ExactOptimizer(module, SETTINGS, Division(ranks, zero))
    if start is not None:
        module.load_state_dict(start[0])
        optimizer.load(start[1])
    reports = [optimizer.step(backward_of(module, ranks, step), TOKENS, ranks, by_tensor=True) for step in range(3)]
    return Trained(
        weights_digest(module.named_parameters()),
        [r.grad_norm for r in reports],
        [r.gradients for r in reports],
        whole(optimizer.state()),
        bytes_of({**{f"1{n}": t for n, t in optimizer.adamw.first.items()}, **optimizer.adamw.second}),
        bytes_of(optimizer.accumulator._sums_memory),
    )


def same(a: OptimizerState, b: OptimizerState) -> bool:
    pairs = [(a.first[n], b.first[n]) for n in a.first] + [(a.second[n], b.second[n]) for n in a.second]
    return all(torch.equal(x.view(torch.int32), y.view(torch.int32)) for x, y in pairs) and (
        (a.grids, a.beta1_power, a.beta2_power) == (b.grids, b.beta1_power, b.beta2_power)
    )


@pytest.fixture(autouse=True)
def eager() -> None:
    backend.use("eager", 1)


@pytest.mark.parametrize(("size", "zero"), MESHES)
def test_every_mesh_has_the_bits_of_one_process(size: int, zero: int) -> None:
    alone = train(ALONE, 0)
    for found in in_threads(size, lambda ranks: train(ranks, zero)):
        assert (found.weights, found.norms, found.tensors) == (alone.weights, alone.norms, alone.tensors)
        assert same(found.state, alone.state)


@pytest.mark.parametrize("size", [2, 3])
def test_long_steps_have_the_bits_of_one_process(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = train(ALONE, 0)
    monkeypatch.setattr(gradients, "SUM_BITS", 50)  # a lower limb holds a few terms only
    monkeypatch.setattr(gradients, "PIECE", 1)
    for found in in_threads(size, lambda ranks: train(ranks, 2)):
        assert (found.weights, found.norms) == (alone.weights, alone.norms)


def test_gradients_added_in_float32_leave_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the same division with sums that are rounded to float32 where they are added."""

    def rounded(tensors: list[Tensor], ranks: Ranks, apart: bool) -> None:
        for i, tensor in enumerate(tensors):
            gathered = ranks.gather([tensor.to(torch.float32)])
            total = gathered[0].clone()
            for other in gathered[1:]:
                total += other
            tensors[i] = Division(ranks, 1).own(total.to(torch.int64).contiguous())

    alone = train(ALONE, 0)
    monkeypatch.setattr(gradients, "add_up_pieces", rounded)
    for found in in_threads(2, lambda ranks: train(ranks, 1)):
        assert found.weights != alone.weights
        # an error of float32, not another computation
        assert found.norms == pytest.approx(alone.norms, rel=1e-5)


@pytest.mark.parametrize(("size", "zero"), [(2, 1), (2, 2), (3, 2)])
def test_each_process_holds_its_part_of_the_bytes(size: int, zero: int) -> None:
    alone, together = train(ALONE, 0), in_threads(size, lambda ranks: train(ranks, 0))
    numbers = sum(p.numel() for p in model().parameters())
    tensors = len(list(model().parameters()))
    assert alone.moments == 8 * numbers and alone.sums == 8 * numbers
    assert [t.moments for t in together] == [alone.moments] * size, "without zero nothing is divided"
    divided = in_threads(size, lambda ranks: train(ranks, zero))
    assert sum(t.moments for t in divided) == alone.moments, "every number is held once"
    assert max(t.moments for t in divided) <= alone.moments // size + 8 * tensors
    assert {t.sums for t in divided} == {alone.sums if zero == 1 else 0}


@pytest.mark.parametrize(("before", "after"), [((1, 0), (3, 2)), ((3, 1), (1, 0)), ((2, 2), (3, 1))])
def test_a_state_goes_on_under_another_mesh(before: tuple[int, int], after: tuple[int, int]) -> None:
    def run(mesh: tuple[int, int], start: tuple[dict[str, Tensor], OptimizerState] | None) -> Trained:
        size, zero = mesh
        return train(ALONE, 0, start) if size == 1 else in_threads(size, lambda ranks: train(ranks, zero, start))[0]

    weights = {n: p.detach().clone() for n, p in model().named_parameters()}
    expected = run((1, 0), (weights, run((1, 0), None).state))
    found = run(after, (weights, run(before, None).state))
    assert (found.weights, found.norms) == (expected.weights, expected.norms) and same(found.state, expected.state)


def test_a_state_of_other_shapes_is_refused() -> None:
    state = train(ALONE, 0).state
    turned = replace(state, first={n: t.t().contiguous() if t.dim() == 2 else t for n, t in state.first.items()})
    for division in (WHOLE, Division(Ranks(0, 2), 1)):
        with pytest.raises(ValueError, match=r"tensor 0.weight is torch.float32 \[7, 5\], expected .* \[5, 7\]"):
            ExactOptimizer(model(), SETTINGS, division).load(turned)


def test_a_file_of_divided_tensors_has_the_bytes_of_whole_ones(tmp_path: object) -> None:
    from pathlib import Path

    folder = Path(str(tmp_path))
    tensors = {"b": torch.randn(3, 5, generator=seeded(1)), "a": torch.randn(7, generator=seeded(2))}
    expected = write_tensors(folder / "whole", tensors)

    def work(ranks: Ranks) -> str:
        held = {n: Division(ranks, 1).held(Division(ranks, 1).own(t), t.shape) for n, t in tensors.items()}
        return write_tensors(folder / f"rank {ranks.rank}", held)

    assert in_threads(3, work) == [expected] * 3
    assert (folder / "rank 0").read_bytes() == (folder / "whole").read_bytes()


def test_the_norm_of_pieces_is_that_of_the_whole_and_near_float64() -> None:
    rng = np.random.default_rng(0)
    tensors = [torch.from_numpy(rng.standard_normal(n).astype(np.float32) * 10.0**-n) for n in (1, 4, 33, 100)]
    expected = exact_norms(tensors)
    found = in_threads(3, lambda ranks: exact_norms([Division(ranks, 1).own(t) for t in tensors], ranks))
    assert found == [expected] * 3
    # each number is rounded to 2^-27 of its tensor's largest
    assert expected[0] == pytest.approx(float(torch.cat(tensors).double().norm()), rel=2.0**-24)
    assert expected[1] == [exact_norm([t]) for t in tensors]


def test_a_gradient_that_is_not_finite_is_told_on_every_rank() -> None:
    def work(ranks: Ranks) -> str:
        gradient = torch.tensor([1.0, float("nan")])
        with pytest.raises(NumericsError, match="not finite"):
            exact_norm([Division(ranks, 1).own(gradient)], ranks)
        return "told"

    assert in_threads(2, work) == ["told"] * 2
