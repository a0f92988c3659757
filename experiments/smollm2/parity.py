"""Sampled bits beside those of one forward pass, on the real model: `python -m experiments.smollm2.parity`.

Slices of 64 episodes each: the sampler writes, somebody interrupts it after 64 tokens or an end token, it goes on, up
to 256 tokens. Every second slice is cut by top-p. Then whole episodes are scored, a few at a time, and log-probs are
compared as bits. Native numerics do the same on a small slice as a control, and must differ. A slice is a line of
DIR/slices.jsonl when it is done; the same command goes on after an interruption.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from analysis.grids.table import markdown
from ppo_repro.disk.durable import atomic_write
from ppo_repro.errors import UserError
from ppo_repro.models.batches import lay_out
from ppo_repro.models.load import load_folder, stop_ids
from ppo_repro.models.networks import hidden_states, make_policy
from ppo_repro.numerics import library
from ppo_repro.numerics.families import trunk_of
from ppo_repro.numerics.network import logits
from ppo_repro.numerics.optimizer import weights_digest
from ppo_repro.numerics.rows import Rows
from ppo_repro.numerics.token_statistics import expand_kept, token_statistics
from ppo_repro.output import say
from ppo_repro.rollout.engine import Completion, Request, Sampling
from ppo_repro.rollout.torch_engine import TorchEngine
from ppo_repro.seeding import sample_seed
from ppo_repro.stages.chunks import in_chunks

WHO = ("an old sailor", "two sisters", "a clockmaker", "the last postman", "a doctor", "a thief", "my uncle", "a cook")
WHERE = ("in a town by the sea", "on the way to the moon", "during a long winter", "at the end of the war")
SAID = ("\n\nThen somebody asked: why?\n\n", "\n\nWait, 17 + 5 is 22, not 23. Go on.\n\n", "\n\nA year later,")
WHOLE, CUT = Sampling(temperature=1.0), Sampling(temperature=0.9, top_p=0.95)
TURN = 64  # tokens after which a turn ends, if not by an end token
AT_ONCE = 4  # episodes that are scored together


@dataclass(frozen=True)
class Size:
    """How much a slice is."""

    episodes: int = 64
    response_tokens: int = 256  # forced ones included
    turn: int = TURN

    def sampling(self, index: int) -> Sampling:
        """Every second slice is cut."""
        s = CUT if index % 2 else WHOLE
        return Sampling(s.temperature, 0, s.top_p, self.response_tokens)


@dataclass(frozen=True)
class Interruptions:
    """A `Dialogue`: a turn ends after so many tokens, and texts are put in one after the other, without an end."""

    texts: Sequence[tuple[int, ...]]
    turn: int

    def ends(self, turn: Sequence[int]) -> bool:
        return len(turn) >= self.turn

    def reply(self, index: int, turns: Sequence[Sequence[int]]) -> tuple[int, ...]:
        return self.texts[(index + len(turns)) % len(self.texts)]


@dataclass(frozen=True)
class Slice:
    """What one slice found."""

    index: int
    numerics: str
    model: str  # digest of its weights
    episodes: int
    response_tokens: int
    top_p: float
    turns: int
    forced: int
    tokens: int  # sampled; all of them are compared
    unequal: int  # log-probs that differ in any bit
    largest: float  # difference, nats
    encoded_otherwise: int  # episodes whose text has other ids when it is encoded
    sampling_s: float
    scoring_s: float


@torch.no_grad()
def scored(
    policy: PreTrainedModel, prompts: Sequence[Sequence[int]], completions: Sequence[Completion], s: Sampling, mode: str
) -> Tensor:
    """log p of every sampled token, nats, float32 [N]: whole episodes in one pass."""
    vocab_size, found = policy.config.vocab_size, []
    for start in range(0, len(completions), AT_ONCE):
        some = slice(start, start + AT_ONCE)
        episodes = completions[some]
        batch = lay_out(prompts[some], [c.episode_ids for c in episodes], "left", [c.is_forced for c in episodes])
        kept = torch.cat([c.kept_tokens for c in episodes])

        def of_rows(
            hidden: Tensor, rows: slice, _: Rows, kept: Tensor = kept, targets: Tensor = batch.targets
        ) -> tuple[Tensor, ...]:
            eligible = expand_kept(kept[rows], vocab_size)
            return token_statistics(logits(policy, hidden), targets[rows], s.temperature, eligible, mode)

        found.append(in_chunks(of_rows, hidden_states(trunk_of(policy), batch), batch.rows, vocab_size)[0])
    return torch.cat(found)


@dataclass(frozen=True)
class Subject:
    """A model in deterministic or native numerics, and what it is asked. `texts` are put in after each turn."""

    policy: PreTrainedModel
    mode: str
    stop_ids: frozenset[int]
    prompts: Sequence[tuple[int, ...]]
    texts: Sequence[tuple[int, ...]]
    tokenizer: PreTrainedTokenizerBase | None = None  # for `encoded_otherwise`

    def measure(self, index: int, size: Size) -> Slice:
        """Sample and score slice `index`; each prompt has two episodes, which share its keys and values."""
        prompts = [self.prompts[i // 2 % len(self.prompts)] for i in range(size.episodes)]
        requests = [Request(p, sample_seed(index, 0, "parity", i)) for i, p in enumerate(prompts)]
        sampling = size.sampling(index)
        context = max(map(len, prompts)) + size.response_tokens
        engine = TorchEngine(self.policy, self.stop_ids, self.mode, context, size.episodes, 0)
        begin = time.perf_counter()
        completions = engine.generate(requests, sampling, Interruptions(self.texts, size.turn))
        middle = time.perf_counter()
        again = scored(self.policy, prompts, completions, sampling, self.mode)
        end = time.perf_counter()
        sampled = torch.cat([c.logprobs for c in completions])
        return Slice(
            index=index,
            numerics=self.mode,
            model=weights_digest(self.policy.named_parameters()),
            episodes=size.episodes,
            response_tokens=size.response_tokens,
            top_p=sampling.top_p,
            turns=sum(_turns(c) for c in completions),
            forced=sum(sum(c.is_forced) for c in completions),
            tokens=len(sampled),
            unequal=int((sampled.view(torch.int32) != again.view(torch.int32)).sum()),
            largest=float((sampled - again).abs().max()),
            encoded_otherwise=sum(self._encoded_otherwise(c) for c in completions),
            sampling_s=middle - begin,
            scoring_s=end - middle,
        )

    def _encoded_otherwise(self, c: Completion) -> bool:
        if self.tokenizer is None:
            return False
        text = self.tokenizer.decode(list(c.episode_ids))
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"]) != c.episode_ids


def _turns(c: Completion) -> int:
    """Turns of the model."""
    before = (True, *c.is_forced)
    return sum(was and not forced for was, forced in zip(before, c.is_forced, strict=False))


def on_texts(folder: Path, mode: str, context: int) -> Subject:
    """The model of a folder on stories; UserError where it cannot be loaded."""
    model, tokenizer = load_folder(folder)
    ends = stop_ids(model, tokenizer)

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    prompts = [ids(f"A story about {who} {where}.\n\n") for who in WHO for where in WHERE]
    return Subject(make_policy(model, mode, context), mode, ends, prompts, [ids(text) for text in SAID], tokenizer)


def read_slices(path: Path, model: str, size: Size) -> list[Slice]:
    """The slices that are done; UserError where the file is damaged or of another model or size."""
    if not path.exists():
        return []
    try:
        found = [Slice(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}: is no file of slices ({error}); choose another --out") from error
    for s in found:
        if s.model != model or (s.numerics == "deterministic" and s.response_tokens != size.response_tokens):
            raise UserError(f"{path}: slice {s.index} is of another model or size; choose another --out")
    return found


def measured(
    deterministic: Subject, native: Subject, size: Size, tokens: int, done: Sequence[Slice]
) -> Iterator[Slice]:
    """What is missing of the control and of `tokens` deterministic tokens, slice by slice, with the time left."""
    small = Size(8, 96, size.turn)
    if not any(s.numerics == "native" for s in done):
        yield native.measure(0, small)
    mine = [s for s in done if s.numerics == "deterministic"]
    while (had := sum(s.tokens for s in mine)) < tokens:
        found = deterministic.measure(len(mine), size)
        mine.append(found)
        yield found
        have, speed = had + found.tokens, found.tokens / (found.sampling_s + found.scoring_s)
        minutes = max(0, tokens - have) / speed / 60
        say(f"{have:,} of {tokens:,} tokens, {speed:.0f} tokens/s, about {minutes:.0f} min left")


def table(slices: Sequence[Slice]) -> pd.DataFrame:
    """Sums by numerics and top-p."""
    frame = pd.DataFrame([asdict(s) for s in slices])
    sums = ["episodes", "turns", "forced", "tokens", "unequal", "encoded_otherwise", "sampling_s", "scoring_s"]
    by = frame.groupby(["numerics", "top_p"], sort=True)
    return by[sums].sum().join(by["largest"].max()).reset_index()


def main(arguments: argparse.Namespace) -> int:
    """Exit code 1 where deterministic log-probs differ, or native ones do not; 2 and one line on a user error."""
    size, path = Size(response_tokens=arguments.response_tokens), arguments.out / "slices.jsonl"
    try:
        if arguments.tokens < 1 or arguments.threads < 1 or size.response_tokens <= TURN:
            raise UserError(f"--tokens and --threads must be at least 1, --response-tokens above {TURN}")
        library.use_threads(arguments.threads)
        context = size.response_tokens + 64
        subject, control = (on_texts(arguments.model, mode, context) for mode in ("deterministic", "native"))
        done = read_slices(path, weights_digest(subject.policy.named_parameters()), size)
        arguments.out.mkdir(parents=True, exist_ok=True)
        for found in measured(subject, control, size, arguments.tokens, done):
            done.append(found)
            atomic_write(path, "".join(json.dumps(asdict(s)) + "\n" for s in done).encode())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(markdown(table(done)))
    own = [s for s in done if s.numerics == "deterministic"]
    unequal, tokens = sum(s.unequal for s in own), sum(s.tokens for s in own)
    differs = sum(s.unequal for s in done if s.numerics == "native")
    print(f"{unequal} of {tokens:,} deterministic log-probs differ; of the native control {differs}")
    return 0 if unequal == 0 and differs else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"), metavar="FOLDER")
    parser.add_argument("--tokens", type=int, default=200_000, help="how many to compare (default %(default)s)")
    parser.add_argument("--response-tokens", type=int, default=256, help="of an episode (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/smollm2-parity"), metavar="DIR")
    sys.exit(main(parser.parse_args()))
