"""Use the built-in sampler's draws as a sampler of SGLang."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import Sampler
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from torch import Tensor

from ppo_repro.numerics.token_statistics import token_statistics
from ppo_repro.sampler import Sampling
from ppo_repro.sampling.draw import sample
from ppo_repro.sampling.sglang.plugin.kept_tokens import KEPT, Entry, shortest, written


class DeterministicSampler(Sampler):
    """Sampler whose token depends on logits, seed and position alone; log-probs have SGLang's definition.

    The log-prob is log_softmax(logits / temperature), not renormalised over the tokens that top-k and top-p keep. If a
    cut drops tokens, each sampled token also has the kept tokens, its log-prob among these, and the log of their mass.
    """

    def forward(
        self,
        logits_output: LogitsProcessorOutput,
        sampling_info: SamplingBatchInfo,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int]],
        positions: Tensor,
    ) -> Tensor:
        """Sample one token per row, int64 [n]. Raises RuntimeError for an option that this sampler does not support.

        The log-probs are written into `logits_output`. `positions` [n] are those of the last input tokens.
        """
        asked = return_logprob and (any(top_logprobs_nums) or any(ids is not None for ids in token_ids_logprobs))
        _refuse(sampling_info, asked)
        logits, seeds = logits_output.next_token_logits, sampling_info.sampling_seed
        tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        logprobs = torch.empty(len(logits), device=logits.device)
        kept: list[Entry | None] = [None] * len(logits)
        for rows, sampling in _groups(sampling_info):
            drawn = sample(logits[rows], seeds[rows].long(), positions[rows].long(), sampling, "deterministic")
            tokens[rows], logprobs[rows] = drawn.tokens, drawn.logprobs
            if sampling.cuts:
                logprobs[rows], _ = token_statistics(
                    logits[rows], drawn.tokens, sampling.temperature, None, "deterministic"
                )
                for row, entry in zip(rows.tolist(), written(drawn), strict=True):
                    kept[row] = entry
        if any(entry is not None for entry in kept):
            logits_output.customized_info = {KEPT: kept}
        if return_logprob:
            logits_output.next_token_logprobs = logprobs
        return tokens


def _refuse(info: SamplingBatchInfo, other_logprobs: bool) -> None:
    requested: dict[str, Any] = {
        "min_p": info.need_min_p_sampling,
        "custom_logit_processor": info.has_custom_logit_processor,
        "return_sampling_mask": info.sampling_mask_batch_indices is not None,
        "no sampling_seed": info.sampling_seed is None,
        "top_logprobs_num or token_ids_logprob": other_logprobs,
    }
    for name in (name for name, used in requested.items() if used):
        raise RuntimeError(f"deterministic numerics in SGLang: a request with {name} is not supported")


def _groups(info: SamplingBatchInfo) -> list[tuple[Tensor, Sampling]]:
    """Group the rows [n] by equal sampling settings; in SGLang top_k = 1 means greedy."""
    temperatures = info.temperatures.flatten().tolist()
    kinds = list(zip(temperatures, info.top_ks.tolist(), info.top_ps.tolist(), strict=True))
    groups = []
    for kind in dict.fromkeys(kinds):
        temperature, top_k, top_p = kind
        greedy = top_k == 1
        sampling = Sampling(
            temperature, 0 if greedy or top_k == TOP_K_ALL else top_k, 1.0 if greedy else shortest(top_p), 0, greedy
        )
        rows = [row for row, other in enumerate(kinds) if other == kind]
        groups.append((torch.tensor(rows, device=info.temperatures.device), sampling))
    return groups
