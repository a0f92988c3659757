"""The two homes of the KL estimators, for statistics and for losses, have one convention."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ppo_repro.ppo import kl as kl_of_losses
from ppo_repro.statistics import kl


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_an_estimator_is_the_same_function_in_numpy_and_in_torch(name: str) -> None:
    log_ratio = np.array([-2.0, -1e-3, 0.0, 0.5, 3.0])
    in_numpy, in_torch = getattr(kl, name)(log_ratio), getattr(kl_of_losses, name)(torch.from_numpy(log_ratio))
    assert in_numpy == pytest.approx(in_torch.numpy(), rel=1e-5)  # torch takes exp in float32
