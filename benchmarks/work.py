"""What is measured: sizes, batches, the operations and bytes that the work needs at least, and the list of cells."""

from dataclasses import dataclass, replace

import numpy as np

PAD, BEGIN, END = 0, 1, 2
TOKENS = 2048  # target tokens of a training batch, about
SOURCE, WRITTEN = 25, 40  # decoding: tokens of a source sentence, end token counted, and tokens written to each
LENGTHS = {"mean": 27, "sigma": 0.55, "longest": 100}  # of the ragged sentences
POOL = 20_000  # ragged pairs that batches are cut from: as in a corpus, a batch finds others of its length


@dataclass(frozen=True)
class Size:
    """Sizes in the paper's symbols; the embeddings and the output projection share one matrix."""

    N: int
    d_model: int
    d_ff: int
    h: int
    vocab_size: int

    @property
    def weights(self):
        """Numbers in the matrices: (encoder stack, decoder stack, embedding)."""
        d, f = self.d_model, self.d_ff
        return self.N * (4 * d * d + 2 * d * f), self.N * (8 * d * d + 2 * d * f), d * self.vocab_size


SIZES = {"base": Size(6, 512, 2048, 8, 37_000), "tiny": Size(4, 128, 256, 4, 8000)}


def ragged_lengths(count, seed=0, mean=LENGTHS["mean"], sigma=LENGTHS["sigma"], longest=LENGTHS["longest"]):
    """(count, 2) lengths of source and target, log-normal about `mean`, 1 to `longest`; a pair's two are alike."""
    draw = np.random.default_rng(seed)
    source = draw.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    target = source * draw.lognormal(-0.15**2 / 2, 0.15, count)
    return np.clip(np.stack([source, target], axis=1).round(), 2, longest).astype(int)


