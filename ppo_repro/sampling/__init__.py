"""Sample for a run: by the built-in sampler, SGLang, the user's class or recorded samples, with deliberate faults."""
