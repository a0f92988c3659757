"""Prepare a run from its configuration: task, networks, optimizers, sampler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from ppo_repro.base.errors import UserError
from ppo_repro.base.mode import Mode, is_deterministic_mode
from ppo_repro.base.ranks import ALONE, Ranks
from ppo_repro.base.watcher import Watcher
from ppo_repro.buffers import WarmStartStep
from ppo_repro.config.model import ModelFolder, TinyModel
from ppo_repro.config.rollout import SGLangServers
from ppo_repro.config.run import RunConfig
from ppo_repro.config.tasks import RewardModelFolder
from ppo_repro.models.folders import load_reward_model, require_same_tokens, try_to_save
from ppo_repro.models.load import load_folder, stop_ids
from ppo_repro.models.lora import Lora
from ppo_repro.models.reward_model import make_reward_model
from ppo_repro.models.state import TrainState
from ppo_repro.models.tiny import check_spelling, make_model, make_tokenizer
from ppo_repro.numerics import library
from ppo_repro.numerics.devices import kernels_of, torch_device
from ppo_repro.numerics.families import routers
from ppo_repro.preferences.preference_pairs import hold_out, pairs_by_rule, pairs_of_file
from ppo_repro.preferences.training import RewardTraining, train_reward_model
from ppo_repro.runs.train_state import train_state
from ppo_repro.runs.warm_start import warm_start
from ppo_repro.sampling.built_in import BuiltInSampler
from ppo_repro.sampling.faults.logits import logits_fault
from ppo_repro.sampling.faults.trainer import check_training_prompts, received
from ppo_repro.stages.rollout import Task
from ppo_repro.tasks.dialogue import Environment
from ppo_repro.tasks.problems import Split, load_source
from ppo_repro.tasks.rewards import for_source, load_judge
from ppo_repro.tasks.templates import encode_all, encoder, end_token_warning
from ppo_repro.tasks.tokenizer import spelled_tokens
from ppo_repro.user.functions import load_functions
from ppo_repro.user.process import UserProcess
from ppo_repro.user.trial import try_functions

EVAL_PAIRS = 256  # from held-out prompts, without label noise, to judge a reward model by


@dataclass(frozen=True)
class Prepared:
    """A run before its first iteration."""

    task: Task
    state: TrainState
    sampler: BuiltInSampler
    warm_start: tuple[WarmStartStep, ...]  # empty if there was no warm start here
    reward_training: RewardTraining | None  # None unless a reward model was trained here
    lora: Lora | None  # None if all weights of the policy are trained


def _source(
    config: RunConfig, problems: Split, start_folder: Path | None, device: torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model from which policy, value model and reference are copied, before any warm start."""
    model, max_context = config.model, config.numerics.max_context
    if start_folder is not None:
        source, tokenizer = load_folder(start_folder)
    elif isinstance(model, ModelFolder):
        source, tokenizer = load_folder(Path(model.path))
        try_to_save(source, tokenizer, f"model.path = {model.path}")
    else:
        tokenizer = make_tokenizer(problems.train, model.vocab_size, model.tokenizer)
        source = make_model(model, len(tokenizer), max_context, tokenizer.eos_token_id, config.seed)
    if isinstance(model, TinyModel):  # a fork may have other prompts
        check_spelling(tokenizer, [*problems.train, *problems.held_out])
    nn.Module.to(source, device)
    return source, tokenizer


