"""How far apart are two log-probs of the same tokens, and at which tokens?"""
