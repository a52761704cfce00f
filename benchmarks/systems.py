"""The systems that are compared: how each is built, trained for a step, and made to write. One
process uses one of them.

All have dropout in the same places (what each sub-layer gives, and embeddings with positions), Adam
fused, and smoothed cross entropy.
"""

import math
import tempfile

import torch
from torch import nn
from torch.nn import functional as F

from .work import BEGIN, END, PAD, SIZES, WRITTEN

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NEVER = -1e4  # added to the logit of what must not be written; finite in all precisions


def smoothed(logits, target):
    """The loss of those that bring none."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD,
                           label_smoothing=0.1)


def sinusoids(length, d_model):
    """The positional encoding as people write it."""
    angles = torch.arange(length)[:, None] * torch.exp(
        torch.arange(0, d_model, 2) * (-math.log(10_000.0) / d_model))
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


class System:
    """A model with `train_step(batch)` and `write(source, beam)`; the defaults suit most."""

    precisions = ("fp32", "bf16")  # of decoding

    def __init__(self, size, precision=None, device="cpu", compiled=False):
        self.size, self.device = SIZES[size], torch.device(device)
        torch.manual_seed(0)
        self.build(*(getattr(self.size, name)
                     for name in ("N", "d_model", "d_ff", "h", "vocab_size", "positions")))
        self.model.to(self.device)
        if precision is None:
            self.model.train()
            self.optimizer = self.make_optimizer()
            if compiled:
                self.compile()
        else:
            self.model.eval()
            self.prepare(precision)

    def compile(self):
        """Have `torch.compile` fuse the operations of training."""
        self.model.compile()

    def prepare(self, precision):
        """Make the model ready to write in a precision."""
        if precision not in self.precisions:
            raise ValueError(f"writes in {', '.join(self.precisions)} only")
        self.model.to(DTYPES[precision])

    def arrange(self, workers, threads):
        """Set how many threads the next work takes.

        `workers` matters to those that share a batch by themselves.
        """
        torch.set_num_threads(threads)

    def make_optimizer(self):
        return torch.optim.Adam(self.model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9,
                                fused=True)

    def train_step(self, batch, precision):
        """One update; the loss."""
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = self.loss(batch)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def parameters(self):
        """How many numbers are trained."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)


class Annotated(System):
    """The library of the book, through its own functions."""

    def build(self, N, d_model, d_ff, h, vocab_size, positions):
        from annotated.model.transformer import Transformer, TransformerConfig

        self.model = Transformer(TransformerConfig(vocab_size, N=N, d_model=d_model, d_ff=d_ff, h=h,
                                                   dropout=0.1, max_length=positions))

    def make_optimizer(self):
        from annotated.fast.prepare import prepare
        from annotated.training.loop import TrainingConfig, start_run

        self.configs = {precision: TrainingConfig(precision=precision, max_tokens=100_000)
                        for precision in DTYPES}
        self.run = start_run(prepare(self.model), self.configs["fp32"], ())
        return self.run.optimizer

    def compile(self):
        """Layer by layer, as `annotated train` does."""
        for layer in (*self.model.encoder.layers, *self.model.decoder.layers):
            layer.forward = torch.compile(layer.forward, dynamic=True)

    def train_step(self, batch, precision):
        """What `annotated.training.loop.train` does for each batch."""
        from annotated.data.batches import Batch
        from annotated.fast.chunked_loss import ChunkedLoss
        from annotated.training.loop import forward_backward, update_weights

        criterion = ChunkedLoss(0.1, PAD, reduction="sum")
        self.run.optimizer.zero_grad()
        batch = Batch(*batch)
        loss = forward_backward(self.model, [batch], batch.tokens, criterion, precision).item()
        update_weights(self.model, self.run.optimizer)
        self.run.schedule.step()
        return loss

    def prepare(self, precision):
        """End is made impossible by the weights alone, so that whatever computes the logits
        computes them as ever.
        """
        with torch.no_grad():
            self.model.decoder.layers[-1].residual[-1].norm.bias.fill_(1.0)
            self.model.embedding.weight[END] = -0.2  # its logit: -0.2 · d_model
        self.make_steps(precision)

    def make_steps(self, precision):
        """What computes a step: PyTorch, with the prepared model in this precision."""
        from annotated.fast.prepare import prepare
        from annotated.translation.search import IncrementalDecoder

        super().prepare(precision)
        prepare(self.model)
        self.steps = IncrementalDecoder

    def write(self, source, beam, tokens=WRITTEN):
        from annotated.translation.search import beam_search, greedy_decode

        extra = tokens - source.size(1)
        if beam == 1:
            return greedy_decode(self.model, source, extra=extra, steps=self.steps)
        return [found[0][0]
                for found in beam_search(self.model, source, beam, extra=extra, steps=self.steps)]


