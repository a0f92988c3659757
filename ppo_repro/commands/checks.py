"""Commands that look at a configuration, or at where bits part, without training. Heavy imports wait."""

from __future__ import annotations

import argparse
import dataclasses

from ppo_repro.output import print_json, print_result, say, tell


def probe_command(arguments: argparse.Namespace) -> int:
    """Check every invariance on this machine, with a negative control; exit 1 if one fails."""
    from ppo_repro.config.files import load_config

    config = load_config(arguments.config, arguments.set)
    say(f"{config.experiment}: every invariance on this machine, in deterministic and in native numerics")
    from ppo_repro.checks.probe import failures, probe, render
    from ppo_repro.commands.progress import ConsoleProgress

    with ConsoleProgress() as progress:
        found = probe(config, progress.check)
    failed, accuracy = failures(found.rows), found.accuracy
    if accuracy is not None and accuracy.is_low:
        say(f"warning: {accuracy.sentence()}")
    if arguments.json:
        print_json({**dataclasses.asdict(found), "failures": failed})
    else:
        tell(render(found.rows))
        if accuracy is not None:
            tell(accuracy.sentence())
        tell("\n".join(failed) or "every promise holds, and the control finds the differences it must find")
    return 1 if failed else 0


def bisect_command(arguments: argparse.Namespace) -> int:
    """Find the operation from which sampler and trainer differ."""
    say(f"{arguments.source}: looking for the operation at which sampler and trainer part")
    from ppo_repro.checks.bisect import bisect, lines

    bisection = bisect(arguments.source, arguments.set, arguments.out)
    print_result(arguments.json, dataclasses.asdict(bisection), lines(bisection))
    # deterministic numerics promise that no op differs; native ones promise nothing
    return 1 if bisection.first_divergent_op["deterministic"] else 0


def plan_command(arguments: argparse.Namespace) -> int:
    """Work out how much memory a configuration needs, without loading a weight."""
    from ppo_repro.config.files import load_config

    config = load_config(arguments.config, arguments.set)
    say(f"{config.experiment}: memory of its models, without a weight")
    from ppo_repro.plan import as_json, lines, plan_run

    plan = plan_run(config)
    print_result(arguments.json, as_json(plan), lines(plan))
    return 0


def fields_command(arguments: argparse.Namespace) -> int:
    """Print every field of a configuration: what it may be, its default, what it means."""
    from ppo_repro.config.reference import groups, text

    found = [dataclasses.asdict(group) for group in groups(arguments.section)]
    print_result(arguments.json, {"sections": found}, text(arguments.section))
    return 0
