"""Implement `ppo-repro analyse`: each analysis of recorded runs is a command with options of its own."""

from __future__ import annotations

import argparse
from importlib import import_module

from ppo_repro.base.output import Parser
from ppo_repro.commands.values import JSON

# the modules in `analyses`, and what each of them answers
ANALYSES = {
    "mismatch": "how far apart are the log-probs of sampler and trainer?",
    "clipping": "how many tokens did the clip change?",
    "tokenization": "how large is the KL per token, word and response?",
    "compare": "do two runs differ?",
    "table": "how do the settings of a grid differ?",
    "figure": "draws a figure of runs or of a grid",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add name and arguments of an analysis; the analysis reads its own options, for which its imports are needed."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    listed = "\n".join(f"  {name:<14}{about}" for name, about in ANALYSES.items())
    parser.epilog = f"{listed}\n\n`ppo-repro analyse NAME --help` lists the options of one."
    parser.add_argument("name", metavar="NAME", choices=ANALYSES, help="one of those below")
    parser.add_argument("words", metavar="...", nargs=argparse.REMAINDER, help="runs or a grid, and options")


def analyse_command(arguments: argparse.Namespace) -> int:
    """Print an analysis of recorded runs: mismatch, clipping, tokenization, compare, table, figure."""
    analysis = import_module(f"ppo_repro.commands.analyses.{arguments.name}")
    parser = Parser(prog="ppo-repro analyse " + arguments.name, description=ANALYSES[arguments.name])
    analysis.add_options(parser.add_argument)
    parser.add_argument("--json", action="store_true", help=JSON)
    try:
        options = parser.parse_args(arguments.words)
    except SystemExit:  # after --help
        return 0
    analysis.command(options)
    return 0
