"""How far does each precision move the log-probs of a model, rounded on purpose and in stock torch?

`python -m experiments.mismatch_lab.precision --model FOLDER --text FILE` takes pieces of a text. The error of a token
is its log-prob less that of the model in float64, nats.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from experiments.accuracy.__main__ import text_of_file
from ppo_repro.accuracy import Text, policy_scores, reference_scores, stock_scores
from ppo_repro.config.mismatch import SamplerPrecision
from ppo_repro.models.load import load_folder
from ppo_repro.models.networks import make_policy, precision_of, rounded_view
from ppo_repro.numerics import library
from ppo_repro.rollout.torch_engine import in_dtype

QUANTILES = (0.5, 0.9, 0.99)
# two sizes of each format: weights alone, and weights and activations
PRECISIONS = {
    "float32": SamplerPrecision(),
    "bfloat16, weights": SamplerPrecision(weights="bfloat16"),
    "bfloat16": SamplerPrecision(weights="bfloat16", activations="bfloat16", logits="bfloat16"),
    "float16, weights": SamplerPrecision(weights="float16"),
    "float16": SamplerPrecision(weights="float16", activations="float16", logits="float16"),
    "float8_e4m3, weights": SamplerPrecision(weights="float8_e4m3"),
    "float8_e4m3": SamplerPrecision(weights="float8_e4m3", activations="float8_e4m3"),
    "float8_e4m3, rest bfloat16": SamplerPrecision(
        weights="float8_e4m3", activations="float8_e4m3", rest="bfloat16", logits="bfloat16"
    ),
    "float8_e5m2, weights": SamplerPrecision(weights="float8_e5m2"),
    "float8_e5m2": SamplerPrecision(weights="float8_e5m2", activations="float8_e5m2"),
    "int8, weights": SamplerPrecision(weights="int8"),
    "int8": SamplerPrecision(weights="int8", activations="int8"),
    "float8_e4m3 cache": SamplerPrecision(kv_cache="float8_e4m3"),
    "bfloat16 logits": SamplerPrecision(logits="bfloat16"),
}
STOCK = (torch.float32, torch.bfloat16, torch.float16)


def logprobs(model: PreTrainedModel, text: Text, max_context: int) -> Iterator[tuple[str, str, Tensor]]:
    """(by whom, precision, log-probs [n] float32): by stock torch in its dtypes, and rounded on purpose."""
    for dtype in STOCK:
        yield "stock torch", str(dtype).removeprefix("torch."), _stock(model, text, dtype)
    policy = make_policy(model, "deterministic", max_context)
    for name, precision in PRECISIONS.items():
        view = rounded_view(policy, precision_of(precision))
        yield "rounded", name, policy_scores(view, text).logprobs


def _stock(model: PreTrainedModel, text: Text, dtype: torch.dtype) -> Tensor:
    return stock_scores(in_dtype(copy.deepcopy(model), dtype), text).logprobs.float()


def errors(model: PreTrainedModel, text: Text, max_context: int) -> pd.DataFrame:
    """One row for each token and way, its error in nats; the reference is the model in float64."""
    reference = reference_scores(model, text).logprobs
    parts = []
    for by, precision, found in logprobs(model, text, max_context):
        print(f"{by}: {precision}", file=sys.stderr, flush=True)
        error = (found.double() - reference).numpy()
        parts.append(pd.DataFrame({"by": by, "precision": precision, "token": range(len(error)), "error": error}))
    return pd.concat(parts, ignore_index=True)


def table(tokens: pd.DataFrame) -> pd.DataFrame:
    """Root mean square, mean, quantiles and maximum of the errors' magnitudes, nats, in the order they came."""
    rows = []
    for (by, precision), group in tokens.groupby(["by", "precision"], sort=False):
        magnitude = group["error"].abs()
        row = {"by": by, "precision": precision, "rms": float((group["error"] ** 2).mean() ** 0.5)}
        row |= {"mean": float(group["error"].mean())} | {f"q{q:g}": float(magnitude.quantile(q)) for q in QUANTILES}
        rows.append(row | {"max": float(magnitude.max())})
    return pd.DataFrame(rows)


def correlation(tokens: pd.DataFrame, precision: str) -> float:
    """Of the errors by stock torch and by rounding on purpose, token by token."""
    wide = tokens[tokens["precision"] == precision].pivot(index="token", columns="by", values="error")
    return float(wide["stock torch"].corr(wide["rounded"]))


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="errors of log-probs by precision, beside float64")
    parser.add_argument("--model", type=Path, required=True, help="a transformers folder")
    parser.add_argument("--text", type=Path, required=True, help="a text file")
    parser.add_argument("--rows", type=int, default=6, help="pieces of the text")
    parser.add_argument("--prompt", type=int, default=16, help="tokens before those that are scored")
    parser.add_argument("--response", type=int, default=96, help="tokens that are scored in each piece")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="also write the errors of all tokens to this Parquet file")
    arguments = parser.parse_args(given)
    library.use_threads(arguments.threads, torch_computes=True)
    model, tokenizer = load_folder(arguments.model)
    ids = tokenizer(arguments.text.read_text(encoding="utf-8"))["input_ids"]
    text = text_of_file(ids, arguments.rows, arguments.prompt, arguments.response)
    tokens = errors(model, text, arguments.prompt + arguments.response)
    print(table(tokens).to_string(index=False, float_format=lambda x: f"{x:.2e}"))
    for precision in ("bfloat16", "float16"):
        print(
            f"correlation of the errors of stock torch and of rounding on purpose in {precision}: "
            f"{correlation(tokens, precision):.3f}"
        )
    if arguments.out is not None:
        tokens.to_parquet(arguments.out, index=False)


if __name__ == "__main__":
    main()
