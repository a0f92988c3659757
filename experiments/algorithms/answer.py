"""Which algorithm at equal sampled tokens? `python -m experiments.algorithms.answer [GRID]`; see
`experiments/answers.py`.
"""

from __future__ import annotations

from experiments.answers import settings_study

if __name__ == "__main__":
    settings_study(
        __file__,
        axis="algorithm",
        measure="mean_accuracy",
        title="accuracy, mean over training",
        against="PPO",
        columns={
            "at the end": ("eval_accuracy", None),
            "KL, nats a response": ("ref_kl_per_sequence", "{:.2f}"),
            "entropy, nats a token": ("entropy", "{:.3f}"),
            "length, tokens": ("response_length_mean", "{:.1f}"),
            "sampled tokens": ("tokens", "{:,.0f}"),
        },
    )
