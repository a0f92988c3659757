"""The command `python -m analysis.tokenization`: what do tokenizer and unit do to KL?"""

from analysis.tokenization.tables import main

main()
