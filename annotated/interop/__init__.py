"""Export to Hugging Face and CTranslate2, and import from Hugging Face.

`hf_tokenizers`, `hugging_face`, `ctranslate2`
"""
