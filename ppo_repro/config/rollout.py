"""Configure `rollout`: samples and engine."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ppo_repro.config.section import Called, Count, Index, Many, Positive, ProgramText, Section

# within these limits logits / temperature are finite in float32
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 1e6
Temperature = Annotated[float, Field(ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)]
TopP = Annotated[float, Field(gt=0, le=1)]
StopText = Annotated[str, Field(min_length=1, max_length=100)]

# flags of a server that follow from the rest of the configuration, or that its checks rely on
OWN_ARGUMENTS = (
    "--model-path", "--model", "--host", "--port", "--device", "--enable-deterministic-inference", "--config",
    "--skip-tokenizer-init", "--sleep-on-idle", "--context-length", "--max-running-requests", "--weight-version",
    "--chunked-prefill-size", "--disable-radix-cache", "--enable-return-routed-experts", "--api-key",
    "--admin-api-key",
)  # fmt: skip
# flags that deterministic numerics set; with other numerics a user chooses them
DETERMINISTIC_ARGUMENTS = ("--attention-backend", "--dtype", "--json-model-override-args", "--rl-on-policy-target")
ServerUrl = Annotated[str, Field(pattern=r"^http://[^/?#@\s]+:\d+$")]


class BuiltInEngine(Section):
    """The engine of this package, in the process of the run."""

    kind: Literal["torch"] = Field("torch", description="Sample with the built-in engine.")


class SGLangServers(Section):
    """SGLang servers, which a run starts or which run already; in deterministic numerics with the bits of `torch`.

    Zheng et al., 2024. Servers are trusted: everybody who reaches one can change its weights.
    """

    kind: Literal["sglang"] = Field(description="Sample with SGLang servers.")
    numerics: Literal["deterministic", "stock"] = Field(
        "deterministic", description="This package's plugin computes inside SGLang, or SGLang as it comes."
    )
    urls: Many[ServerUrl] = Field((), description="Running servers, http://HOST:PORT; [] to start them here.")
    python: ProgramText | None = Field(None, description="Interpreter of SGLang's environment; null: this one.")
    servers: Count = Field(1, description="Servers to start; in deterministic numerics it changes no bit.")
    arguments: Many[str] = Field((), description="More arguments of sglang.launch_server for started servers.")
    timeout_s: Count = Field(600, description="Longest wait for a server to start, or to answer one request, seconds.")

    @model_validator(mode="after")
    def _fits_the_servers(self) -> Self:
        for name in ("python", "servers", "arguments") if self.urls else ():
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} is for servers the run starts; remove it, or remove urls")
        taken = (*OWN_ARGUMENTS, *(DETERMINISTIC_ARGUMENTS if self.numerics == "deterministic" else ()))
        for name in (argument.partition("=")[0] for argument in self.arguments):
            # argparse takes every beginning of a name that is not ambiguous for the name
            if len(name) > 2 and any(own.startswith(name) for own in taken):
                raise ValueError(f"arguments: {name} is set by the run; remove it")
        return self


class OwnEngine(Called):
    """A class of your own with `load(folder)` and `generate(prompts, sampling, seeds)`; its bits are not promised."""

    kind: Literal["function"] = Field(description="Sample with a Python class.")
    timeout_s: Count = Field(600, description="Longest wait for one call of the class, seconds.")


class RolloutConfig(Section):
    """The responses of one iteration, and the distribution from which they are sampled."""

    prompts_per_iteration: Count = Field(description="Prompts per iteration; a task with fewer gives some again.")
    samples_per_prompt: Count = Field(description="Responses sampled for each prompt.")
    max_response_tokens: Count = Field(description="A response without an end token stops here.")
    temperature: Temperature = Field(1.0, description="Logits are divided by this, in sampling and in scoring.")
    top_k: Index = Field(0, description="Keep only the k likeliest tokens; 0 keeps all.")
    top_p: TopP = Field(1.0, description="Keep the likeliest tokens of this mass; 1: all.")
    stop: Many[StopText] = Field((), description="Texts that end a turn like an end token, and stay part of it.")
    mismatch_sigma: Positive | None = Field(None, description="Deviation of noise on the sampler's logits; null: none.")
    engine: BuiltInEngine | SGLangServers | OwnEngine = Field(BuiltInEngine(), discriminator="kind")

    @property
    def cuts(self) -> bool:
        """Return whether top_k or top_p takes tokens out of the distribution."""
        return self.top_k > 0 or self.top_p < 1.0

    @property
    def engine_without_promise(self) -> str | None:
        """Return the setting that names an engine whose bits are not promised; None if they are promised."""
        if self.engine.kind == "function":
            return f"rollout.engine.path = {self.engine.path.rpartition('/')[2]}"
        is_stock = self.engine.kind == "sglang" and self.engine.numerics == "stock"
        return "rollout.engine.numerics = stock" if is_stock else None
