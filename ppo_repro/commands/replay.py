"""The command `replay`. Heavy imports wait until it runs, so that --help is quick."""

from __future__ import annotations

import argparse
import dataclasses

from ppo_repro.output import print_result


def replay_command(arguments: argparse.Namespace) -> int:
    """Compute stages of a recorded run again from its records alone, without a model; exit 1 at a difference."""
    from ppo_repro.replay.replay import lines, replay, stages_of

    replayed = replay(arguments.run, stages_of(arguments.stage))
    fields = {**dataclasses.asdict(replayed), "identical": replayed.difference is None}
    print_result(arguments.json, fields, lines(replayed))
    return 0 if replayed.difference is None else 1
