"""How far apart are two log-probs of the same tokens, where, and what does it cost?"""
