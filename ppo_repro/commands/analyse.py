"""Implement `ppo-repro analyse`: each analysis of recorded runs, with options of its own."""

from __future__ import annotations

import argparse

from ppo_repro.base.analyses import analysis

# the module of each analysis, and what it answers
ANALYSES = {
    "mismatch": ("mismatch", "how far apart are the log-probs of sampler and trainer?"),
    "clipping": ("clipping", "how many tokens did the clip change?"),
    "tokenization": ("tokenization", "how large is the KL per token, word and response?"),
    "compare": ("compare", "do two runs differ?"),
    "table": ("grid_table", "how do the settings of a grid differ?"),
    "figure": ("figures", "draws a figure of runs or of a grid"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add name and arguments of an analysis; the analysis reads its own options, for which its imports are needed."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    listed = "\n".join(f"  {name:<14}{about}" for name, (_, about) in ANALYSES.items())
    parser.epilog = f"{listed}\n\n`ppo-repro analyse NAME --help` lists the options of one."
    parser.add_argument("name", metavar="NAME", choices=ANALYSES, help="one of those below")
    parser.add_argument("words", metavar="...", nargs=argparse.REMAINDER, help="runs or a grid, and options")


def analyse_command(arguments: argparse.Namespace) -> int:
    """Print an analysis of recorded runs: mismatch, clipping, tokenization, compare, table, figure."""
    try:
        analysis(ANALYSES[arguments.name][0]).main(arguments.words)
    except SystemExit:  # after --help
        return 0
    return 0
