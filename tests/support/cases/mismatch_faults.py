"""Faults between sampler and trainer, each really committed on a tiny model, as frames for `diagnose`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.models.batches import TokenBatch, lay_out
from ppo_repro.models.networks import policy_logits
from ppo_repro.numerics.optimizer import SLOTS, AdamWSettings, Optimizer
from ppo_repro.numerics.rows import slots_of
from ppo_repro.numerics.token_statistics import prob_sq_sum, token_statistics
from ppo_repro.rollout.engine import Completion, Request, Sampling
from ppo_repro.rollout.torch_engine import TorchEngine
from ppo_repro.tasks.tokenizer import decode, train_bpe
from tests.support.models import CLASSES, CONFIGS, CONTEXT, VOCAB, fill, policy, ragged, seeded, source_model

EOS = 1
STOPS = frozenset({EOS, 3, 17})
ITERATIONS, SEQUENCES, LONGEST, BATCH = 4, 24, 20, 6
PLAIN = Sampling(1.0, 0, 1.0, LONGEST)


@dataclass(frozen=True)
class Setting:
    """Which model samples, in which numerics, from which random stream."""

    architecture: str
    mode: str
    seed: int


@dataclass(frozen=True)
class Iteration:
    """The responses of one iteration."""

    requests: tuple[Request, ...]
    completions: tuple[Completion, ...]

    @property
    def lengths(self) -> list[int]:
        return [len(c.response_ids) for c in self.completions]

    @property
    def logprobs(self) -> Tensor:
        return torch.cat([c.logprobs for c in self.completions])


@cache
def sampled(setting: Setting, sampling: Sampling = PLAIN) -> tuple[Iteration, ...]:
    """Responses of the engine to random prompts."""
    model = policy(setting.architecture, setting.mode, setting.seed)
    engine = TorchEngine(model, STOPS, setting.mode, CONTEXT, 16, 0)
    found = []
    for index in range(ITERATIONS):
        stream = 1000 * setting.seed + index
        prompts, _ = ragged(SEQUENCES, stream)
        seeds = torch.randint(0, 2**62, (SEQUENCES,), generator=seeded(stream + 500)).tolist()
        requests = tuple(Request(tuple(p), s) for p, s in zip(prompts, seeds, strict=True))
        found.append(Iteration(requests, tuple(engine.generate(requests, sampling))))
    return tuple(found)


Trainer = Callable[[Iteration], tuple[Tensor, Tensor, Tensor]]
Logits = Callable[[PreTrainedModel, TokenBatch], Tensor]


def trained(
    model: PreTrainedModel, mode: str, items: Iteration, padding: str = "right", logits: Logits = policy_logits
) -> tuple[Tensor, Tensor, Tensor]:
    """What the trainer says of the responses: log-probs, entropies, sums of squares; no cut, temperature 1."""
    parts = []
    with torch.no_grad():
        for start in range(0, len(items.requests), BATCH):
            rows = slice(start, start + BATCH)
            prompts = [r.prompt_ids for r in items.requests[rows]]
            batch = lay_out(prompts, [c.response_ids for c in items.completions[rows]], padding)
            z = logits(model, batch).to(torch.float32)
            parts.append((*token_statistics(z, batch.targets, 1.0, None, mode), prob_sq_sum(z, 1.0, None)))
    logprobs, entropies, squares = (torch.cat(column) for column in zip(*parts, strict=True))
    return logprobs, entropies, squares


def frame(index: int, items: Iteration, a: Tensor, trainer: Trainer) -> pd.DataFrame:
    """One iteration as the analysis takes it, with every column that it can use; the trainer scores twice."""
    b, again = trainer(items), trainer(items)
    lengths = items.lengths
    return pd.DataFrame(
        {
            "iteration": np.int32(index),
            "sequence": np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
            "position": np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
            "token_id": np.concatenate([np.array(c.response_ids, dtype=np.int32) for c in items.completions]),
            "logprobs_a": a.numpy(),
            "logprobs_b": b[0].numpy(),
            "entropies": b[1].numpy(),
            "prob_sq_sums": b[2].numpy(),
            "log_kept_mass": torch.cat([c.log_kept_mass for c in items.completions]).numpy(),
            "logprobs_b_again": again[0].numpy(),
            "pad_length": np.repeat(_pads(items), lengths),
            "steps_since_sync": np.int32(0),
        }
    ).assign(token_id_b=lambda made: made["token_id"])


def _pads(items: Iteration) -> np.ndarray:
    """Padding of each sequence in its batch."""
    inputs = [len(r.prompt_ids) + len(c.response_ids) for r, c in zip(items.requests, items.completions, strict=True)]
    groups = np.array(inputs, dtype=np.int32).reshape(-1, BATCH)
    return (groups.max(1, keepdims=True) - groups).ravel()


def pairs(
    setting: Setting,
    sampling: Sampling = PLAIN,
    sampler: Callable[[Iteration], Tensor] = lambda items: items.logprobs,
    trainer: Trainer | None = None,
) -> pd.DataFrame:
    """All iterations of a setting, with another sampler's record or another trainer."""
    model = policy(setting.architecture, setting.mode, setting.seed)
    used = trainer or (lambda items: trained(model, setting.mode, items))
    frames = [frame(i, items, sampler(items), used) for i, items in enumerate(sampled(setting, sampling))]
    return pd.concat(frames, ignore_index=True)


