"""Attention Is All You Need as a library: each module is exported from the notebook of its name."""
