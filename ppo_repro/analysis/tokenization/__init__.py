"""How do the tokenizer and the unit of text change KL?"""
