"""Define an engine for `rollout.engine`: `generate` of transformers, by default in bfloat16."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar


class Engine:
    """Engine with the `dtype` of weights and activations; it samples `batch` responses at a time."""

    def __init__(self, dtype: str = "bfloat16", batch: int = 64) -> None:
        self.dtype, self.batch = getattr(torch, dtype), batch
        disable_progress_bar()

    def load(self, folder: str) -> None:
        """Load the weights of a transformers folder; the run calls this again when they have changed."""
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=self.dtype)

    def generate(self, prompts: list[list[int]], sampling: Any, seeds: list[int]) -> list[tuple[list[int], Any, str]]:
        """Return (ids, log-probs in nats, "stop" or "length") for each prompt."""
        found: list[tuple[list[int], Any, str]] = []
        for start in range(0, len(prompts), self.batch):
            torch.manual_seed(seeds[start])
            found += self.sampled(prompts[start : start + self.batch], sampling)
        return found

    def sampled(self, prompts: list[list[int]], sampling: Any) -> list[tuple[list[int], Any, str]]:
        """Sample one batch; prompts are padded on the left."""
        width = max(map(len, prompts))
        padded = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        end_ids = list(sampling.end_ids)
        done = self.model.generate(
            torch.tensor(padded),
            attention_mask=torch.tensor(mask),
            do_sample=True,
            temperature=sampling.temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=sampling.max_response_tokens,
            eos_token_id=end_ids,
            pad_token_id=end_ids[0],
            output_scores=True,
            return_dict_in_generate=True,
        )
        # scores are logits divided by the temperature
        logprobs = torch.stack(done.scores, 1).float().log_softmax(-1)  # [B, T, V]
        found = []
        for row, ids in enumerate(done.sequences[:, width:].tolist()):
            ends = [place for place, token in enumerate(ids) if token in end_ids]
            ids = ids[: ends[0] + 1] if ends else ids
            of_ids = logprobs[row, torch.arange(len(ids)), torch.tensor(ids)]
            found.append((ids, of_ids, "stop" if ends else "length"))
        return found
