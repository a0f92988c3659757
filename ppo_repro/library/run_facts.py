"""What a run says of itself where a notebook or a prompt shows it."""

from __future__ import annotations

from html import escape
from pathlib import Path

from ppo_repro.errors import UserError
from ppo_repro.files import has_writer
from ppo_repro.records import manifest
from ppo_repro.records.config_file import load_config_of


def facts(run_dir: Path) -> dict[str, str]:
    """Name and value of each line; of a folder without a readable manifest, why. Raises nothing that it can say."""
    lines = {"run": str(run_dir)}
    try:
        head = manifest.load_head(run_dir)
        lines["state"] = f"{_state(run_dir, head.status)}, {head.num_iterations} iterations"
        config = load_config_of(run_dir, head)
        lines["experiment"] = f"{config.experiment}, seed {config.seed}, {config.numerics.mode} numerics"
        lines |= {name: f"{value:.4g}" for name, value in head.final.items() if not isinstance(value, str)}
        lines["fingerprint"] = head.fingerprint
    except UserError as error:
        lines["cannot be read"] = str(error)
    return lines


def _state(run_dir: Path, status: str) -> str:
    """As in the manifest; `killed` where that says running and no process of this machine writes it."""
    return "killed" if status == "running" and not has_writer(run_dir) else status


def as_line(run_dir: Path) -> str:
    """The facts on one line, the fingerprint cut."""
    found = facts(run_dir)
    if "fingerprint" in found:
        found["fingerprint"] = found["fingerprint"][:12]
    return f"<{'; '.join(f'{name} {value}' for name, value in found.items())}>"


def as_html(run_dir: Path) -> str:
    """The facts as a table."""
    rows = (f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts(run_dir).items())
    return f"<table>{''.join(rows)}</table>"
