"""Sample with the user's class: its process, its weights, its responses.

The run promises nothing about the class's numbers, and records its tokens and log-probs unchanged. A response in a
wrong form ends the run (`sampling/responses.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ppo_repro.base.files import whole_folder
from ppo_repro.config.rollout import OwnEngine
from ppo_repro.models.folders import write_sampled
from ppo_repro.numerics.weights import weights_digest
from ppo_repro.sampler import Completion, Request, Sampling, check_request
from ppo_repro.sampling.own.child import METHODS
from ppo_repro.sampling.responses import Response, UncutSampling
from ppo_repro.user.file import file_and_name
from ppo_repro.user.process import UserProcess, load_from_package

FIELD = "rollout.engine.path"
MODEL = "model"  # name of the folder of weights in the folder of the class
_CHILD = Path(__file__).with_name("child.py")
_SEEDS = 2**32  # NumPy takes seeds below this


class OwnProcess:
    """The user's class in its own process, which runs until `end`."""

    def __init__(self, settings: OwnEngine) -> None:
        """Start the process and create the object. If that fails, raises UserError with file and line."""
        file_and_name(FIELD, settings.path)
        self.process = UserProcess()
        names, longer = ("make", *METHODS), ", or raise rollout.engine.timeout_s"
        self._functions = load_from_package(
            self.process, FIELD, settings.path, _CHILD, names, settings.timeout_s, longer
        )
        self._call("make", {"field": FIELD, "path": settings.path, "parameters": settings.parameters})

    def load(self, folder: Path) -> None:
        """Call the class's `load` with a folder of weights."""
        self._call("load", {"folder": str(folder)})

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: UncutSampling, seeds: Sequence[int]
    ) -> list[Response]:
        """Return one response per prompt.

        The first of `seeds`, modulo 2^32, seeds the global generators of the process. The class gets all `seeds` whole.
        """
        row = {"prompts": prompts, "sampling": asdict(sampling), "seeds": seeds}
        responses: list[Response] = self._call("generate", row, seeds[0] % _SEEDS)
        return responses

    def end(self) -> None:
        """End the process, and all processes that it started."""
        self.process.end()

    def _call(self, method: str, row: Mapping[str, Any], seed: int = 0) -> Any:
        return self._functions[method]([row], seed)[0]


@dataclass(eq=False)
class OwnSampler:
    """Samples with the user's class, and sends it the weights of `policy` whenever they have changed."""

    process: OwnProcess
    policy: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    end_ids: frozenset[int]
    max_context: int
    folder: Path  # below which the weights are written
    _loaded: str = field(default="", init=False)  # digest of the weights that the process loaded last

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        assert not sampling.greedy, "evaluation is the built-in sampler's"
        if not requests:
            return []
        vocab_size = self.policy.config.vocab_size
        for request in requests:
            check_request(request, sampling, vocab_size, self.max_context)
        self._bring_weights()
        end_ids = tuple(sorted(self.end_ids))
        wanted = UncutSampling(sampling.temperature, sampling.max_response_tokens, end_ids, vocab_size)
        prompts, seeds = [request.prompt_ids for request in requests], [request.seed for request in requests]
        return [Completion.uncut(*response) for response in self.process.generate(prompts, wanted, seeds)]

    def _bring_weights(self) -> None:
        digest = weights_digest(self.policy.named_parameters())
        if digest == self._loaded:
            return
        self._loaded = ""
        model = self.folder / MODEL
        with whole_folder(model) as temporary:
            write_sampled(self.policy, self.end_ids, temporary)
            self.tokenizer.save_pretrained(temporary)
        self.process.load(model)
        self._loaded = digest
