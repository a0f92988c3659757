"""Prompts, and scores from a judge model behind an OpenAI-compatible server, such as vLLM, SGLang or llama.cpp.

The judge answers with a mark from 0 to 10; the score is a tenth of the mark. A request that fails, takes too long or
brings no mark is sent again. If all attempts fail, the run ends, and its complete iterations stay.
"""

import json
import os
import re
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

URL = os.environ.get("JUDGE_URL", "http://127.0.0.1:8000/v1/chat/completions")
MODEL = os.environ.get("JUDGE_MODEL", "judge")
TIMEOUT = float(os.environ.get("JUDGE_TIMEOUT", "20"))  # seconds of one attempt
PAUSES = (0.5, 2.0, 8.0)  # seconds before the second, third and fourth attempt
AT_ONCE = 16  # requests at one time

TOPICS = ("rain", "yeast", "a lever", "the tides", "an eclipse", "rust", "a vaccine", "a rainbow", "soap", "magnets")
READERS = ("a child", "a cook", "a judge", "a sailor")
RUBRIC = """Mark the answer to the request from 0 to 10: is it right, and is it two sentences that fit the reader?
Reply with the mark alone.

Request: {prompt}

Answer: {response}"""


def prompts() -> list[dict]:
    return [{"prompt": f"Explain {t} to {r} in two sentences."} for t in TOPICS for r in READERS]


def score(transcripts: list) -> list[float]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda transcript: mark(transcript.prompt, transcript.last) / 10, transcripts))


def mark(prompt: str, response: str) -> int:
    """Return the judge's mark, after up to four attempts. Raises the last attempt's error."""
    for pause in (*PAUSES, None):
        try:
            return _asked(RUBRIC.format(prompt=prompt, response=response))
        except (OSError, ValueError, LookupError):  # no connection, a time-out or an HTTP error; no JSON; no mark in it
            if pause is None:
                raise
            time.sleep(pause)
    raise AssertionError


def _asked(question: str) -> int:
    message = {"role": "user", "content": question}
    # temperature 0: the same response must get the same mark
    body = {"model": MODEL, "messages": [message], "temperature": 0, "max_tokens": 8, "seed": 0}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(URL, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
        text = json.load(reply)["choices"][0]["message"]["content"]
    found = re.search(r"\d+", text)
    if found is None or int(found[0]) > 10:
        raise ValueError(f"the judge replied {text!r}; must be a mark from 0 to 10")
    return int(found[0])
