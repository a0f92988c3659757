"""Commands on a recorded run that need no model. Heavy imports wait until they run, so that --help is quick."""

from __future__ import annotations

import argparse
import dataclasses

from ppo_repro.output import print_json, print_result, tell


def replay_command(arguments: argparse.Namespace) -> int:
    """Compute stages of a recorded run again from its records alone, without a model; exit 1 at a difference."""
    from ppo_repro.replay.replay import lines, replay, stages_of

    replayed = replay(arguments.run, stages_of(arguments.stage))
    fields = {**dataclasses.asdict(replayed), "identical": replayed.difference is None}
    print_result(arguments.json, fields, lines(replayed))
    return 0 if replayed.difference is None else 1


def verify_command(arguments: argparse.Namespace) -> int:
    """Compare every recorded file of a run folder with its digest, without computing anything again."""
    from ppo_repro.dpo import records as dpo_records
    from ppo_repro.runs.verify import verify

    whole = dpo_records.verify(arguments.run) if dpo_records.is_dpo(arguments.run) else verify(arguments.run)
    print_result(arguments.json, dataclasses.asdict(whole), whole.lines())
    return 0


def show_command(arguments: argparse.Namespace) -> int:
    """Print what a recorded run did."""
    from ppo_repro.commands.kinds import kind_of
    from ppo_repro.records import manifest, reader
    from ppo_repro.runs.summary import iteration_lines, sample_lines, speeds

    run_dir = arguments.run
    recorded = reader.open_manifest(run_dir, allow_incomplete=not arguments.json)
    kind = kind_of(run_dir).summary
    if arguments.json:
        print_json(dataclasses.asdict(kind.summarise(run_dir, None)))
        return 0
    tell(f"{run_dir}: {recorded.status}, {len(recorded.iterations)} iterations, fingerprint {recorded.fingerprint}")
    if recorded.iterations:
        lines = iteration_lines(run_dir, kind.columns, 12)
        tell(lines.to_string(index=False, float_format=lambda x: f"{x:.4g}", na_rep="-"))
    if recorded.iterations and manifest.has_responses(recorded):
        tell("\n".join(sample_lines(run_dir, len(recorded.iterations) - 1, arguments.samples)))
    if recorded.status == "complete":
        summary = kind.summarise(run_dir, None)
        tell("\n".join([*kind.verdicts(summary), *speeds(summary, kind.unit)]))
    return 0
