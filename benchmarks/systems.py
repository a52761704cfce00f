"""The systems that are compared: how each builds its model, takes a training step and decodes.

All have dropout in the same places (the output of each sub-layer, and the sum of embeddings and
positions), fused Adam, and label-smoothed cross entropy. A process uses one system.
"""

import math
import tempfile

import torch
from torch import nn
from torch.nn import functional as F

from .workloads import BEGIN, END, PAD, SIZES, TARGET_LENGTH

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SUPPRESS = -1e4  # bias of the logit of a token that must not be generated; finite in half precision


def sinusoids(length, d_model):
    """Return the sinusoidal positional encoding in its usual form, (length, d_model)."""
    angles = torch.arange(length)[:, None] * torch.exp(
        torch.arange(0, d_model, 2) * (-math.log(10_000.0) / d_model))
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


class System:
    """A model with `train_step(batch, precision)` and `generate(source, beam, length)`.

    size: a name in `workloads.SIZES`; precision: of decoding, None to train. Subclasses define
    `build`, and `logits` or `generate`.
    """

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
            self.prepare_decoding(precision)

    def compile(self):
        """Compile what a training step calls."""
        self.model.compile()

    def prepare_decoding(self, precision):
        """Convert the model to a precision for decoding."""
        if precision not in self.precisions:
            raise ValueError(f"decodes in {', '.join(self.precisions)} only")
        self.model.to(DTYPES[precision])

    def set_parallelism(self, workers, threads):
        """Set the number of threads, and of the workers of systems that divide a batch
        themselves.
        """
        torch.set_num_threads(threads)

    def make_optimizer(self):
        return torch.optim.Adam(self.model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9,
                                fused=True)

    def train_step(self, batch, precision):
        """Do one update; returns the loss."""
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=precision == "bf16"):
            source, target_in, target_out = batch
            loss = F.cross_entropy(self.logits(source, target_in).flatten(0, 1),
                                   target_out.flatten(), ignore_index=PAD, label_smoothing=0.1)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def num_parameters(self):
        """Return the number of trained parameters."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)


class Annotated(System):
    """This library, through its public functions."""

    def build(self, N, d_model, d_ff, h, vocab_size, positions):
        from annotated.model.transformer import Transformer, TransformerConfig

        self.model = Transformer(TransformerConfig(vocab_size, N=N, d_model=d_model, d_ff=d_ff, h=h,
                                                   dropout=0.1, max_length=positions))

    def make_optimizer(self):
        from annotated.fast.prepare import prepare
        from annotated.training.loop import TrainingConfig, start_run

        self.run = start_run(prepare(self.model), TrainingConfig(max_tokens=100_000), ())
        return self.run.optimizer

    def compile(self):
        """Compile layer by layer, as `annotated train` does."""
        for layer in (*self.model.encoder.layers, *self.model.decoder.layers):
            layer.forward = torch.compile(layer.forward, dynamic=True)

    def train_step(self, batch, precision):
        """Do what `annotated.training.loop.train` does for each batch."""
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

    def prepare_decoding(self, precision):
        """Suppress the end token by the weights alone, so that the logits are computed as usual."""
        with torch.no_grad():
            self.model.decoder.layers[-1].residual[-1].norm.bias.fill_(1.0)
            self.model.embedding.weight[END] = -0.2  # its logit: -0.2 · d_model
        self.make_decoder(precision)

    def make_decoder(self, precision):
        """Decode with PyTorch and the prepared model in this precision."""
        from annotated.fast.prepare import prepare
        from annotated.translation.search import IncrementalDecoder

        super().prepare_decoding(precision)
        prepare(self.model)
        self.decoder = IncrementalDecoder

    def generate(self, source, beam, length=TARGET_LENGTH):
        from annotated.translation.search import beam_search, greedy_decode

        extra = length - source.size(1)
        if beam == 1:
            return greedy_decode(self.model, source, extra=extra, steps=self.decoder)
        return [hypotheses[0][0] for hypotheses in beam_search(
            self.model, source, beam, extra=extra, steps=self.decoder)]


class AnnotatedEngine(Annotated):
    """This library's engine on CTranslate2, with the number of workers that it chooses: one for
    each thread.
    """

    precisions = ("fp32", "bf16", "int8")

    def make_decoder(self, precision):
        """Make the checkpoint from which `annotated translate --engine ctranslate2` converts."""
        from annotated.data.tokenizers import WordTokenizer
        from annotated.training.checkpoints import Checkpoint

        words = [f"t{i}" for i in range(4, self.size.vocab_size)]
        self.checkpoint = Checkpoint(self.model, WordTokenizer(words), {})
        self.precision, self.engine = precision, None

    def set_parallelism(self, workers, threads):
        """Create the engine, which has as many workers as there are threads at that moment."""
        from annotated.fast.engines import make_engine

        super().set_parallelism(1, workers)
        if self.engine is None:
            self.engine = make_engine("ctranslate2", self.checkpoint, self.precision)
            if self.engine.name != "ctranslate2":
                raise ValueError(f"the engine does not compute this model in {self.precision}: see "
                                 "standard error")

    def generate(self, source, beam, length=TARGET_LENGTH):
        return self.engine.search(source.tolist(), beam, 0.6, length - source.size(1))


class TorchModel(nn.Module):
    """`torch.nn.Transformer` with the usual embeddings, positions and output projection."""

    def __init__(self, N, d_model, d_ff, h, vocab_size, positions):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model, padding_idx=PAD)
        nn.init.normal_(self.embedding.weight, std=d_model**-0.5)
        self.register_buffer("encoding", sinusoids(positions, d_model), persistent=False)
        self.dropout = nn.Dropout(0.1)
        self.transformer = nn.Transformer(d_model, h, N, N, d_ff, dropout=0.1, batch_first=True)
        self.generator = nn.Linear(d_model, vocab_size, bias=False)
        self.generator.weight = self.embedding.weight
        self.scale = math.sqrt(d_model)

    def embed(self, ids):
        return self.dropout(self.embedding(ids) * self.scale + self.encoding[: ids.size(1)])

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

    def logits(self, source, target_in):
        return self.model(source, target_in)


def marian_model(N, d_model, d_ff, h, vocab_size, positions):
    """Return a MarianMT model with random weights, the paper's activation and our special ids."""
    from transformers import MarianConfig, MarianMTModel

    config = MarianConfig(vocab_size=vocab_size, d_model=d_model, encoder_layers=N,
                          decoder_layers=N, encoder_ffn_dim=d_ff, decoder_ffn_dim=d_ff,
                          encoder_attention_heads=h, decoder_attention_heads=h, dropout=0.1,
                          attention_dropout=0.0, activation_dropout=0.0, activation_function="relu",
                          scale_embedding=True, max_position_embeddings=positions, pad_token_id=PAD,
                          eos_token_id=END, decoder_start_token_id=BEGIN, forced_eos_token_id=None,
                          share_encoder_decoder_embeddings=True, tie_word_embeddings=True)
    model = MarianMTModel(config)
    model.final_logits_bias[:, [END, PAD]] = SUPPRESS
    return model


