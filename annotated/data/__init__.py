"""Sentences: the toy language, corpora, cleaning, tokenizers, batches, ids on disk.

`toy_language`, `downloads`, `formats`, `corpora`, `cleaning`, `normalization`, `base_tokenizer`,
`tokenizers`, `sentencepiece`, `batches`, `prepared`
"""