def clean(setting: Setting) -> pd.DataFrame:
    """Nothing wrong: cached decoding against the full forward of the same weights."""
    return pairs(setting)


def temperature(setting: Setting, value: float = 0.9) -> pd.DataFrame:
    """The sampler's log-probs are of another temperature than the trainer's."""
    return pairs(setting, replace(PLAIN, temperature=value))


def truncated(setting: Setting, top_p: float = 0.9, top_k: int = 0) -> pd.DataFrame:
    """The sampler's log-probs are renormalised over what top-p or top-k kept, the trainer's are not."""
    return pairs(setting, replace(PLAIN, top_p=top_p, top_k=top_k))


def token_bias(setting: Setting, size: float = 0.1) -> pd.DataFrame:
    """The sampler's logits have an error of each token, the same everywhere."""
    return pairs(setting, replace(PLAIN, token_bias=size, bias_seed=setting.seed))


def rolled(setting: Setting, by: int = 1) -> pd.DataFrame:
    """The sampler's log-probs of a batch are written one place on."""
    return pairs(setting, sampler=lambda items: torch.roll(items.logprobs, by))


def shuffled(setting: Setting) -> pd.DataFrame:
    """The sampler's log-probs are joined in another order of sequences."""

    def turned(items: Iteration) -> Tensor:
        return torch.cat([c.logprobs for c in items.completions[::-1]])

    return pairs(setting, sampler=turned)