class Marian(System):
    def build(self, *sizes):
        self.model = marian_model(*sizes)
        self.model.generation_config.forced_eos_token_id = None

    def logits(self, source, target_in):
        return self.model(input_ids=source, attention_mask=source != PAD,
                          decoder_input_ids=target_in, use_cache=False).logits

    @torch.inference_mode()
    def generate(self, source, beam, length=TARGET_LENGTH):
        output = self.model.generate(input_ids=source, attention_mask=(source != PAD).long(),
                                     num_beams=beam, do_sample=False, use_cache=True,
                                     max_new_tokens=length)  # END is suppressed
        return output[:, 1:].tolist()


class XTransformers(System):
    def build(self, N, d_model, d_ff, h, vocab_size, positions):
        from x_transformers import XTransformer

        stack = {"num_tokens": vocab_size, "depth": N, "heads": h,
                 "max_seq_len": 128, "attn_dim_head": d_model // h, "ff_mult": d_ff / d_model,
                 "ff_custom_activation": nn.ReLU(), "attn_flash": True, "emb_dropout": 0.1,
                 "ff_sublayer_dropout": 0.1, "attn_sublayer_dropout": 0.1}
        stacks = {f"{side}_{name}": value
                  for side in ("enc", "dec") for name, value in stack.items()}
        stacks["dec_cross_attn_sublayer_dropout"] = 0.1
        self.model = XTransformer(dim=d_model, tie_token_emb=True, ignore_index=PAD, pad_value=PAD,
                                  **stacks)
        self.model.decoder.net.to_logits.weight = self.model.encoder.token_emb.emb.weight

    def compile(self):
        """Compile encoder and decoder, which `logits` calls separately."""
        for part in (self.model.encoder, self.model.decoder.net):
            part.compile()

    def logits(self, source, target_in):
        mask = source != PAD
        memory = self.model.encoder(source, mask=mask, return_embeddings=True)
        return self.model.decoder.net(target_in, context=memory, context_mask=mask)


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
        """Compile the method that `logits` and the model's own `forward` call."""
        self.model._encode_decode = torch.compile(self.model._encode_decode)

    def logits(self, source, target_in):
        inputs = {"src": source, "src_length": (source != PAD).sum(dim=1),
                  "src_mask": (source != PAD).unsqueeze(1), "trg_input": target_in,
                  "trg_mask": (target_in != PAD).unsqueeze(1)}
        return self.model._encode_decode(**inputs)[0]


