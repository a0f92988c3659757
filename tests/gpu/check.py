"""What the steps of `device_check` share: the two devices, a folder for runs, and a clock."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ppo_repro.base.watcher import Silent
from ppo_repro.config.files import load_config
from ppo_repro.numerics import devices, library
from ppo_repro.runs import run as runner
from ppo_repro.runs.language import LanguageKind
from tests.gpu.emulator.device import use_card
from tests.support.models import unequal as unequal_bits

Results = dict[str, Any]
DEVICES = {"cpu": "cpu", "card": "cuda"}  # of `layout.device`


class Check:
    """The GPU, and sizes: an emulated GPU computes small ones."""

    def __init__(self, stand_in: Path | None, folder: Path) -> None:
        self.emulated, self.folder = stand_in is not None, folder
        begin = time.perf_counter()
        self.card = devices.card() if stand_in is None else use_card(stand_in)
        self.opened = time.perf_counter() - begin
        self.threads = 1 if self.emulated else 8
        library.use_threads(self.threads)

    def device(self, place: str) -> torch.device:
        """Return the device of the `card` or of the `cpu`."""
        return devices.torch_device(DEVICES[place])

    def next_folder(self) -> Path:
        """Make an empty folder."""
        out = self.folder / str(len(list(self.folder.iterdir())))
        out.mkdir()
        return out

    def run(self, path: Path, place: str, *overrides: str) -> Path:
        """Compute a run on a device; return its folder."""
        config = load_config(path, [*overrides, f"layout.device={DEVICES[place]}"])
        return runner.run(LanguageKind(Silent()), config, self.next_folder())[0]

    def seconds(self, compute: Callable[[], Any], repeats: int = 3) -> float:
        """Return the seconds of a call, the least of some, after one that is not counted."""
        seconds = []
        for _ in range(repeats + 1):
            begin = time.perf_counter()
            compute()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)
        return min(seconds[1:])

    def free(self) -> None:
        """Free what the last step left on the GPU."""
        gc.collect()
        self.card.free_scratch()
        torch.cuda.empty_cache()


def unequal(a: Sequence[Tensor], b: Sequence[Tensor]) -> int:
    """Return how many numbers of pairs of tensors differ in a bit; of unequal shapes all do."""
    pairs = [(x.detach().cpu(), y.detach().cpu()) for x, y in zip(a, b, strict=True)]
    return sum(unequal_bits(x, y) if x.shape == y.shape else x.numel() for x, y in pairs)
