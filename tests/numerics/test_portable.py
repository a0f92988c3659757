"""No operation of an exact run is one that CUDA computes otherwise than a CPU, in the eager specification."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ppo_repro.config.files import load_config
from ppo_repro.numerics.arithmetic import elementwise
from ppo_repro.watcher import Silent
from tests.support.language import run
from tests.support.paths import TINY
from tests.support.portable import WatchedOperations

# float64 and stock torch beside the exact model; shapes without numbers; transformers' own first weights, which are
# replaced; rotary tables: made on the CPU when a model is loaded
EXEMPT = ("accuracy/", "plan/", "models/tiny.py", "numerics/layers/rotary.py")
# nothing is a power of two, by which every division is exact
ODD = (
    "layout.backend=eager", "model.hidden_size=24", "model.intermediate_size=40", "model.warm_start_steps=2",
    "rollout.temperature=0.7", "ppo.iterations=1", "ppo.epochs=1",
)  # fmt: skip
VARIANTS = {
    "clipped": (),
    "top-p": ("rollout.top_p=0.9", "rollout.top_k=5", "ppo.aggregation=sequence_mean", "kl.estimator=k3"),
    "groups": (
        *("advantages={kind: group}", "value={kind: none}"),
        *("kl={placement: loss, estimator: exact}", "records.level=deep"),
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_operation_of_a_run_is_the_same_on_cuda(variant: str, tmp_path: Path) -> None:
    config = load_config(TINY, [*ODD, *VARIANTS[variant]])
    with WatchedOperations(EXEMPT) as watched:
        run(config, tmp_path, Silent())
    assert watched.others == set()


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x / 3.0,
        lambda x: torch.exp(x),
        lambda x: torch.add(x, x, alpha=0.3),
        lambda x: torch.addcmul(x, x, x),
        lambda x: x.sum(),
        lambda x: x.lerp_(x, 0.5),
    ],
)
def test_what_cuda_computes_otherwise_is_noticed(operation) -> None:  # type: ignore[no-untyped-def]
    with WatchedOperations() as watched:
        operation(torch.ones(3))
    assert len(watched.others) == 1 and "test_portable.py" in next(iter(watched.others))


def test_a_division_by_a_tensor_is_not() -> None:
    x = torch.tensor([1.0, 5.0, 7.0])
    with WatchedOperations() as watched:
        divided = elementwise.divided(x, 3.0)
    assert watched.others == set() and torch.equal(divided, torch.tensor([1 / 3, 5 / 3, 7 / 3]))
