"""Sample with SGLang servers from the trainer's side. `plugin` runs inside the servers."""
