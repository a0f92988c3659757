"""Damage of every kind to one file of a folder, drawn at random and undone afterwards."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Damage:
    """What was done to a folder; `names` are the files of which one has to be named."""

    kind: str
    names: tuple[Path, ...]

    def is_named(self, said: str) -> bool:
        """Whether a message names the damage; that of a list of digests shows at a file of its folder."""
        listed = {name.parent.as_posix() for name in self.names if name.name == "SHA256SUMS"}
        return any(name.name in said for name in self.names) or any(folder in said for folder in listed)


def _flipped(content: bytes, generator: random.Random) -> bytes:
    changed = bytearray(content)
    changed[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    return bytes(changed)


def _truncated(content: bytes, generator: random.Random) -> bytes:
    return content[: generator.randrange(len(content))]


def _zeroed(content: bytes, generator: random.Random) -> bytes:
    # at least one byte that was no zero
    place = generator.choice([index for index, byte in enumerate(content) if byte])
    end = min(len(content), place + generator.randint(1, 512))
    return content[:place] + bytes(end - place) + content[end:]


def _appended(content: bytes, generator: random.Random) -> bytes:
    return content + generator.choice([b"\n", b" ", b"\0", generator.randbytes(generator.randint(1, 64))])


def _emptied(content: bytes, generator: random.Random) -> bytes:
    return b""


_CHANGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "flipped": _flipped,
    "truncated": _truncated,
    "zeroed": _zeroed,
    "appended": _appended,
    "emptied": _emptied,
}
KINDS = (*_CHANGES, "deleted", "swapped", "duplicated")


def files_of(folder: Path) -> list[Path]:
    """Every file below a folder, sorted, as paths below it."""
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


@contextmanager
def damaged(folder: Path, kind: str, generator: random.Random) -> Iterator[Damage]:
    """Do damage of a kind to some file of the folder, and undo it at the end."""
    names = files_of(folder)
    # a file without content, such as a lock, loses nothing
    full = [name for name in names if (folder / name).stat().st_size]
    name = generator.choice(names if kind in ("appended", "duplicated") else full)
    path, content = folder / name, (folder / name).read_bytes()
    copy = path.with_name(f"{path.stem}-copy{path.suffix}")
    other = generator.choice([n for n in names if (folder / n).read_bytes() != content])
    before = {path: content, folder / other: (folder / other).read_bytes()}
    found = Damage(kind, (name,))
    if kind == "deleted":
        path.unlink()
    elif kind == "duplicated":
        copy.write_bytes(content)
        found = Damage(kind, (copy.relative_to(folder),))
    elif kind == "swapped":
        path.write_bytes(before[folder / other])
        (folder / other).write_bytes(content)
        found = Damage(kind, (name, other))
    else:
        path.write_bytes(_CHANGES[kind](content, generator))
    try:
        yield found
    finally:
        copy.unlink(missing_ok=True)
        for place, bytes_before in before.items():
            place.write_bytes(bytes_before)
