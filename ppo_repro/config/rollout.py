"""The sections `rollout` and `mismatch`: samples, engine, and deliberate differences from the trainer."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ppo_repro.config.section import BelowOne, Called, Count, Fraction, Index, Many, PathText, Positive, Section

# logits divided by it stay numbers of float32
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 1e6
Temperature = Annotated[float, Field(ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)]
TopP = Annotated[float, Field(gt=0, le=1)]
StopText = Annotated[str, Field(min_length=1, max_length=100)]
Wide = Literal["float32", "bfloat16", "float16"]
Format = Literal["float32", "bfloat16", "float16", "float8_e4m3", "float8_e5m2", "int8"]
FORMATS_OF_8_BITS = ("float8_e4m3", "float8_e5m2", "int8")
AddedText = Annotated[str, Field(max_length=1000)]

# flags of a server that follow from the rest of the configuration, or that its checks rely on
OWN_ARGUMENTS = (
    "--model-path", "--model", "--host", "--port", "--device", "--enable-deterministic-inference", "--config",
    "--skip-tokenizer-init", "--sleep-on-idle", "--context-length", "--max-running-requests", "--weight-version",
    "--chunked-prefill-size", "--disable-radix-cache", "--enable-return-routed-experts", "--api-key",
    "--admin-api-key",
)  # fmt: skip
# what deterministic numerics are in SGLang; for others a user chooses them
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
    python: PathText | None = Field(None, description="Interpreter of SGLang's environment; null: this one.")
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
    def engine_without_promise(self) -> str:
        """Return the setting that names an engine whose bits are not promised; empty if they are promised."""
        if self.engine.kind == "function":
            return f"rollout.engine.path = {self.engine.path.rpartition('/')[2]}"
        is_stock = self.engine.kind == "sglang" and self.engine.numerics == "stock"
        return "rollout.engine.numerics = stock" if is_stock else ""

    @model_validator(mode="after")
    def _engine_can(self) -> Self:
        if self.engine.kind == "torch":
            return self
        for name, all_kept in (("top_k", 0), ("top_p", 1)):
            if self.engine_without_promise and getattr(self, name) != all_kept:
                choice = "numerics = stock" if self.engine.kind == "sglang" else "kind = function"
                raise ValueError(
                    f"engine.{choice} needs {name} = {all_kept}: which tokens the cut kept is not known, and the "
                    "trainer's log-probs are those of the cut distribution"
                )
        if self.top_k == 1:
            raise ValueError("top_k must be 0 or above 1 with engine.kind = sglang, where 1 is greedy decoding")
        if self.mismatch_sigma is not None:
            raise ValueError("mismatch_sigma needs engine.kind = torch, whose sampler adds the noise")
        return self


class TrainerFaults(Section):
    """Deliberate differences of the trainer from the sampler."""

    top_p_scored: bool = Field(True, description="Renormalise over the tokens that top-k and top-p kept.")
    temperature_scored: bool = Field(True, description="Divide logits by the temperature, as the sampler does.")
    prompt_before: AddedText = Field("", description="Text before each prompt that only the trainer has; a second BOS.")
    prompt_after: AddedText = Field("", description="The same after each prompt; a second chat template is both.")
    padding_leak: Index = Field(0, description="Pad shorter prompts on the left to so many tokens, without a mask.")
    retokenize: Fraction = Field(0.0, description="Share of responses decoded and encoded again before training.")
    eos_in_loss: bool = Field(True, description="End tokens have a loss like any other token.")
    dropout: BelowOne = Field(0.0, description="Probability of dropping a number of the policy's last hidden states.")

    @property
    def prompts_differ(self) -> bool:
        return bool(self.prompt_before or self.prompt_after or self.padding_leak)

    @property
    def scores_otherwise(self) -> bool:
        """Return whether the trainer's log-prob of a token may differ from the sampler's."""
        cuts = not (self.top_p_scored and self.temperature_scored)
        return cuts or self.prompts_differ or self.retokenize > 0 or self.dropout > 0


class SamplerPrecision(Section):
    """The formats to which the sampler rounds numbers, like a stack of that precision. Products stay exact."""

    weights: Format = Field("float32", description="Of weights; 8 bits: of linear layers of attention and MLP only.")
    activations: Format = Field("float32", description="Of activations; 8 bits: only of the inputs of these layers.")
    rest: Wide = Field("float32", description="Of the weights and activations that formats of 8 bits leave alone.")
    kv_cache: Format = Field("float32", description="Of keys and values as attention reads them.")
    logits: Format = Field("float32", description="Of logits.")

    @model_validator(mode="after")
    def _rest_of_something(self) -> Self:
        if self.rest != "float32" and not {self.weights, self.activations} & set(FORMATS_OF_8_BITS):
            raise ValueError("rest is for what weights or activations of 8 bits leave alone; remove it")
        return self

    @property
    def rounds(self) -> bool:
        """Return whether any format is named."""
        return any(getattr(self, name) != "float32" for name in type(self).model_fields)


class SamplerFaults(Section):
    """Deliberate differences of the sampler's policy from the trained policy."""

    lag: Index = Field(0, description="Iterations that the sampler's weights are behind, fewer at first; 0: none.")
    token_bias: Positive | None = Field(None, description="Size of an error of each token's logit; null: none.")
    precision: SamplerPrecision = SamplerPrecision()
    stock: Wide | None = Field(None, description="Sample by torch in this dtype, bits not promised; null: do not.")

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if self.stock is not None and self.precision.rounds:
            raise ValueError("stock rounds as torch does, so precision has no effect; remove one of them")
        return self


class MismatchConfig(Section):
    """Deliberate differences between sampler and trainer; none by default. All of them are part of the run."""

    sampler: SamplerFaults = SamplerFaults()
    trainer: TrainerFaults = TrainerFaults()
    flip: Literal["bit", "token"] | None = Field(
        None, description="The last bit of a weight, or the first token, is another in this run; null: nothing."
    )

    @property
    def bound(self) -> str:
        """Return the setting that makes stock torch sample, so that bits depend on the machine; empty otherwise."""
        return "" if self.sampler.stock is None else f"mismatch.sampler.stock = {self.sampler.stock}"

    @property
    def same_precision(self) -> bool:
        """Return whether sampler and trainer use the same precision in a forward pass."""
        return self.sampler.stock is None and not self.sampler.precision.rounds
