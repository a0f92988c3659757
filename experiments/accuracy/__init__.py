"""How accurate the deterministic numerics and stock transformers are, beside the model in float64."""
