"""Translation: the key-value cache, search, scores, alignments.

`search`, `scores`, `alignment`
"""
