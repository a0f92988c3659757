"""Where Numba keeps the machine code of kernels: found again by the text of the sources, not by place and date.

So one compilation serves every checkout, clone and environment of a machine that has the same sources.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numba
from numba.core import config as numba_config
from numba.core.caching import UserProvidedCacheLocator

from ppo_repro.numerics.kernels.core.environment import EMULATED_AMX

NUMERICS = Path(__file__).resolve().parents[2]


def sources_digest(numerics: Path) -> str:
    """SHA-256 over the version of Numba and the names and bytes of all files in `kernels` and `arithmetic`.

    Kernels take constants and functions from no other folder of the package.
    """
    digest = hashlib.sha256(numba.__version__.encode())
    for folder in ("arithmetic", "kernels"):
        for source in sorted((numerics / folder).rglob("*.py")):
            digest.update(f"{source.relative_to(numerics).as_posix()} {len(source.read_bytes())}\n".encode())
            digest.update(source.read_bytes())
    return digest.hexdigest()


_DIGEST = sources_digest(NUMERICS)


def cache_folder() -> str:
    """A folder of its own for each state of the kernel sources, and for emulated AMX instructions.

    Numba checks only the file that defines a kernel. It would reuse stale machine code after a change in a file from
    which the kernel takes a constant or a function.
    """
    base = numba_config.CACHE_DIR or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return str(Path(base) / "ppo_repro" / f"kernels-{_DIGEST[:16]}{'-emulated' if EMULATED_AMX else ''}")


class KernelCacheLocator(UserProvidedCacheLocator):
    """Names the code of a kernel by its file's place in `numerics`; other files by Numba's own rule."""

    @classmethod
    def get_suitable_cache_subpath(cls, py_file: str) -> str:
        source = Path(py_file).resolve()
        if source.is_relative_to(NUMERICS):
            return "_".join(source.relative_to(NUMERICS).with_suffix("").parts)
        return str(super().get_suitable_cache_subpath(py_file))

    def get_source_stamp(self) -> object:
        """The digest of all sources in place of this file's date and size."""
        return _DIGEST if Path(self._py_file).resolve().is_relative_to(NUMERICS) else super().get_source_stamp()