def zero_filled(setting: Setting) -> pd.DataFrame:
    """The sampler's log-probs go through a buffer of zeros that is too narrow for long responses."""

    def through_buffer(items: Iteration) -> Tensor:
        buffer = torch.zeros(SEQUENCES, LONGEST)
        for row, c in enumerate(items.completions):
            kept = c.logprobs[: LONGEST // 2]
            buffer[row, : len(kept)] = kept
        return torch.cat([buffer[row, :n] for row, n in enumerate(items.lengths)])

    return pairs(setting, sampler=through_buffer)


def forced_eos(setting: Setting, logprob: float | None = None) -> pd.DataFrame:
    """A response at the limit gets an end token in the place of its last one; its log-prob stays the old one's."""

    def ended(c: Completion) -> Completion:
        if c.finish_reason != "length":
            return c
        changed = c.logprobs.clone()
        if logprob is not None:
            changed[-1] = logprob
        return replace(c, response_ids=(*c.response_ids[:-1], EOS), logprobs=changed)

    model = policy(setting.architecture, setting.mode, setting.seed)
    frames = []
    for index, items in enumerate(sampled(setting)):
        forced = Iteration(items.requests, tuple(ended(c) for c in items.completions))
        frames.append(frame(index, forced, forced.logprobs, lambda items: trained(model, setting.mode, items)))
    return pd.concat(frames, ignore_index=True)


def stale(setting: Setting, every: int = 99, learning_rate: float = 1e-3) -> pd.DataFrame:
    """The trainer takes a real AdamW step after each iteration; the sampler gets the weights every `every`-th time."""
    source = source_model(setting.architecture, setting.seed)
    model = copy.deepcopy(policy(setting.architecture, setting.mode, setting.seed))
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    assert source.config.vocab_size == VOCAB
    settings = AdamWSettings(learning_rate, 0.9, 0.95, 1e-8, 0.0, 1.0)
    optimizer = Optimizer(model, settings, setting.mode)
    sampler = copy.deepcopy(model)
    frames = []
    for index, items in enumerate(sampled(setting)):
        if index % every == 0:
            sampler.load_state_dict(model.state_dict())
        engine = TorchEngine(sampler, STOPS, setting.mode, CONTEXT, 16, 0)
        items = Iteration(items.requests, tuple(engine.generate(items.requests, PLAIN)))
        frames.append(
            frame(index, items, items.logprobs, lambda items: trained(model, setting.mode, items)).assign(
                steps_since_sync=np.int32(index % every)
            )
        )
        _policy_gradient_step(model, setting, optimizer, items, index)
    return pd.concat(frames, ignore_index=True)


def _policy_gradient_step(
    model: PreTrainedModel, setting: Setting, optimizer: Optimizer, items: Iteration, index: int
) -> None:
    count = len(items.requests)
    slots = slots_of(range(count), count, SLOTS)
    batch = lay_out([r.prompt_ids for r in items.requests], [c.response_ids for c in items.completions], slots=slots)
    rewards = torch.randn(count, generator=seeded(77 + index))
    advantages = torch.repeat_interleave(rewards, torch.tensor(items.lengths)) / len(batch.targets)

    def backward() -> None:
        logprobs, _ = token_statistics(policy_logits(model, batch), batch.targets, 1.0, None, setting.mode)
        torch.autograd.backward(-logprobs, advantages)

    optimizer.step(backward)


def with_dropout(setting: Setting, rate: float = 0.1) -> pd.DataFrame:
    """The trainer's model is in training mode, with dropout; stock numerics, since the deterministic ones have none."""
    config = CONFIGS[setting.architecture]()
    for name in ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout"):
        if hasattr(config, name):
            setattr(config, name, rate)
    model = CLASSES[type(config)](config)
    fill(model, setting.seed)
    model.train()
    model.set_attn_implementation("sdpa")
    with torch.random.fork_rng():
        torch.manual_seed(setting.seed)
        return pairs(setting, trainer=lambda items: trained(model, "native", items))


def _padded_left(model: PreTrainedModel, batch: TokenBatch, masked: bool) -> Tensor:
    """Logits of stock torch for a left-padded batch that counts positions from the padding on."""
    lengths = batch.sequences.lengths
    width = int(lengths.max())
    valid = np.arange(width) >= width - lengths[:, None]
    ids = np.zeros(valid.shape, np.int64)
    ids[valid] = batch.sequences.ids
    out = model(
        input_ids=torch.from_numpy(ids),
        attention_mask=torch.from_numpy(valid.astype(np.int64)) if masked else None,
        position_ids=torch.arange(width).expand(ids.shape),
        use_cache=False,
    )
    return out.logits.flatten(0, 1)[np.flatnonzero(valid)[batch.predictors]]


def _leaking(model: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """Tokens see the padding too."""
    return _padded_left(model, batch, masked=False)


def _wrong_positions(model: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """The same with a right mask: shows only where positions are absolute, as GPT-2's are."""
    return _padded_left(model, batch, masked=True)


def padding_leak(setting: Setting, logits: Logits = _leaking) -> pd.DataFrame:
    """The trainer pads on the left and forgets it; stock numerics, since the deterministic ones take no mask."""
    model = policy(setting.architecture, "native", setting.seed)
    return pairs(setting, trainer=lambda items: trained(model, "native", items, "left", logits))


def wrong_positions(setting: Setting) -> pd.DataFrame:
    """Only the positions are wrong."""
    return padding_leak(setting, _wrong_positions)


def reduced_precision(setting: Setting, dtype: torch.dtype = torch.bfloat16) -> pd.DataFrame:
    """The trainer computes in 16 bits, its log-softmax in float32."""
    model = copy.deepcopy(policy(setting.architecture, "native", setting.seed)).to(dtype)

    return pairs(setting, trainer=lambda items: trained(model, "native", items))


def coarse_logprobs(setting: Setting) -> pd.DataFrame:
    """The trainer takes logits in bfloat16 and hands on log-probs in bfloat16."""
    model = policy(setting.architecture, "native", setting.seed)

    def scored(items: Iteration) -> tuple[Tensor, Tensor, Tensor]:
        logprobs, *others = trained(model, "native", items, logits=lambda *x: policy_logits(*x).to(torch.bfloat16))
        return logprobs.to(torch.bfloat16).to(torch.float32), *others

    return pairs(setting, trainer=scored)


@cache
def tokenizer():  # type: ignore[no-untyped-def]
    """BPE of the models' vocabulary size, over made-up words."""
    generator = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnop"))
    words = ["".join(generator.choice(letters, generator.integers(2, 7))) for _ in range(300)]
    made = train_bpe([" ".join(words)], VOCAB)
    assert len(made) == VOCAB
    return made


def retokenized(setting: Setting) -> pd.DataFrame:
    """The trainer sees the sampler's text encoded anew; tokens are paired by their position."""
    model = policy(setting.architecture, setting.mode, setting.seed)
    frames = []
    for index, items in enumerate(sampled(setting)):
        again = []
        for c in items.completions:
            ends = [EOS] if c.response_ids[-1] == EOS else []
            ids = tokenizer()(decode(tokenizer(), c.response_ids))["input_ids"] + ends
            again.append(replace(c, response_ids=tuple(ids) or (EOS,)))
        anew = Iteration(items.requests, tuple(again))
        b = torch.split(trained(model, setting.mode, anew)[0], anew.lengths)
        frames.append(_by_position(index, items, anew, b))
    return pd.concat(frames, ignore_index=True)


def _by_position(index: int, left: Iteration, right: Iteration, b: Sequence[Tensor]) -> pd.DataFrame:
    """Tokens of either side beyond the other's end have NaN and the token id -1 there."""
    frames = []
    for row, (ours, theirs) in enumerate(zip(left.completions, right.completions, strict=True)):
        n = max(len(ours.response_ids), len(theirs.response_ids))
        columns = {"token_id": ours.response_ids, "token_id_b": theirs.response_ids}
        data = {name: np.array([*ids, *[-1] * (n - len(ids))], dtype=np.int32) for name, ids in columns.items()}
        for name, values in (("logprobs_a", ours.logprobs), ("logprobs_b", b[row])):
            data[name] = np.concatenate([values.numpy(), np.full(n - len(values), np.nan, np.float32)])
        place = {"iteration": np.int32(index), "sequence": np.int32(row), "position": np.arange(n, dtype=np.int32)}
        frames.append(pd.DataFrame({**place, **data}))
    return pd.concat(frames, ignore_index=True)
