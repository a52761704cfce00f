"""Attention Is All You Need as a library; each module is exported from the page of its name.

Packages: `model`, `data`, `training`, `translation`, `paper`, `interop`, `fast`, `charts`; the
docstring of each says what it holds. The names in `__all__` are loaded when they are first used.
"""

import sys
from importlib import import_module

TYPE_CHECKING = False  # true for type checkers; to import `typing` would take as long as all else
if TYPE_CHECKING:
    from annotated.model.attention import (
        scaled_dot_product_attention as scaled_dot_product_attention,
    )
    from annotated.model.masking import causal_mask as causal_mask, padding_mask as padding_mask
    from annotated.model.multi_head import (
        MultiHeadAttention as MultiHeadAttention,
        record_attention as record_attention,
    )
    from annotated.model.positional import sinusoidal_encoding as sinusoidal_encoding
    from annotated.model.transformer import (
        Transformer as Transformer,
        TransformerConfig as TransformerConfig,
    )
    from annotated.data.batches import Batch as Batch, token_batches as token_batches
    from annotated.data.corpora import Corpus as Corpus, load_corpus as load_corpus
    from annotated.data.tokenizers import (
        SubwordTokenizer as SubwordTokenizer,
        WordTokenizer as WordTokenizer,
        load_tokenizer as load_tokenizer,
    )
    from annotated.training.checkpoints import (
        average_checkpoints as average_checkpoints,
        book_model as book_model,
        load_checkpoint as load_checkpoint,
        save_checkpoint as save_checkpoint,
    )
    from annotated.training.label_smoothing import LabelSmoothingLoss as LabelSmoothingLoss
    from annotated.training.loop import (
        TrainingConfig as TrainingConfig,
        train as train,
        train_on as train_on,
    )
    from annotated.training.schedule import NoamSchedule as NoamSchedule, noam_rate as noam_rate
    from annotated.translation.scores import bleu_report as bleu_report
    from annotated.translation.search import (
        beam_search as beam_search,
        greedy_decode as greedy_decode,
        sample as sample,
        translate as translate,
    )
    from annotated.fast.prepare import prepare as prepare
    from annotated.translator import Translator as Translator, load as load
    from annotated.views import look as look
    from annotated.charts.attention import (
        attention_heatmap as attention_heatmap,
        attention_lines as attention_lines,
    )

_HOMES = {
    "scaled_dot_product_attention": "model.attention",
    "causal_mask": "model.masking", "padding_mask": "model.masking",
    "MultiHeadAttention": "model.multi_head", "record_attention": "model.multi_head",
    "sinusoidal_encoding": "model.positional",
    "Transformer": "model.transformer", "TransformerConfig": "model.transformer",
    "Batch": "data.batches", "token_batches": "data.batches",
    "Corpus": "data.corpora", "load_corpus": "data.corpora",
    "WordTokenizer": "data.tokenizers", "SubwordTokenizer": "data.tokenizers",
    "load_tokenizer": "data.tokenizers",
    "save_checkpoint": "training.checkpoints", "load_checkpoint": "training.checkpoints",
    "average_checkpoints": "training.checkpoints", "book_model": "training.checkpoints",
    "LabelSmoothingLoss": "training.label_smoothing",
    "TrainingConfig": "training.loop", "train": "training.loop", "train_on": "training.loop",
    "NoamSchedule": "training.schedule", "noam_rate": "training.schedule",
    "bleu_report": "translation.scores",
    "translate": "translation.search", "greedy_decode": "translation.search",
    "beam_search": "translation.search", "sample": "translation.search",
    "prepare": "fast.prepare",
    "Translator": "translator", "load": "translator",
    "look": "views",
    "attention_heatmap": "charts.attention", "attention_lines": "charts.attention",
}
__all__ = list(_HOMES)



def lazy(package, homes):
    """(`__getattr__`, `__dir__`) of a package whose names are loaded when they are asked for.

    homes: {name: module of the package that defines it}.
    """
    space = sys.modules[package].__dict__

    def load(name):
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        space[name] = getattr(import_module(f"{package}.{homes[name]}"), name)
        return space[name]

    return load, lambda: sorted({*space, *homes})


__getattr__, __dir__ = lazy(__name__, _HOMES)
