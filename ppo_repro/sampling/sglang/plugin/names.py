"""Names that the trainer and its servers share."""

from ppo_repro.base.mode import Precision

ATTENTION_BACKEND = "ppo_repro"
# SGLang finds the model by this name and each server reports it, so the name says the precision
ARCHITECTURES: dict[Precision, str] = {"highest": "PpoReproForCausalLM", "high": "PpoReproHighForCausalLM"}
DIGEST = "ppo_repro.digest"  # for this name /get_weights_by_name returns the digest of all weights
