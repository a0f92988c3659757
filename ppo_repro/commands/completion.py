"""Completion in bash, zsh and fish: commands, options, files, fields of `--set`, and recorded runs."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppo_repro.errors import UserError
from ppo_repro.output import tell

if TYPE_CHECKING:
    from collections.abc import Iterable

SHELLS = ("bash", "zsh", "fish")
_FILES = {
    "bash": 'eval "$(ppo-repro completion bash)" in ~/.bashrc',
    "zsh": 'eval "$(ppo-repro completion zsh)" in ~/.zshrc, after compinit',
    "fish": "ppo-repro completion fish | source in ~/.config/fish/config.fish",
}


def completion_command(arguments: argparse.Namespace) -> int:
    """Print the script that makes a shell complete commands, options, fields and runs."""
    argcomplete = _argcomplete()
    shell = argcomplete.shellcode(["ppo-repro"], shell=arguments.shell)
    tell(f"# put this into your shell's own file: {_FILES[arguments.shell]}\n{shell}")
    return 0


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer the shell that asks for completions and end the process; nothing where no shell asks."""
    if "_ARGCOMPLETE" in os.environ:
        _argcomplete().autocomplete(parser)


def run_names(
    prefix: str, action: argparse.Action, parser: argparse.ArgumentParser, parsed_args: argparse.Namespace
) -> Iterable[str]:
    """`latest` and the recorded runs under runs/, then what else begins so."""
    from ppo_repro.commands.run_folders import LATEST, MANIFEST, RUNS
    from ppo_repro.files import folders_with

    runs = [str(run_dir) for run_dir in folders_with(RUNS, MANIFEST)]
    return [name for name in (LATEST, *runs) if name.startswith(prefix)] or _files(prefix)


def fields(
    prefix: str, action: argparse.Action, parser: argparse.ArgumentParser, parsed_args: argparse.Namespace
) -> Iterable[str]:
    """The fields of a run's configuration, each with its `=`."""
    from ppo_repro.config.mistakes import field_paths
    from ppo_repro.config.run import RunConfig

    return [f"{path}=" for path in dict.fromkeys(field_paths(RunConfig)) if path.startswith(prefix)]


def _files(prefix: str) -> list[str]:
    folder = Path(prefix).parent if not prefix.endswith("/") else Path(prefix)
    names = sorted(folder.iterdir()) if folder.is_dir() else []
    return [f"{path}/" if path.is_dir() else str(path) for path in names if str(path).startswith(prefix)]


def _argcomplete() -> Any:
    try:
        import argcomplete
    except ModuleNotFoundError as error:
        raise UserError("completion needs the package argcomplete; install it: pip install argcomplete") from error
    return argcomplete
