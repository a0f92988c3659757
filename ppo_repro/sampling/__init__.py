"""Sample for a run: by the built-in engine, SGLang, the user's class or recorded samples, with deliberate faults."""