class AnnotatedEngine(Annotated):
    """The library's engine on CTranslate2, with as many workers as it takes by itself: one for each
    thread.
    """

    precisions = ("fp32", "bf16", "int8")

    def make_steps(self, precision):
        """Another library computes: a folder for it, as `annotated translate --engine ctranslate2`
        makes it.
        """
        from annotated.data.tokenizers import WordTokenizer
        from annotated.training.checkpoints import Checkpoint

        words = [f"t{i}" for i in range(4, self.size.vocab_size)]
        self.saved, self.precision, self.engine = Checkpoint(self.model, WordTokenizer(words),
                                                             {}), precision, None

    def arrange(self, workers, threads):
        """An engine has as many workers as there are threads when it is made."""
        from annotated.fast.engines import make_engine

        super().arrange(1, workers)
        if self.engine is None:
            self.engine = make_engine("ctranslate2", self.saved, self.precision)
            if self.engine.name != "ctranslate2":
                raise ValueError(f"the engine does not compute this model in {self.precision}: see "
                                 "standard error")

    def write(self, source, beam, tokens=WRITTEN):
        return self.engine.search(source.tolist(), beam, 0.6, tokens - source.size(1))


class TorchModel(nn.Module):
    """`torch.nn.Transformer` with the usual embeddings, positions and generator."""

    def __init__(self, N, d_model, d_ff, h, vocab_size, positions):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model, padding_idx=PAD)
        nn.init.normal_(self.embedding.weight, std=d_model**-0.5)
        self.register_buffer("table", sinusoids(positions, d_model), persistent=False)
        self.dropout = nn.Dropout(0.1)
        self.transformer = nn.Transformer(d_model, h, N, N, d_ff, dropout=0.1, batch_first=True)
        self.generator = nn.Linear(d_model, vocab_size, bias=False)
        self.generator.weight = self.embedding.weight
        self.scale = math.sqrt(d_model)

    def embed(self, ids):
        return self.dropout(self.embedding(ids) * self.scale + self.table[: ids.size(1)])

    def encode(self, source):
        return self.transformer.encoder(self.embed(source), src_key_padding_mask=source == PAD)

    def decode(self, target, memory, source_padding, target_padding=None):
        causal = torch.triu(torch.ones(target.size(1), target.size(1), dtype=torch.bool,
                                       device=target.device), diagonal=1)
        return self.transformer.decoder(
            self.embed(target), memory, tgt_mask=causal, tgt_key_padding_mask=target_padding,
            memory_key_padding_mask=source_padding, tgt_is_causal=target_padding is None)

    def forward(self, source, target):
        hidden = self.decode(target, self.encode(source), source == PAD, target == PAD)
        return self.generator(hidden)


class Torch(System):
    def build(self, *sizes):
        self.model = TorchModel(*sizes)
        for layer in (*self.model.transformer.encoder.layers,
                      *self.model.transformer.decoder.layers):
            layer.dropout.p = layer.self_attn.dropout = 0.0
            if hasattr(layer, "multihead_attn"):
                layer.multihead_attn.dropout = 0.0

    def loss(self, batch):
        source, target_in, target_out = batch
        return smoothed(self.model(source, target_in), target_out)