def _reward_model(
    config: RunConfig,
    problems: Split,
    prompt_ids: Mapping[str, tuple[int, ...]],
    tokenizer: PreTrainedTokenizerBase,
    source: PreTrainedModel,
    watcher: Watcher,
    ranks: Ranks,
) -> tuple[PreTrainedModel | None, RewardTraining | None]:
    """Load or train the frozen reward model; None if there is none. The training is None for a loaded model."""
    term, numerics = config.reward.model, config.numerics
    if term is None:
        return None, None
    if isinstance(term, RewardModelFolder):
        folder, max_context = Path(term.path), numerics.max_context
        loaded, its_tokenizer = load_reward_model(folder, numerics.mode, max_context, numerics.precision)
        require_same_tokens(tokenizer, its_tokenizer)
        nn.Module.to(loaded, source.device)
        return loaded.requires_grad_(False), None
    model = make_reward_model(source, numerics.mode, numerics.max_context, config.seed, numerics.precision)
    if term.pairs is not None:
        encode = encoder(tokenizer, config.task)
        field = "reward.terms: pairs"
        given = pairs_of_file(Path(term.pairs), field, tokenizer, encode, config.task.chat_template)
        prompts = len({pair.prompt_key for pair in given})
        pairs, eval_pairs = hold_out(given, max(1, prompts // 10), config.seed)
    else:
        count, noise, seed = term.num_pairs or 0, term.label_noise, config.seed
        pairs = pairs_by_rule(problems.train, prompt_ids, tokenizer, count, noise, seed)
        eval_pairs = pairs_by_rule(problems.held_out, prompt_ids, tokenizer, EVAL_PAIRS, 0.0, seed)
    progress = partial(watcher.step, "reward model")
    training = train_reward_model(
        model, pairs, eval_pairs, term, config.numerics, config.layout, config.seed, progress, ranks
    )
    return model.requires_grad_(False), training


def _encoded(
    config: RunConfig,
    problems: Split,
    tokenizer: PreTrainedTokenizerBase,
    end_tokens: frozenset[int],
    vocab_size: int,
    watcher: Watcher,
) -> tuple[Split, dict[str, tuple[int, ...]]]:
    """Return the prompts, and the token ids of each by its key. Raises UserError for a prompt that cannot be used."""
    problems, ids = encode_all(problems, encoder(tokenizer, config.task), config, vocab_size, watcher)
    if ended := end_token_warning(tokenizer, list(ids.values()), end_tokens, config.task.chat_template):
        watcher.warning(ended)
    check_training_prompts(config, tokenizer, ids)
    return problems, ids


def _check_model(config: RunConfig, source: PreTrainedModel) -> None:
    """Raise UserError if a run cannot sample or train this model as configured: its experts, or its vocabulary."""
    kind, mixture, engine = type(source).__name__, bool(routers(source)), config.rollout.engine
    if mixture and isinstance(engine, SGLangServers) and engine.numerics == "stock":
        raise UserError(
            f"rollout.engine.numerics = stock: SGLang's own experts have not the weights of a {kind} here; set "
            "deterministic, or rollout.engine.kind = torch"
        )
    if config.ppo.replay_routes and not mixture:
        raise UserError(f"ppo.replay_routes = true: needs a mixture of experts, and {kind} has no router; remove it")
    if config.rollout.top_k > source.config.vocab_size:
        tokens = f"the vocabulary has {source.config.vocab_size} tokens"
        raise UserError(f"rollout.top_k = {config.rollout.top_k}: {tokens}")


def _built_in(config: RunConfig, state: TrainState, end_tokens: frozenset[int]) -> BuiltInSampler:
    """Make the built-in sampler on the policy, or on the policy's copy for the sampler."""
    layout = config.layout
    return BuiltInSampler(
        state.sampler or state.policy,
        end_tokens,
        config.numerics.mode,
        config.numerics.max_context,
        seats=layout.rollout_slots,
        prefill_chunk=layout.prefill_chunk,
        prefix_cache=layout.prefix_cache,
        live=None if config.mismatch.sampler.stock is None else state.policy,
        disturb=logits_fault(config.rollout.mismatch_sigma, config.mismatch.sampler.token_bias, config.seed),
    )


def usable_device(name: str, mode: Mode, ranks: Ranks) -> torch.device:
    """Return torch's device for `layout.device`. Raises UserError if the numerics do not compute there."""
    device = torch_device(name, ranks.rank)
    if is_deterministic_mode(mode):
        kernels_of(device)
    elif device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"layout.device = {name}: torch sees no CUDA device here; take cpu")
    return device


def prepare(
    config: RunConfig,
    watcher: Watcher,
    start_folder: Path | None = None,
    share: bool = False,
    ranks: Ranks = ALONE,
) -> Prepared:
    """Load or make everything that a run begins with.

    Args:
        watcher: receives each step of a warm start.
        start_folder: the model that an earlier process of this run left as the start of policy, value model and
            reference; it replaces the model of the configuration and its warm start.
        share: let adapted models share the weights that they do not train with the reference, or with the reward model
            from which the value model starts. Only for callers that train by the optimizers in the state.

    Raises:
        UserError: names what the user has to correct.
    """
    numerics = config.numerics
    library.use_threads(config.layout.threads, numerics.mode == "native" or config.mismatch.sampler.stock is not None)
    device = usable_device(config.layout.device, numerics.mode, ranks)
    disable_progress_bar()  # the run prints its own progress
    process = UserProcess()
    judge = load_judge(config.reward, process)
    prompts = load_source(config.task, config.seed, process)
    judge = for_source(judge, prompts, config.task)
    functions = load_functions(config.functions)
    try_functions(config, functions)
    source, tokenizer = _source(config, prompts.problems, start_folder, device)
    # checked here, before the minutes of a warm start
    ends = stop_ids(source, tokenizer)
    problems, ids = _encoded(config, prompts.problems, tokenizer, ends, source.config.vocab_size, watcher)
    stop, most = config.rollout.stop, config.rollout.max_response_tokens
    spelled = spelled_tokens(tokenizer, [*judge.asked_texts, *stop])
    environment = Environment(config.task, stop, most, tokenizer, spelled, prompts.step)
    _check_model(config, source)
    steps: tuple[WarmStartStep, ...] = ()
    if start_folder is None and isinstance(config.model, TinyModel):
        progress = partial(watcher.step, "warm start")
        steps = warm_start(source, tokenizer, problems.train, config.model, numerics, config.seed, progress)
    reward_model, reward_training = _reward_model(config, problems, ids, tokenizer, source, watcher, ranks)
    as_received = partial(received, config.mismatch.trainer, tokenizer=tokenizer)
    task = Task(problems, ids, judge, reward_model, tokenizer, environment, functions, as_received)
    state, lora = train_state(config, source, reward_model, share, ranks)
    return Prepared(task, state, _built_in(config, state, ends), steps, reward_training, lora)