class CTranslate2(System):
    """A MarianMT model after CTranslate2's converter, which drops the padding from the
    vocabulary.
    """

    precisions = ("fp32", "bf16", "int8")
    COMPUTE_TYPES = {"fp32": "float32", "bf16": "bfloat16", "int8": "int8"}

    def build(self, *sizes):
        self.model = marian_model(*sizes)

    def prepare_decoding(self, precision):
        import ctranslate2
        from ctranslate2.converters import transformers as converters

        self.compute_type, self.setting = self.COMPUTE_TYPES[precision], None
        if self.compute_type not in ctranslate2.get_supported_compute_types(self.device.type):
            raise ValueError(f"CTranslate2 offers no {precision} on this machine")
        spec = converters.MarianMTLoader().get_model_spec(self.model)
        vocabulary = ["<unk>", "<s>", "</s>",
                      *(f"t{i}" for i in range(3, self.size.vocab_size - 1))]
        spec.register_source_vocabulary(vocabulary)
        spec.register_target_vocabulary(vocabulary)
        spec.config.unk_token = "<unk>"
        spec.config.eos_token = spec.config.decoder_start_token = "</s>"
        self.vocabulary, self.parameters = vocabulary, super().num_parameters()
        self.folder = tempfile.TemporaryDirectory()
        spec.validate()
        spec.optimize(quantization=None)
        spec.save(self.folder.name)
        del self.model

    def set_parallelism(self, workers, threads):
        """Create a translator for each setting, as its threads are fixed when it is created."""
        import ctranslate2

        super().set_parallelism(1, threads)
        if self.setting != (workers, threads):
            self.setting, self.translator = (workers, threads), None
            self.translator = ctranslate2.Translator(self.folder.name, self.device.type,
                                                     compute_type=self.compute_type,
                                                     inter_threads=workers,
                                                     intra_threads=threads)

    def num_parameters(self):
        return self.parameters

    def generate(self, source, beam, length=TARGET_LENGTH):
        texts = [[self.vocabulary[i] for i in row if i != PAD] for row in source.tolist()]
        # the batch of each worker; without a limit one worker takes all sentences
        share = math.ceil(len(texts) / self.setting[0])
        results = self.translator.translate_batch(texts, max_batch_size=share,
                                                  beam_size=beam, max_decoding_length=length,
                                                  min_decoding_length=length, length_penalty=0.6)
        return [result.hypotheses[0] for result in results]


SYSTEMS = {"annotated": Annotated, "annotated, CTranslate2": AnnotatedEngine, "torch": Torch,
           "marian": Marian, "x-transformers": XTransformers, "joeynmt": JoeyNMT,
           "ctranslate2": CTranslate2}


def make_system(name, *arguments):
    """Return the system of a name; "NAME, compiled" trains with `torch.compile`."""
    plain = name.removesuffix(", compiled")
    return SYSTEMS[plain](*arguments, compiled=name != plain)
