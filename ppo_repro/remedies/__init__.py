"""Published remedies for a sampler that is not the policy that is trained, as a configuration asks for them."""
