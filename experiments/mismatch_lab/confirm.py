"""Is it the same with a real model? `python -m experiments.mismatch_lab.confirm --model FOLDER [--csv FILE]`.

The model answers PROMPTS in deterministic numerics, at temperature 1, and a trainer that rounds as
`mismatch.sampler.precision` says scores the answers. One policy, no training.

Expected before it was run, of SmolLM2-135M-Instruct, from its errors on fixed text (5e-2 nats rms in bfloat16, 0.3 in
float8_e4m3, 0.6 in float8_e5m2) and from the tiny policies of `explosion`: KL is half the square of these errors, 1e-3,
0.04 and 0.2 nats per token, to a factor of 2; TIS truncates no token in bfloat16, one in 100 in float8_e4m3, one in 10
in float8_e5m2, and the effective sample size of weights by token is above 0.99, about 0.9, below 0.8; the half of the
tokens with the higher entropy has more than 60 % of the KL in every format, the second half of an answer 40 to 60 %.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import spearmanr
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from analysis.grids.table import markdown
from analysis.mismatch.remedies import remedy_table
from experiments.mismatch_lab.explosion import kl_of_logits, shares, shown
from ppo_repro.accuracy import Scores, Text, policy_scores
from ppo_repro.config.mismatch import SamplerPrecision
from ppo_repro.disk.earlier import write_csv_over_earlier
from ppo_repro.errors import UserError
from ppo_repro.models.load import load_folder
from ppo_repro.models.networks import make_policy
from ppo_repro.models.precision import precision_of, rounded_view
from ppo_repro.numerics import library
from ppo_repro.numerics.network import Lowered
from ppo_repro.rollout.engine import Request, Sampling
from ppo_repro.rollout.torch_engine import TorchEngine

PROMPTS = (
    "What is the capital of France?",
    "Name three fruits that are red.",
    "Why is the sky blue?",
    "Write a sentence about a cat and a dog.",
    "How many days are there in a leap year?",
    "Explain what a computer program is.",
    "What do bees make, and how?",
    "Give me one tip for learning a language.",
    "Translate 'good morning' into Spanish.",
    "What is 17 plus 25?",
    "Describe the smell of rain.",
    "Who wrote Romeo and Juliet?",
    "Tell me a short story about a lost key.",
    "What is the opposite of 'ancient'?",
    "List the colours of the rainbow.",
    "How does a bicycle stay upright?",
)
PRECISIONS = {
    "bfloat16": SamplerPrecision(weights="bfloat16", activations="bfloat16", logits="bfloat16"),
    "float8_e4m3": SamplerPrecision(
        weights="float8_e4m3", activations="float8_e4m3", rest="bfloat16", logits="bfloat16"
    ),
    "float8_e5m2": SamplerPrecision(
        weights="float8_e5m2", activations="float8_e5m2", rest="bfloat16", logits="bfloat16"
    ),
}
AT_ONCE = 4  # answers whose logits are in memory at the same time, twice in float64


def answers(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tokens: int, max_context: int) -> Text:
    """One answer to each of PROMPTS, of up to so many tokens."""
    prompts = [_ids(tokenizer, prompt) for prompt in PROMPTS]
    engine = TorchEngine(
        policy, frozenset([int(tokenizer.eos_token_id)]), "deterministic", max_context, len(prompts), 0
    )
    requests = [Request(tuple(ids), seed) for seed, ids in enumerate(prompts)]
    found = engine.generate(requests, Sampling(1.0, 0, 1.0, tokens))
    text = Text(prompts, [list(c.response_ids) for c in found])
    for completion, scores in zip(found, _one_by_one(policy, text), strict=True):
        assert np.array_equal(completion.logprobs, scores.logprobs), "sampler and trainer do not agree"
    return text


def _ids(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    messages = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _one_by_one(policy: PreTrainedModel, text: Text) -> Iterator[Scores]:
    """The scores of each answer; AT_ONCE of them are computed together."""
    for start in range(0, len(text.prompts), AT_ONCE):
        rows = slice(start, start + AT_ONCE)
        part = Text(text.prompts[rows], text.responses[rows])
        scores, lengths = policy_scores(policy, part), [len(response) for response in part.responses]
        yield from map(Scores, scores.logits.split(lengths), scores.logprobs.split(lengths))


def tokens_of(policy: PreTrainedModel, text: Text, max_context: int) -> pd.DataFrame:
    """One row per precision and token: sequence, position, token_id, logprobs_a of the policy, logprobs_b of the
    rounded one, kl = KL(policy || rounded) over the vocabulary and entropy of the policy, nats."""
    own = list(_one_by_one(policy, text))
    parts = []
    for name, precision in PRECISIONS.items():
        print(name, file=sys.stderr, flush=True)
        view = rounded_view(policy, Lowered(max_context), precision_of(precision))
        for sequence, (mine, rounded) in enumerate(zip(own, _one_by_one(view, text), strict=True)):
            kl, entropy = kl_of_logits(mine.logits, rounded.logits)
            ids = text.responses[sequence]
            key = {"iteration": 0, "sequence": sequence, "position": range(len(ids)), "token_id": ids}
            logprobs = {"logprobs_a": mine.logprobs.numpy(), "logprobs_b": rounded.logprobs.numpy()}
            parts.append(
                pd.DataFrame({"precision": name, **key, **logprobs, "kl": kl.numpy(), "entropy": entropy.numpy()})
            )
    return pd.concat(parts, ignore_index=True)


def table(tokens: pd.DataFrame) -> pd.DataFrame:
    """One row per precision; KL with its 95 % Student interval over answers, of which each has the same weight."""
    found = []
    for precision, group in tokens.groupby("precision", sort=False):
        rows = group.drop(columns="precision").reset_index(drop=True)
        remedies = remedy_table([rows]).set_index("remedy")
        lengths = rows.groupby("sequence")["position"].size().tolist()
        of = shares(rows["kl"].to_numpy(), rows["entropy"].to_numpy(), lengths)
        delta = (rows["logprobs_b"].astype(float) - rows["logprobs_a"]).to_numpy()
        found.append(
            {
                "precision": precision,
                "KL per token": shown(rows.groupby("sequence")["kl"].mean()),
                "k3": f"{np.mean(np.expm1(delta) - delta):.2g}",
                "rms of log-probs": f"{np.sqrt(np.mean(delta**2)):.2g}",
                "effective sample size": f"{remedies.loc['decoupled PPO', 'ess_frac']:.3f}",
                "TIS truncates": f"{remedies.loc['TIS', 'tokens_changed']:.1%}",
                "IcePop drops": f"{remedies.loc['IcePop', 'tokens_weightless']:.1%}",
                "MIS drops answers": f"{remedies.loc['MIS by response', 'responses_weightless']:.0%}",
                "KL on the half of higher entropy": f"{of['of_entropy']:.0%}",
                "on second halves": f"{of['of_place']:.0%}",
                "rank correlation with entropy": f"{spearmanr(rows['kl'], rows['entropy']).statistic:+.2f}",
            }
        )
    return pd.DataFrame(found)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="mismatch of a real model's own answers by precision")
    parser.add_argument("--model", type=Path, required=True, help="a transformers folder with a chat template")
    parser.add_argument("--tokens", type=int, default=48, help="longest answer")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--csv", type=Path, help="also write one row per precision and token to this file")
    arguments = parser.parse_args(argv)
    library.use_threads(arguments.threads)
    model, tokenizer = load_folder(arguments.model)
    max_context = max(len(_ids(tokenizer, prompt)) for prompt in PROMPTS) + arguments.tokens
    policy = make_policy(model, "deterministic", max_context)
    text = answers(policy, tokenizer, arguments.tokens, max_context)
    tokens = tokens_of(policy, text, max_context)
    mean = tokens[tokens["precision"] == "bfloat16"]["entropy"].mean()
    print(f"{len(text.responses)} answers, {text.tokens()} tokens, mean entropy {mean:.2f} nats\n")
    print(markdown(table(tokens)))
    if arguments.csv is not None:
        written = tokens.drop(columns="iteration").to_csv(index=False, float_format="%.6g")
        try:
            write_csv_over_earlier(arguments.csv, written, "--csv")
        except UserError as error:
            print(error, file=sys.stderr)
            sys.exit(2)


if __name__ == "__main__":
    main()
