"""Translating: kept keys and values, search, scores, alignments.

`search`, `scores`, `alignment`
"""
