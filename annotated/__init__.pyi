"""The names of `annotated.__all__`, each with the module that defines it."""

from annotated.model.attention import scaled_dot_product_attention as scaled_dot_product_attention
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
    WordTokenizer as WordTokenizer,
    SubwordTokenizer as SubwordTokenizer,
    load_tokenizer as load_tokenizer,
)
from annotated.training.checkpoints import (
    save_checkpoint as save_checkpoint,
    load_checkpoint as load_checkpoint,
    average_checkpoints as average_checkpoints,
    book_model as book_model,
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
    translate as translate,
    greedy_decode as greedy_decode,
    beam_search as beam_search,
    sample as sample,
)
from annotated.fast.prepare import prepare as prepare
from annotated.translator import Translator as Translator, load as load
from annotated.views import look as look
from annotated.charts.attention import (
    attention_heatmap as attention_heatmap,
    attention_lines as attention_lines,
)

def lazy(package: str, homes: dict[str, str]): ...
