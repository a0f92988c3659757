"""What do the tokenizer and the unit of text do to KL?"""
