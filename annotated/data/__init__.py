"""Sentences: the toy language, corpora, cleaning, tokenizers, batches, ids on disk.

`toy_language`, `downloads`, `corpora`, `cleaning`, `normalization`, `tokenizers`, `batches`,
`prepared`
"""
