"""One row of a dump in every format: the same three response tokens."""

from __future__ import annotations

from typing import Any

SAMPLER, TRAINER = [-0.5, -1.25, -2.0], [-0.5, -1.5, -2.0]
ROWS: dict[str, dict[str, Any]] = {
    "ppo_repro": {
        "prompt_ids": [5, 6], "response_ids": [7, 8, 9], "rollout_logprobs": SAMPLER, "old_logprobs": TRAINER,
        "mask": [1, 0, 1],
    },
    "verl": {
        "prompts": [0, 5, 6], "responses": [7, 8, 9], "rollout_log_probs": SAMPLER, "old_log_probs": TRAINER,
        "response_mask": [1, 0, 1], "attention_mask": [0, 1, 1, 1, 1, 1],
    },
    "trl": {
        "prompt_ids": [0, 5, 6], "prompt_mask": [0, 1, 1], "completion_ids": [7, 8, 9],
        "sampling_per_token_logps": SAMPLER, "old_per_token_logps": TRAINER, "completion_mask": [1, 0, 1],
    },
    "slime": {
        "tokens": [5, 6, 7, 8, 9], "response_lengths": 3, "rollout_log_probs": SAMPLER, "log_probs": TRAINER,
        "loss_masks": [1, 0, 1],
    },
    "prime-rl": {
        "token_ids": [5, 6, 7, 8, 9], "inference_logprobs": [0.0, 0.0, *SAMPLER],
        "trainer_logprobs": [0.0, 0.0, *TRAINER], "loss_mask": [0, 0, 1, 0, 1],
    },
    "areal": {  # `prox_logp` is about the token after
        "input_ids": [5, 6, 7, 8, 9, 0], "attention_mask": [1, 1, 1, 1, 1, 0],
        "logprobs": [0.0, 0.0, *SAMPLER, 0.0], "prox_logp": [0.0, *TRAINER, 0.0, 0.0], "loss_mask": [0, 0, 1, 0, 1, 0],
    },
}  # fmt: skip
