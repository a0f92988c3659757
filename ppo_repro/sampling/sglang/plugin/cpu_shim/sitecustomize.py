"""Declare two operators of torchvision when an SGLang server starts on a CPU; a GPU server never imports this file.

SGLang imports torchvision. PyPI builds torchvision for CUDA, and its operators do not load beside a CPU torch. A text
model never calls them.
"""

from __future__ import annotations

import importlib.abc
import sys


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Import hook that declares, once, the operators without which `import torchvision` fails."""

    def __init__(self) -> None:
        self.library = None

    def find_spec(self, name, path, target=None):  # type: ignore[no-untyped-def]
        if name == "torchvision" and self.library is None:
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                self.library.define(f"{operator}(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
        return None  # another finder finds torchvision


sys.meta_path.insert(0, _BeforeTorchvision())
