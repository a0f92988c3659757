"""Engines of a user, as text: a quick one that needs no torch, and the same with one thing wrong."""

from __future__ import annotations

from pathlib import Path

from ppo_repro.config.files import load_config
from ppo_repro.config.run import RunConfig
from tests.support.paths import TINY

# Every token has the same probability. `log`: a file for a line a call; `draws`: anew each time, whatever the seed.
UNIFORM = """
import json
import math
import random


class Engine:
    def __init__(self, log=None, draws=False):
        self.log, self.draws = log, draws

    def note(self, what, value):
        if self.log is not None:
            with open(self.log, "a") as file:
                file.write(json.dumps([what, value]) + "\\n")

    def load(self, folder):
        self.note("load", folder)

    def generate(self, prompts, sampling, seeds):
        self.note("generate", len(prompts))
        return [self.response(random.SystemRandom() if self.draws else random.Random(seed), sampling) for seed in seeds]

    def response(self, random, sampling):
        ids = []
        while len(ids) < sampling.max_response_tokens and (not ids or ids[-1] not in sampling.end_ids):
            ids.append(random.randrange(sampling.vocab_size))
        reason = "stop" if ids[-1] in sampling.end_ids else "length"
        return ids, [-math.log(sampling.vocab_size)] * len(ids), reason
"""


def written(folder: Path, text: str = UNIFORM, name: str = "Engine") -> str:
    """Write an engine; what to set to sample with it."""
    (folder / "engine.py").write_text(text, encoding="utf-8")
    return f"rollout.engine={{kind: function, path: '{folder / 'engine.py'}:{name}'}}"


def config_of(engine: str, *overrides: str) -> RunConfig:
    quick = "model.warm_start_steps=0", "numerics.accuracy_sequences=0", "ppo.iterations=3"
    return load_config(TINY, [*quick, engine, *overrides])
