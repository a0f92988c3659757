"""How large are KL and entropy by token, word and response, and how much do they depend on the tokenizer?"""