def equal_lengths(tokens=TOKENS, length=32):
    """(pairs, 2) lengths of one batch of sentences of one length."""
    return np.full((tokens // length, 2), length)


def sentences(lengths, vocab_size, seed=0):
    """Pairs of lists of random ids, without begin and end, that take as many tokens as `lengths` say with their ends."""
    draw = np.random.default_rng(seed)
    return [tuple(draw.integers(4, vocab_size - 1, length - 1).tolist() for length in pair) for pair in lengths.tolist()]


def cut(lengths, order, tokens=TOKENS, seed=0):
    """Lists of indices, one for each batch: "bucketed" (like with like, `tokens` padded ones a batch) or "random".

    Random batches hold a fixed number of sentences drawn blindly, `tokens` real target tokens on average: a shuffled
    loader with a batch size.
    """
    if order == "bucketed":
        from annotated.batches import token_batches

        return [batch.tolist() for batch in token_batches(lengths, tokens, seed=seed)]
    indices = np.random.default_rng(seed).permutation(len(lengths))
    parts = max(1, round(lengths[:, 1].sum() / tokens))
    return [part.tolist() for part in np.array_split(indices, parts)]


# -- what the work needs at least -----------------------------------------------------------------------------------


def forward_flops(size, lengths):
    """Floating-point operations of the matrix products of one forward pass over sentences, without any padding."""
    d, total = size.d_model, 0
    encoder, decoder, vocabulary = size.weights
    per_source = encoder + size.N * 2 * d * d  # the memory's keys and values are made once a source token
    per_target = decoder - size.N * 2 * d * d + vocabulary
    for n, m in np.asarray(lengths).tolist():
        total += 2 * (n * per_source + m * per_target) + 4 * d * size.N * (n * n + m * m + m * n)
    return total


def training_floor(size, lengths, steps, rates, precision):
    """Seconds that `steps` updates over these sentences take at the least, in two phases that follow each other.

    Matrix products: three times those of a forward pass, at the measured rate. Update: Adam reads weights, gradients
    and two running means and writes three of them, all in fp32.
    """
    bytes_moved = 7 * 4 * sum(size.weights) * steps
    return 3 * forward_flops(size, lengths) / rates[precision] + bytes_moved / rates["bandwidth"]


def decoding_floor(size, rows, beam, rates, precision, source=SOURCE, written=WRITTEN):
    """(operations, bytes, seconds at the least) to write `written` tokens to `rows` sources with a beam.

    A step reads each matrix of the decoder once, and the keys and values so far; those of the memory once a sentence.
    """
    d, width = size.d_model, {"fp32": 4, "bf16": 2, "int8": 1}[precision]
    cached = 4 if precision == "fp32" else 2
    encoder, decoder, vocabulary = size.weights
    step_weights = decoder - size.N * 2 * d * d + vocabulary
    flops = 2 * rows * source * (encoder + size.N * 2 * d * d) + rows * 4 * d * size.N * source**2
    bytes_moved = width * (encoder + size.N * 2 * d * d)
    seconds = max(flops / rates[precision], bytes_moved / rates["bandwidth"])
    for length in range(1, written + 1):
        live = rows * (beam if length > 1 else 1)
        f = live * (2 * step_weights + 4 * d * size.N * (length + source))
        b = width * step_weights + cached * 2 * d * size.N * (live * length + rows * source)
        seconds += max(f / rates[precision], b / rates["bandwidth"])
        flops, bytes_moved = flops + f, bytes_moved + b
    return flops, bytes_moved, seconds


# -- the cells ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entrant:
    """One way to do a cell's work: a system, a precision, and the order of its batches."""

    system: str
    precision: str = "fp32"
    order: str = "bucketed"

    def __str__(self):
        return f"{self.system} {self.precision}" + (", random batches" if self.order == "random" else "")


@dataclass(frozen=True)
class Cell:
    """One comparison: all entrants do the same work, one after the other, again and again."""

    task: str  # train, greedy, beam or attention
    size: str
    entrants: tuple
    table: str = "fair"  # or "people": as people write it
    lengths: str = "equal"  # or "ragged"
    batch: int = 0  # sentences in decoding; length in attention
    units: int = 1  # steps, batches of about TOKENS, or calls in one visit
    seconds: float = 30  # to spend on it, about
    training: bool = True  # attention: forwards and backwards, or forwards only

    @property
    def name(self):
        """What the cell is called in tables."""
        if self.task == "train":
            return f"train, {self.size}, {self.lengths} lengths, {self.table}"
        if self.task == "attention":
            return f"attention, length {self.batch}, {'with gradients' if self.training else 'forwards'}"
        return f"{'greedy' if self.task == 'greedy' else 'beam 4'}, {self.size}, batch {self.batch}"

    @property
    def group(self):
        """Cells of one group share the processes of their systems."""
        return (self.task if self.task in ("train", "attention") else "decode", self.size, self.table)


TRAINERS = ("annotated", "torch", "marian", "x-transformers", "joeynmt")
COMPILED = tuple(f"{name}, compiled" for name in TRAINERS)  # where a device gains by it


def _each(systems, *precisions, **options):
    return tuple(Entrant(system, precision, **options) for precision in precisions for system in systems)


def _training(size, table, quick, device):
    both, base, often = ("fp32", "bf16"), size == "base", 8 if device == "cuda" else 1  # a GPU's steps are short
    for precision in both:
        seconds = 60 if base and precision == "fp32" else 25
        systems = TRAINERS + (COMPILED if device == "cuda" and precision == "bf16" else ())
        yield Cell("train", size, _each(systems, precision), table, units=(1 if base else 4) * often, seconds=seconds)
    for precision in ("bf16",) if base else both:
        systems = ("annotated", "torch") if quick or base else TRAINERS
        entrants = (*_each(systems, precision), Entrant("torch", precision, "random"))
        yield Cell("train", size, entrants, table, "ragged", units=4 if base else 6, seconds=60 if base else 25)


def _decoding(size, task, batch, quick):
    heavy = size == "base" and task == "beam" and batch > 1
    ours = _each(["annotated"], "fp32", "bf16", "int8")
    peers = _each(["marian"], "fp32", "bf16") + _each(["ctranslate2"], "fp32", "bf16", "int8")
    ours += () if size == "base" else _each(["annotated, compiled"], "fp32")
    slow = () if quick or heavy else _each(["torch"], "fp32", "bf16") + _each(["joeynmt"], "fp32")
    if task == "greedy" and not quick:  # x-transformers' beam search does not work with an encoder
        slow += _each(["x-transformers"], "fp32", "bf16")
    return Cell(task, size, ours + peers + slow, batch=batch, units=1 if size == "base" else 2, seconds=50 if size == "base" else 15)


def cells(quick=False, device="cpu"):
    """All cells of a run in order; `quick`: a subset of a few minutes. On a GPU all may compile their training."""
    found = []
    for size in ("base", "tiny"):
        for table in ("fair",) if quick else ("fair", "people"):
            found += list(_training(size, table, quick, device))
    for size in ("base", "tiny"):
        for task, batch in (("greedy", 32), ("beam", 1)) if quick else (("greedy", 1), ("greedy", 32), ("beam", 1), ("beam", 32)):
            found.append(_decoding(size, task, batch, quick))
    systems = ("annotated", "annotated, explicit", "torch") + (() if quick else ("marian", "x-transformers", "joeynmt"))
    for length in (32, 256, 1024) if quick else (32, 64, 128, 256, 512, 1024):
        for training in (True, False):
            for precision in ("fp32", "bf16"):
                found.append(Cell("attention", "base", _each(systems, precision), batch=length, units=4, seconds=4, training=training))
    return [replace(cell, seconds=cell.seconds * 0.5) for cell in found] if quick else found


# -- what is aimed at -------------------------------------------------------------------------------------------------

# (cell, ours, the other, how many times as fast ours is to be)
AIMS = [
    ("train, base, equal lengths, fair", Entrant("annotated", "bf16"), Entrant("torch", "bf16"), 1.5),
    ("train, base, equal lengths, fair", Entrant("annotated", "fp32"), Entrant("torch", "fp32"), 1.2),
    ("train, base, equal lengths, people", Entrant("annotated", "bf16"), Entrant("torch", "bf16"), 2.0),
    ("train, base, equal lengths, people", Entrant("annotated", "fp32"), Entrant("torch", "fp32"), 1.3),
    ("train, base, ragged lengths, people", Entrant("annotated", "bf16"), Entrant("torch", "bf16"), 2.0),
    ("train, base, ragged lengths, people", Entrant("annotated", "bf16"), Entrant("torch", "bf16", "random"), 4.0),
    ("train, tiny, equal lengths, people", Entrant("annotated", "fp32"), Entrant("torch", "fp32"), 1.9),
    ("train, tiny, equal lengths, people", Entrant("annotated", "bf16"), Entrant("torch", "bf16"), 2.4),
    ("greedy, base, batch 32", Entrant("annotated", "bf16"), Entrant("ctranslate2", "int8"), 1.5),
    ("greedy, base, batch 32", Entrant("annotated", "bf16"), Entrant("marian", "bf16"), 1.7),
    ("greedy, base, batch 1", Entrant("annotated", "int8"), Entrant("ctranslate2", "int8"), 1.2),
    ("greedy, base, batch 32", Entrant("annotated", "fp32"), Entrant("ctranslate2", "fp32"), 1.5),
    ("greedy, base, batch 32", Entrant("annotated", "fp32"), Entrant("marian", "fp32"), 1.3),
    ("beam 4, base, batch 32", Entrant("annotated", "bf16"), Entrant("ctranslate2", "int8"), 1.5),
    ("beam 4, base, batch 1", Entrant("annotated", "int8"), Entrant("ctranslate2", "int8"), 1.0),
    ("beam 4, base, batch 32", Entrant("annotated", "fp32"), Entrant("marian", "fp32"), 1.4),
    ("greedy, tiny, batch 32", Entrant("annotated", "fp32"), Entrant("ctranslate2", "fp32"), None),
    ("beam 4, tiny, batch 32", Entrant("annotated", "fp32"), Entrant("ctranslate2", "fp32"), None),
]
MEMORY_AIM = 0.85  # of the peak of torch.nn.Transformer in training, at the most
