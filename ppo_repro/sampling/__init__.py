"""The samplers of a run: the built-in engine, SGLang, the user's class, recorded samples, deliberate faults."""