def marian_model(N, d_model, d_ff, h, vocab_size, positions):
    """MarianMT with random weights, its activation the one of the paper.

    The pad, begin and end ids are ours.
    """
    from transformers import MarianConfig, MarianMTModel

    config = MarianConfig(vocab_size=vocab_size, d_model=d_model, encoder_layers=N,
                          decoder_layers=N, encoder_ffn_dim=d_ff, decoder_ffn_dim=d_ff,
                          encoder_attention_heads=h, decoder_attention_heads=h, dropout=0.1,
                          attention_dropout=0.0, activation_dropout=0.0, activation_function="relu",
                          scale_embedding=True, max_position_embeddings=positions, pad_token_id=PAD,
                          eos_token_id=END, decoder_start_token_id=BEGIN, forced_eos_token_id=None,
                          share_encoder_decoder_embeddings=True, tie_word_embeddings=True)
    model = MarianMTModel(config)
    for position in (END, PAD):
        model.final_logits_bias[:, position] = NEVER
    return model


class Marian(System):
    def build(self, *sizes):
        self.model = marian_model(*sizes)
        self.model.generation_config.forced_eos_token_id = None

    def loss(self, batch):
        source, target_in, target_out = batch
        return smoothed(self.model(input_ids=source, attention_mask=source != PAD,
                                   decoder_input_ids=target_in).logits, target_out)

    @torch.inference_mode()
    def write(self, source, beam, tokens=WRITTEN):
        out = self.model.generate(input_ids=source, attention_mask=(source != PAD).long(),
                                  num_beams=beam, do_sample=False, use_cache=True,
                                  min_new_tokens=tokens, max_new_tokens=tokens)
        return out[:, 1:].tolist()


class XTransformers(System):
    def build(self, N, d_model, d_ff, h, vocab_size, positions):
        from x_transformers import XTransformer

        stack = {"num_tokens": vocab_size, "depth": N, "heads": h,
                 "max_seq_len": 128, "attn_dim_head": d_model // h, "ff_mult": d_ff / d_model,
                 "ff_custom_activation": nn.ReLU(), "attn_flash": True, "emb_dropout": 0.1,
                 "ff_sublayer_dropout": 0.1, "attn_sublayer_dropout": 0.1}
        both = {f"{side}_{name}": value for side in ("enc", "dec") for name, value in stack.items()}
        both["dec_cross_attn_sublayer_dropout"] = 0.1
        self.model = XTransformer(dim=d_model, tie_token_emb=True, ignore_index=PAD, pad_value=PAD,
                                  **both)
        self.model.decoder.net.to_logits.weight = self.model.encoder.token_emb.emb.weight

    def compile(self):
        """All that `loss` calls."""
        for part in (self.model.encoder, self.model.decoder.net):
            part.compile()

    def loss(self, batch):
        source, target_in, target_out = batch
        mask = source != PAD
        memory = self.model.encoder(source, mask=mask, return_embeddings=True)
        return smoothed(self.model.decoder.net(target_in, context=memory, context_mask=mask),
                        target_out)


