"""The engine of a run with what the configuration makes differ around it."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from ppo_repro.config.run import RunConfig
from ppo_repro.faults.flipping import FlippingEngine, flip_bit
from ppo_repro.faults.lagging import LaggingEngine
from ppo_repro.faults.retokenizing import RetokenizingEngine
from ppo_repro.models.state import TrainState
from ppo_repro.rollout.engine import Engine


def disturbed(config: RunConfig, engine: Engine, state: TrainState, tokenizer: PreTrainedTokenizerBase) -> Engine:
    """Wrap an engine: older weights, a first token changed, responses encoded again. The engine itself without any."""
    lag, share = config.mismatch.sampler.lag, config.mismatch.trainer.retokenize
    if config.mismatch.flip == "bit" and state.iteration == 0:
        flip_bit(state.policy)
    if config.mismatch.flip == "token":
        engine = FlippingEngine(engine, state)
    if lag:
        engine = LaggingEngine(engine, state, lag)
    return RetokenizingEngine(engine, tokenizer, share) if share else engine
