"""What a disk may hold of a folder after a kill or a power cut between any two of the calls that change it.

A kill keeps everything that was written. After a power cut a file has at least the content of its last fsync, and a
folder at least the names of its last fsync; what came later is there, or not, or half.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

Content = bytes | None  # None for a folder
Names = dict[str, tuple[int, bool]]  # inode, and whether it is a folder, by name
TWO = ("replace", "rename", "link")  # have two paths
CALLS = (*TWO, "fsync", "mkdir", "unlink", "rmdir")


@dataclass(frozen=True)
class State:
    """What a disk may hold: content by path below the folder; `promised` is what the writer had been told by then."""

    how: str
    before: str  # the call that has not happened
    promised: int
    content: dict[str, Content]

    def write(self, folder: Path) -> Path:
        """Put it into a new folder."""
        folder.mkdir()
        for name, content in self.content.items():
            if content is None:
                (folder / name).mkdir()
            else:
                (folder / name).write_bytes(content)
        return folder


@dataclass
class Disk:
    """Records the calls that change `root`; `promised` is set by who is told that something is recorded."""

    root: Path
    promised: int = 0
    calls: list[str] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    _files: dict[int, bytes] = field(default_factory=dict)  # as synced, by inode
    _folders: dict[int, Names] = field(default_factory=dict)
    _open: list[int] = field(default_factory=list)  # keeps the numbers of inodes from being given again
    _seen: set[int] = field(default_factory=set)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def sync(self, path: Path) -> None:
        """Note what is on the disk from now on."""
        self._open.append(os.open(path, os.O_RDONLY))
        inode = os.fstat(self._open[-1]).st_ino
        if path.is_dir():
            self._folders[inode] = _names(path)
        else:
            self._files[inode] = path.read_bytes()

    def observe(self, before: str) -> None:
        """Add the states that the disk may have now, unless they were there before."""
        now: dict[str, tuple[int, Content]] = dict(_walk(self.root, ""))
        synced: dict[str, tuple[int, Content]] = dict(self._synced(self.root.stat().st_ino, ""))
        contents: dict[str, Callable[[int, bytes], bytes]] = {
            "killed": lambda inode, content: content,
            "names, not contents": lambda inode, content: self._files.get(inode, b""),
            "names, half contents": lambda inode, content: (
                content if self._files.get(inode) == content else content[: len(content) // 2]
            ),
        }
        found = [
            (how, {name: None if content is None else of(inode, content) for name, (inode, content) in now.items()})
            for how, of in contents.items()
        ]
        found.append(("only what was synced", {name: content for name, (_, content) in synced.items()}))
        for how, content in found:
            key = hash((self.promised, frozenset(content.items())))
            if key not in self._seen:
                self._seen.add(key)
                self.states.append(State(how, before, self.promised, content))

    def _synced(self, inode: int, prefix: str) -> Iterator[tuple[str, tuple[int, Content]]]:
        for name, (below, is_folder) in self._folders.get(inode, {}).items():
            yield prefix + name, (below, None if is_folder else self._files.get(below, b""))
            if is_folder:
                yield from self._synced(below, f"{prefix}{name}/")

    def call(self, name: str, real: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Do a call of `os`; what it would change is observed first, what it syncs is noted."""
        of = [os.readlink(f"/proc/self/fd/{arguments[0]}")] if name == "fsync" else arguments[: 1 + (name in TWO)]
        shown = [os.fspath(path) for path in of]
        if not shown[0].startswith(f"{self.root}/") and shown[0] != str(self.root) and "dir_fd" not in named:
            return real(*arguments, **named)
        with self._lock:
            told = " ".join([name, *(os.path.relpath(path, self.root) for path in shown if path.startswith("/"))])
            self.observe(told)
            result = real(*arguments, **named)
            self.calls.append(told)
            if name == "fsync":
                self.sync(Path(shown[0]))
            return result

    def close(self) -> None:
        for descriptor in self._open:
            os.close(descriptor)


def _names(folder: Path) -> Names:
    with os.scandir(folder) as entries:
        return {entry.name: (entry.inode(), entry.is_dir()) for entry in entries}


def _walk(folder: Path, prefix: str) -> Iterator[tuple[str, tuple[int, Content]]]:
    for name, (inode, is_folder) in _names(folder).items():
        yield prefix + name, (inode, None if is_folder else (folder / name).read_bytes())
        if is_folder:
            yield from _walk(folder / name, f"{prefix}{name}/")


@contextmanager
def recorded(root: Path) -> Iterator[Disk]:
    """Record what happens to a folder in this block; what is in the folder before is on the disk."""
    disk = Disk(root)
    for path in (root, *root.rglob("*")):
        disk.sync(path)
    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            real = getattr(os, name)
            patch.setattr(os, name, lambda *a, _name=name, _real=real, **n: disk.call(_name, _real, *a, **n))
        yield disk
    disk.observe("the end")
    disk.close()
