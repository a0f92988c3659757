"""Dump samples of an SGLang server with the log-probs of transformers. This script needs torch and transformers.

    python -m sglang.launch_server --model-path MODEL --dtype bfloat16 --port 30000 --skip-tokenizer-init
    python sglang_dump.py MODEL OUT.jsonl --url http://127.0.0.1:30000 --prompts prompts.txt --temperature 0.8

The sampler is the server with its own options. The trainer's log-probs are from one forward pass of transformers over
each whole sequence. The script imports nothing of ppo_repro.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path, help="of the trainer, and the tokenizer")
    parser.add_argument("out", type=Path)
    parser.add_argument("--url", required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="one prompt a line")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=1.0, help="of the server")
    parser.add_argument("--top-p", type=float, default=1.0, help="of the server")
    parser.add_argument("--top-k", type=int, default=-1, help="of the server")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of the trainer")
    parser.add_argument("--trainer-temperature", type=float, help="if it is another one")
    parser.add_argument("--rescored", action="store_true", help="the server's log-probs of a prefill, not of sampling")
    return parser.parse_args()


def ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Send one request for tokens to the server, and return the answer."""
    content = json.dumps({**body, "return_logprob": True}).encode()
    request = urllib.request.Request(f"{url}/generate", content, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return dict(json.loads(answer.read()))


def main() -> None:
    given = options()
    tokenizer = AutoTokenizer.from_pretrained(given.model, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(
        given.model, dtype=getattr(torch, given.dtype), trust_remote_code=False, use_safetensors=True
    )
    sampling = {
        "temperature": given.temperature,
        "top_p": given.top_p,
        "top_k": given.top_k,
        "max_new_tokens": given.tokens,
        "ignore_eos": True,
    }

    def logprobs(prompt: list[int], response: list[int]) -> list[float]:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *response[:-1]]])).logits[0, len(prompt) - 1 :]
        scaled = logits.float() / (given.trainer_temperature or given.temperature)
        found: list[float] = scaled.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0].tolist()
        return found

    with given.out.open("w") as file:
        for prompt in given.prompts.read_text(encoding="utf-8").splitlines():
            ids = tokenizer(prompt).input_ids
            sampled = ask(given.url, {"input_ids": ids, "sampling_params": sampling})["meta_info"]
            response = [token for _, token, _ in sampled["output_token_logprobs"]]
            entries = sampled["output_token_logprobs"]
            if given.rescored:
                body = {"input_ids": ids + response, "sampling_params": {"max_new_tokens": 0}}
                again = ask(given.url, {**body, "logprob_start_len": 0})["meta_info"]["input_token_logprobs"]
                entries = again[len(ids) :]
            row = {
                "prompt_ids": ids,
                "response_ids": response,
                "rollout_logprobs": [logprob for logprob, *_ in entries],
                "old_logprobs": logprobs(ids, response),
            }
            file.write(json.dumps(row) + "\n")
    print(given.out)


if __name__ == "__main__":
    main()
