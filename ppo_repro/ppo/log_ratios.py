"""Log-ratios new / old that every loss must survive, in the trial before a run and in `ppo_repro.testing`."""

# near 0, beyond clipping, and where exp overflows float32 (88.7) and float64 (709.8)
LOG_RATIOS = (1e-8, -1e-8, 20.0, -20.0, 100.0, -100.0, 800.0, -800.0)


def extreme_logprobs(log_ratio: float) -> tuple[float, float]:
    """Return a new and an old log-prob with this log-ratio, in nats. The larger one is -0.5."""
    return -0.5 + min(log_ratio, 0.0), -0.5 - max(log_ratio, 0.0)
