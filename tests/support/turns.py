"""A small task of several turns: the model writes up to a `1`, the environment goes on with `0+10`, twice at most.

The tokenizer has a token `10`. So the text of every episode in which the environment speaks has another encoding: one
that merges the model's `1` with the `0` after it.
"""

from __future__ import annotations

from pathlib import Path

from ppo_repro.config.files import load_config
from ppo_repro.config.run import RunConfig
from tests.support.paths import TINY

TASK = """
def prompts():
    return [
        {"prompt": f"{a}+{b}:", "answer": f"{a}+{b}={a + b}", "key": f"{a}+{b}", "more": "0+10"}
        for a in range(6)
        for b in range(6)
    ]


def step(transcript):
    if not transcript.last.endswith("1") or len(transcript.turns) > 3:
        return None
    return transcript.fields["more"]


def score(transcripts):
    return [(t.text == t.answer) + 0.25 * (len(t.turns) // 2) for t in transcripts]
"""


def turns_config(folder: Path, *overrides: str, task: str = TASK, max_turns: int = 3) -> RunConfig:
    """A run of two iterations on `task`, which is written to `folder`."""
    (folder / "task.py").write_text(task)
    section = f"{{kind: python, path: '{folder}/task.py', num_eval_prompts: 5, max_turns: {max_turns}}}"
    fields = (
        f"task={section}",
        'rollout.stop=["1"]',
        "rollout.max_response_tokens=14",
        "model.warm_start_steps=12",
        "numerics.max_context=24",
        "numerics.accuracy_sequences=0",
    )
    return load_config(TINY, [*fields, *overrides])
