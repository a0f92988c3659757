"""Recipes: each trains on lines in its data set's own format, and its reward gives the marks that its page promises."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from experiments.recipes import countdown, gsm8k, judge
from ppo_repro.commands.start import RECIPES
from ppo_repro.records import reader
from ppo_repro.tasks.tokenizer import train_bpe
from tests.support.cli import Cli, sets
from tests.support.json_lines import write_lines
from tests.support.models import qwen2_config, small_model
from tests.support.paths import ROOT
from tests.support.runs import run_below

TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
# lines as GSM8K and Countdown-Tasks-3to4 have them
GSM8K = (
    {"question": "Mia has 3 apples and buys 4. How many has she?", "answer": "She has 3+4=<<3+4=7>>7 apples.\n#### 7"},
    {"question": "A ream has 500 sheets. How many have 3?", "answer": "3*500=<<3*500=1500>>1500 sheets.\n#### 1,500"},
)
HELD_OUT = ({"question": "What is half of 10?", "answer": "10/2=<<10/2=5>>5\n#### 5"},)
COUNTDOWN = ({"target": 98, "nums": [44, 19, 35]}, {"target": 64, "nums": [63, 95, 96]})
QWEN = 151_936  # rows of Qwen2.5's logits
SMALL = sets(
    "rollout.prompts_per_iteration=2", "rollout.max_response_tokens=6", "ppo.iterations=1", "task.num_eval_prompts=1",
    "numerics={max_context: 512, accuracy_sequences: 0}",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"), 120)


def model_folder(folder: Path, rows: int) -> Path:
    """A model with random weights, `rows` rows of logits, and a tokenizer of at most 120 tokens."""
    texts = [json.dumps(line) + judge.RUBRIC + "".join(judge.TOPICS) for line in (*GSM8K, *HELD_OUT, *COUNTDOWN)]
    texts.append((ROOT / "experiments" / "recipes" / "countdown.yaml").read_text())
    tokenizer = train_bpe(texts, 120)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    small_model(qwen2_config(vocab_size=rows, max_position_embeddings=512), 0).save_pretrained(folder)
    return folder


def trained(cli: Cli, folder: Path, name: str, model: Path, *more: str) -> Any:
    """The recorded responses of one iteration of a recipe that `init` wrote into a folder."""
    cli.done("init", folder, "--recipe", name)
    cli.done("run", folder / f"{name}.yaml", "--out", folder / "runs", *SMALL, *sets(f"model.path={model}", *more))
    return reader.read_sequences(run_below(folder / "runs"))


@pytest.mark.parametrize(
    ("name", "minibatch", "samples"), [("gsm8k_ppo", 1, 1), pytest.param("gsm8k_grpo", 10, 5, marks=pytest.mark.slow)]
)
def test_gsm8k_trains_on_its_own_lines(
    cli: Cli, tmp_path: Path, model: Path, name: str, minibatch: int, samples: int
) -> None:
    write_lines(tmp_path / "train.jsonl", list(GSM8K))
    write_lines(tmp_path / "test.jsonl", list(HELD_OUT))
    rows = trained(cli, tmp_path, name, model, f"ppo.minibatch_size={minibatch}")
    asked = {
        line["question"] + ' Let\'s think step by step and output the final answer after "####".' for line in GSM8K
    }
    assert set(rows["prompt"]) == asked
    assert len(rows) == 2 * samples
    assert set(rows["answer"]) == {line["answer"] for line in GSM8K}
    (evaluated,) = set(reader.read_evaluations(run_below(tmp_path / "runs"))["prompt"])
    assert evaluated.startswith("What is half of 10? Let's")


def test_countdown_trains_on_its_own_lines(cli: Cli, tmp_path: Path, model: Path) -> None:
    write_lines(tmp_path / "train.jsonl", list(COUNTDOWN))
    write_lines(tmp_path / "test.jsonl", [{"target": 6, "nums": [1, 2, 3]}])
    rows = trained(cli, tmp_path, "countdown", model, "ppo.minibatch_size=16")
    assert len(rows) == 16
    starts = {
        f"Using the numbers {line['nums']}, create an equation that equals {line['target']}." for line in COUNTDOWN
    }
    assert {prompt.partition(" You can")[0] for prompt in rows["prompt"]} == starts


@pytest.mark.slow
@pytest.mark.parametrize(("name", "minibatch"), [("gsm8k_ppo", 1), ("gsm8k_grpo", 10), ("countdown", 16)])
def test_a_recipe_trains_with_the_vocabulary_of_qwen(cli: Cli, tmp_path: Path, name: str, minibatch: int) -> None:
    """Random weights draw tokens that have no text; the rewards see none of them."""
    lines = COUNTDOWN if name == "countdown" else GSM8K
    write_lines(tmp_path / "train.jsonl", list(lines))
    write_lines(tmp_path / "test.jsonl", [{"target": 6, "nums": [1, 2, 3]}] if lines is COUNTDOWN else list(HELD_OUT))
    model = model_folder(tmp_path / "model", QWEN)
    rows = trained(cli, tmp_path, name, model, f"ppo.minibatch_size={minibatch}")
    tokens = reader.read_tokens(run_below(tmp_path / "runs"), columns=["token_id"])["token_id"]
    assert QWEN - 10_000 < tokens.max() < QWEN
    assert set(rows["response"]) == {""}
    assert set(rows["scores"]) == {0.0}
    cli.done("verify", run_below(tmp_path / "runs"))


class Server(ThreadingHTTPServer):
    """A judge whose first answers are not what a judge should send; then it marks a response by its length."""

    bad: list[str]


class Judge(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        assert isinstance(server, Server)
        with LOCK:
            how = server.bad.pop(0) if server.bad else ""
        if how == "late":
            DONE.wait(5)
            return
        mark = "good" if how == "no mark" else str(len(asked["messages"][0]["content"]) % 11)
        text = "{" if how == "no json" else json.dumps({"choices": [{"message": {"content": mark}}]})
        self.send_response(503 if how == "busy" else 200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *arguments: Any) -> None:
        pass


LOCK, DONE = threading.Lock(), threading.Event()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    found = Server(("127.0.0.1", 0), Judge)
    found.bad = ["busy", "late", "no json", "no mark"]
    DONE.clear()
    threading.Thread(target=found.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{found.server_port}/")
    yield found
    DONE.set()
    found.shutdown()
    found.server_close()


def test_a_judge_over_http_marks_every_response(cli: Cli, tmp_path: Path, model: Path, server: Server) -> None:
    server.bad = ["busy"]
    rows = trained(cli, tmp_path, "judge", model, "ppo.minibatch_size=8")
    asked = [judge.RUBRIC.format(prompt=p, response=r) for p, r in zip(rows["prompt"], rows["response"], strict=True)]
    assert rows["scores"].tolist() == pytest.approx([len(text) % 11 / 10 for text in asked])
    assert server.bad == []


def test_every_kind_of_failure_is_tried_again_and_the_last_one_is_raised(
    monkeypatch: pytest.MonkeyPatch, server: Server
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(judge, "URL", f"http://127.0.0.1:{server.server_port}/")
    monkeypatch.setattr(judge, "TIMEOUT", 0.1)
    monkeypatch.setattr(judge, "time", SimpleNamespace(sleep=waited.append))
    with pytest.raises(ValueError, match=r"the judge replied 'good'; must be a mark from 0 to 10"):
        judge.mark("p", "r")
    assert waited == [0.5, 2.0, 8.0]
    assert server.bad == []
    assert judge.mark("p", "r") == len(judge.RUBRIC.format(prompt="p", response="r")) % 11


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("3+4=7\n#### 7", GSM8K[0]["answer"], 1.0),
        ("#### 1500", GSM8K[1]["answer"], 1.0),
        ("#### 1,500 sheets", GSM8K[1]["answer"], 1.0),
        ("#### 7", "7", 1.0),  # the answer in verl's file
        ("#### 8, no: #### 7", "7", 0.0),
        ("The answer is 7", "7", 0.0),
        ("####7", "7", 0.0),
    ],
)
def test_gsm8k_reads_the_number_after_the_marks(response: str, answer: str, expected: float) -> None:
    assert gsm8k.score(response, answer) == expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("44 + 19 + 35", 1.0),
        ("(44+35) + 19", 1.0),
        ("44 + 19 + 35 = 98", 0.1),
        ("98", 0.1),
        ("44 + 19", 0.1),
        ("44 + 19 + 35 + 0", 0.1),
        ("44 ** 19", 0.1),
        ("44 / (19 - 19)", 0.1),
        ("44 + 19 + 35" + " " * 200 + "+ 1", 0.1),
        ("__import__('os')", 0.1),
    ],
)
def test_countdown_checks_the_equation(answer: str, expected: float) -> None:
    assert countdown.score(f"<think>so</think> <answer>{answer}</answer>", COUNTDOWN[0]) == expected


def test_without_tags_countdown_gives_nothing_and_fractions_are_exact() -> None:
    assert countdown.score("44 + 19 + 35", COUNTDOWN[0]) == 0.0
    assert countdown.score("<answer>3 / 7 * 7</answer>", {"target": 3, "nums": [3, 7, 7]}) == 1.0


def test_a_recipe_is_never_written_over_a_file_or_beside_a_model(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "gsm8k.py").write_text("mine")
    assert "gsm8k.py: exists already; nothing was written" in cli.refusal("init", tmp_path, "--recipe", "gsm8k_ppo")
    assert "give one" in cli.refusal("init", tmp_path, "--recipe", "judge", "--model", "smollm2")


def test_every_recipe_is_offered_and_has_a_section_of_the_page() -> None:
    folder = ROOT / "experiments" / "recipes"
    assert sorted(path.stem for path in folder.glob("*.yaml")) == sorted(RECIPES)
    page = (folder / "README.md").read_text()
    assert [name for name in RECIPES if f"init --recipe {name}" not in page] == []
