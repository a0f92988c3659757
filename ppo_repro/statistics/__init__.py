"""Statistics of log-probs in NumPy: estimators of KL, judgement of draws, bits. Nothing here imports torch."""
