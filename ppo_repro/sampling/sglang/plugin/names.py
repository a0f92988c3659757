"""Names that the trainer and its servers share."""

ATTENTION_BACKEND = "ppo_repro"
ARCHITECTURE = "PpoReproForCausalLM"
DIGEST = "ppo_repro.digest"  # for this name /get_weights_by_name returns the digest of all weights
