"""Sentences: the toy language, corpora, their downloads, tokenizers, batches, ids on disk.

`toy_language`, `corpora`, `normalization`, `tokenizers`, `batches`, `downloads`, `prepared`
"""
