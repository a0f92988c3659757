"""Per-token rewards from the scores of responses and the KL estimates of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_repro.numerics.sums import run_sums


def last_tokens(lengths: Tensor) -> Tensor:
    """Return the index into the [N] fields of each response's last token, [B] int64."""
    assert lengths.shape == (lengths.numel(),)
    return torch.cumsum(lengths, 0) - 1


def word_lengths(word_ids: Tensor, lengths: Tensor) -> Tensor:
    """Return the tokens of each word, in order, [W] int64. `word_ids` [N] count words within each response."""
    assert word_ids.shape == (int(lengths.sum()),)
    assert lengths.dim() == 1
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    begins = torch.ones(len(word_ids), dtype=torch.bool)
    begins[1:] = (word_ids[1:] != word_ids[:-1]) | (sequence[1:] != sequence[:-1])
    starts = torch.nonzero(begins)[:, 0]
    return torch.diff(starts, append=torch.tensor([len(word_ids)]))


def place_scores(scores: Tensor, lengths: Tensor, word_ids: Tensor, placement: str) -> Tensor:
    """Place scores on the tokens of their responses. A response's tokens sum to its score.

    Args:
        scores: [B] float64.
        lengths: [B] int64, tokens of each response; their sum is N.
        word_ids: [N] int64, the word of each token, counted within its response.
        placement: last: all on the last token; word_ends: in equal parts on the last token of every word.

    Returns:
        The placed scores, [N] float64.
    """
    assert scores.shape == lengths.shape == (len(scores),)
    assert word_ids.shape == (int(lengths.sum()),)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    out = torch.zeros(len(word_ids), dtype=torch.float64)
    ends = last_tokens(lengths) if placement == "last" else last_tokens(word_lengths(word_ids, lengths))
    share = scores / torch.bincount(sequence[ends], minlength=len(lengths))
    out[ends] = share[sequence[ends]]
    return out


def charge_penalties(penalties: Tensor, lengths: Tensor, word_ids: Tensor, charge: str) -> Tensor:
    """Charge the KL penalties of the tokens to their own or to other tokens of their response.

    Args:
        penalties: [N] float32, kl_coef times the KL of each token.
        lengths: [B] int64, tokens of each response; their sum is N.
        word_ids: [N] int64, the word of each token, counted within its response.
        charge: token: each penalty on its own token. word: the sum over a word on its last token. length_normalized:
            each penalty divided by the length of its response, so that a response pays its mean. last_sum, last_mean:
            sum or mean over a response on its last token.

    Returns:
        The charged penalties, [N] float32.
    """
    assert penalties.shape == word_ids.shape == (int(lengths.sum()),)
    assert lengths.dim() == 1
    if charge == "token":
        return penalties
    if charge == "length_normalized":
        return penalties / torch.repeat_interleave(lengths, lengths).to(torch.float32)
    groups = word_lengths(word_ids, lengths) if charge == "word" else lengths
    sums = run_sums(penalties, groups)
    charged = torch.zeros_like(penalties)
    charged[last_tokens(groups)] = (sums / groups if charge == "last_mean" else sums).to(torch.float32)
    return charged


def token_rewards(placed: Tensor, kl_penalties: Tensor) -> Tensor:
    """Return r_t = float32(placed_t) - kl_penalties_t in float32: [N] float64 and [N] float32 -> [N] float32.

    With the score on the last token, this is Ouyang et al., 2022, equation 2.
    """
    assert placed.shape == kl_penalties.shape == (placed.numel(),)
    return placed.to(torch.float32) - kl_penalties