class JoeyNMT(System):
    def build(self, N, d_model, d_ff, h, vocab_size, positions):
        from types import SimpleNamespace

        from joeynmt.model import build_model
        from joeynmt.vocabulary import Vocabulary

        special = SimpleNamespace(pad_token="<pad>", bos_token="<s>", eos_token="</s>",
                                  unk_token="<unk>", sep_token=None, lang_tags=[], unk_id=0,
                                  pad_id=1, bos_id=2, eos_id=3)
        vocabulary = Vocabulary([f"t{i}" for i in range(4, vocab_size)], special)
        vocabulary.unk_index, vocabulary.pad_index = 3, PAD
        vocabulary.bos_index, vocabulary.eos_index = BEGIN, END
        stack = {"type": "transformer", "num_layers": N, "num_heads": h,
                 "hidden_size": d_model, "ff_size": d_ff, "dropout": 0.1, "layer_norm": "post",
                 "embeddings": {"embedding_dim": d_model, "scale": True, "dropout": 0.1}}
        self.model = build_model({"encoder": stack, "decoder": stack, "tied_embeddings": True,
                                  "tied_softmax": True, "initializer": "xavier_uniform",
                                  "embed_initializer": "xavier_uniform"}, vocabulary, vocabulary)
        self.model.loss_function = ("crossentropy", 0.1)
        for module in self.model.modules():
            if type(module).__name__ == "MultiHeadedAttention":
                module.dropout.p = 0.0
            if type(module).__name__ == "PositionwiseFeedForward":
                module.pwff_layer[2].p = 0.0

    def compile(self):
        """What `loss` and the model's own `forward` call."""
        self.model._encode_decode = torch.compile(self.model._encode_decode)

    def loss(self, batch):
        source, target_in, target_out = batch
        inputs = {"src": source, "src_length": (source != PAD).sum(dim=1),
                  "src_mask": (source != PAD).unsqueeze(1), "trg_input": target_in,
                  "trg_mask": (target_in != PAD).unsqueeze(1)}
        return smoothed(self.model._encode_decode(**inputs)[0], target_out)


class CTranslate2(System):
    """The weights of a MarianMT model through CTranslate2's converter, which leaves one type, the
    padding, out.
    """

    precisions = ("fp32", "bf16", "int8")
    KINDS = {"fp32": "float32", "bf16": "bfloat16", "int8": "int8"}

    def build(self, *sizes):
        self.model = marian_model(*sizes)

    def prepare(self, precision):
        import ctranslate2
        from ctranslate2.converters import transformers as converters

        if self.KINDS[precision] not in ctranslate2.get_supported_compute_types(self.device.type):
            raise ValueError(f"CTranslate2 offers no {precision} on this machine")
        spec = converters.MarianMTLoader().get_model_spec(self.model)
        names = ["<unk>", "<s>", "</s>", *(f"t{i}" for i in range(3, self.size.vocab_size - 1))]
        spec.register_source_vocabulary(names)
        spec.register_target_vocabulary(names)
        spec.config.unk_token = "<unk>"
        spec.config.eos_token = spec.config.decoder_start_token = "</s>"
        self.names, self.count = names, super().parameters()
        self.folder = tempfile.TemporaryDirectory()
        self.kind, self.setting = self.KINDS[precision], None
        spec.validate()
        spec.optimize(quantization=None)
        spec.save(self.folder.name)
        del self.model

    def arrange(self, workers, threads):
        """Threads are given to a translator as it is made: a new one for each setting."""
        import ctranslate2

        super().arrange(1, threads)
        if self.setting != (workers, threads):
            self.setting, self.translator = (workers, threads), None
            self.translator = ctranslate2.Translator(self.folder.name, self.device.type,
                                                     compute_type=self.kind, inter_threads=workers,
                                                     intra_threads=threads)

    def parameters(self):
        return self.count

    def write(self, source, beam, tokens=WRITTEN):
        texts = [[self.names[i] for i in row if i != PAD] for row in source.tolist()]
        # of each worker; without it one worker takes them all
        share = math.ceil(len(texts) / self.setting[0])
        found = self.translator.translate_batch(texts, max_batch_size=share,
                                                beam_size=beam, max_decoding_length=tokens,
                                                min_decoding_length=tokens, length_penalty=0.6)
        return [result.hypotheses[0] for result in found]


SYSTEMS = {"annotated": Annotated, "annotated, CTranslate2": AnnotatedEngine, "torch": Torch,
           "marian": Marian, "x-transformers": XTransformers, "joeynmt": JoeyNMT,
           "ctranslate2": CTranslate2}


def make(name, *arguments):
    """The system of this name; "…, compiled" is trained with `torch.compile`."""
    plain = name.removesuffix(", compiled")
    return SYSTEMS.get(name, SYSTEMS[plain])(*arguments, compiled=name != plain)
