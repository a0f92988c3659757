"""Print notices about the iterations of a language run: each warning once, and the first steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ppo_repro.base.watcher import Watcher
from ppo_repro.buffers import Iteration, Rollout
from ppo_repro.config.run import RunConfig
from ppo_repro.runs.summary import cut_warning
from ppo_repro.statistics.draws import NONE, Draws, draws_of


def with_notices(
    items: Iterable[Iteration],
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    watcher: Watcher,
) -> Iterator[Iteration]:
    """Yield the iterations of a run, and tell the watcher what a person should know of them, each warning once."""
    has_text = torch.zeros(vocab_size, dtype=torch.bool)
    has_text[[i for i in tokenizer.get_vocab().values() if i < vocab_size]] = True
    draws, told = NONE, set[str]()
    for item in items:
        # tokens that were encoded again were not drawn
        if not (draws.is_wrong or config.mismatch.trainer.retokenize):
            draws += _draws(item)
        warnings = {
            "cut": cut_warning(item.rollout.finish_reason.count("length") / len(item.rollout.finish_reason)),
            "without text": _without_text(item.rollout, has_text),
            "draws": draws.sentence() if draws.is_wrong else None,
        }
        for kind, warning in warnings.items():
            if warning is not None and kind not in told:
                told.add(kind)
                watcher.warning(f"iteration {item.index}: {warning}")
        if item.index == 0 and config.functions and (moved := _moved(item)) is not None:
            watcher.note(moved)
        yield item


def _moved(item: Iteration) -> str | None:
    """Return a sentence on the change of log-probs since the first step; None if no token was seen again."""
    steps = [step for step in item.updates if step.epoch and step.policy is not None]
    if not steps:
        return None
    tokens = torch.cat([step.tokens for step in steps])
    new = torch.cat([step.policy.new_logprobs for step in steps if step.policy is not None])
    moved, advantages = (new - item.forward.old_logprobs[tokens]).tolist(), item.advantages.advantages[tokens].tolist()
    up, down = ([x for x, a in zip(moved, advantages, strict=True) if a * sign > 0] for sign in (1, -1))
    if not up or not down:
        return None
    higher, lower = math.fsum(up) / len(up), math.fsum(down) / len(down)
    wrong = "" if higher > lower else "; does the loss, or the advantage, have the wrong sign?"
    return (
        f"iteration {item.index}: the steps moved log-probs by {higher:+.2g} nats where advantages are positive, by "
        f"{lower:+.2g} where they are negative (mean over tokens){wrong}"
    )


def _draws(item: Iteration) -> Draws:
    forward, owner = item.forward, item.rollout.sequence_of_token().numpy()
    known = None if forward.cumulative_probs is None else forward.cumulative_probs.numpy()
    return draws_of(forward.old_logprobs.numpy(), forward.entropies.numpy(), owner, known, seed=item.index)


def _without_text(rollout: Rollout, has_text: Tensor) -> str | None:
    """Return a sentence on how many sampled tokens the tokenizer lacks, as models often have more rows than tokens."""
    ids = rollout.response_ids
    lacking = ids[~has_text[ids]]
    if not len(lacking):
        return None
    return (
        f"{len(lacking):,} of {len(ids):,} sampled tokens have ids that the tokenizer lacks, such as {int(lacking[0])}"
        "; they have no text, so rewards do not see them"
    )
