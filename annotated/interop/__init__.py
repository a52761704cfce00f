"""Out into other libraries: Hugging Face and CTranslate2.

`hugging_face`, `ctranslate2`
"""
