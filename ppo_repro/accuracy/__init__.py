"""How far deterministic numerics and stock float32 are from the model in float64."""
