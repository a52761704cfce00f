"""Export to Hugging Face and CTranslate2, and import from Hugging Face.

`hugging_face`, `ctranslate2`
"""
