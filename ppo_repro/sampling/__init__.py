"""All that samples: the built-in engine, SGLang, the user's class, recorded samples, deliberate faults."""
