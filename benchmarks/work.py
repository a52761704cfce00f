"""What is measured: sizes, batches, the operations and bytes that the work needs at least, and the
list of cells.
"""

from dataclasses import dataclass

import numpy as np

PAD, BEGIN, END = 0, 1, 2
TOKENS = 2048  # target tokens of a training batch, about
# decoding: tokens of a source sentence, end token counted, and tokens written to each
SOURCE, WRITTEN = 25, 40


@dataclass(frozen=True)
class Size:
    """Sizes in the paper's symbols; the embeddings and the output projection share one matrix."""

    N: int
    d_model: int
    d_ff: int
    h: int
    vocab_size: int
    positions: int = 512  # most tokens of a side

    @property
    def weights(self):
        """Numbers in the matrices: (encoder stack, decoder stack, embedding)."""
        d, f = self.d_model, self.d_ff
        return self.N * (4 * d * d
                         + 2 * d * f), self.N * (8 * d * d + 2 * d * f), d * self.vocab_size


SIZES = {"base": Size(6, 512, 2048, 8, 37_000), "big": Size(6, 1024, 4096, 16, 37_000),
         "tiny": Size(4, 128, 256, 4, 8000)}


def equal_lengths(tokens=TOKENS, length=32):
    """(pairs, 2) lengths of one batch of sentences of one length."""
    return np.full((tokens // length, 2), length)


def sentences(lengths, vocab_size, seed=0):
    """Pairs of lists of random ids, without begin and end, that take as many tokens as `lengths`
    say with their ends.
    """
    draw = np.random.default_rng(seed)
    return [tuple(draw.integers(4, vocab_size - 1, length - 1).tolist() for length in pair)
            for pair in lengths.tolist()]


# -- what the work needs at least ------------------------------------------------------------------


def forward_flops(size, lengths):
    """Floating-point operations of the matrix products of one forward pass over sentences, without
    any padding.
    """
    d, total = size.d_model, 0
    encoder, decoder, vocabulary = size.weights
    # the memory's keys and values are made once a source token
    per_source = encoder + size.N * 2 * d * d
    per_target = decoder - size.N * 2 * d * d + vocabulary
    for n, m in np.asarray(lengths).tolist():
        total += 2 * (n * per_source + m * per_target) + 4 * d * size.N * (n * n + m * m + m * n)
    return total


def training_floor(size, lengths, steps, rates, precision):
    """Seconds that `steps` updates over these sentences take at the least, in two phases that
    follow each other.

    Matrix products: three times those of a forward pass, at the measured rate. Update: Adam reads
    weights, gradients and two running means and writes three of them, all in fp32.
    """
    bytes_moved = 7 * 4 * sum(size.weights) * steps
    return 3 * forward_flops(size, lengths) / rates[precision] + bytes_moved / rates["bandwidth"]


def decoding_floor(size, rows, beam, rates, precision, source=SOURCE, written=WRITTEN):
    """(operations, bytes, seconds at the least) to write `written` tokens to `rows` sources with a
    beam.

    A step reads each matrix of the decoder once, and the keys and values so far; those of the
    memory once a sentence.
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


# -- the cells -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entrant:
    """One way to do a cell's work: a system in a precision."""

    system: str
    precision: str = "fp32"

    def __str__(self):
        return f"{self.system} {self.precision}"


@dataclass(frozen=True)
class Cell:
    """One comparison: all entrants do the same work, one after the other, again and again."""

    task: str  # train, greedy or beam
    size: str
    entrants: tuple
    batch: int = 0  # sentences in decoding
    units: int = 1  # steps, or batches, in one visit
    seconds: float = 30  # to spend on it, about

    @property
    def name(self):
        """What the cell is called in tables."""
        if self.task == "train":
            return f"train, {self.size}"
        return f"{'greedy' if self.task == 'greedy' else 'beam 4'}, {self.size}, batch {self.batch}"

    @property
    def group(self):
        """Cells of one group share the processes of their systems."""
        return "train" if self.task == "train" else "decode", self.size


# they share a batch among workers of their own, in one process
WITH_WORKERS = ("ctranslate2", "annotated, CTranslate2")
PYTORCH = ("annotated", "marian")  # those that write with PyTorch
TRAINERS = ("annotated", "torch", "marian", "x-transformers", "joeynmt")
# on a GPU, and where --compile asks for it: minutes for each on processors
COMPILED = tuple(f"{name}, compiled" for name in TRAINERS)


def _each(systems, *precisions):
    return tuple(Entrant(system, precision) for precision in precisions for system in systems)


def _training(size, device, compiled):
    often = 8 if device == "cuda" else 1  # a GPU's steps are short
    for precision in ("bf16", "fp32"):
        systems = TRAINERS + (COMPILED if compiled else ())
        yield Cell("train", size, _each(systems, precision),
                   units={"base": often, "big": 2, "tiny": 4 * often}[size],
                   seconds=15 if size == "tiny" else 50)


def _decoding(size, task, batch):
    entrants = _each(PYTORCH, "fp32", "bf16") + _each(["annotated, CTranslate2"], "fp32", "int8")
    entrants += _each(["ctranslate2"], "fp32", "bf16", "int8")
    # some tenths of a second
    units = {("base", 1): 4, ("base", 32): 1, ("tiny", 1): 20, ("tiny", 32): 5}[size, batch]
    return Cell(task, size, entrants, batch, units=units, seconds=25 if size == "base" else 10)


def cells(device="cpu", compiled=False):
    """All cells of a run in order; `compiled`: every system trains by `torch.compile` as well.

    The big model is for GPUs alone.
    """
    sizes = ("base", "big", "tiny") if device == "cuda" else ("base", "tiny")
    found = [cell for size in sizes for cell in _training(size, device, compiled)]
    return found + [_decoding(size, task, batch) for size in ("base", "tiny")
                    for task in ("greedy", "beam") for batch in (1, 32)]


def settings(cell, most, system=""):
    """What a system tries before a cell: (workers, threads of each); a batch may be shared among
    workers of one thread.

    A compiled step is made for the number of threads that it meets first: it has one setting, as
    has the library's engine.
    """
    if "compiled" in system:
        return [(1, most)]
    if system == "annotated, CTranslate2":  # it has no settings: this is what it does by itself
        return [(most, 1)]
    found = [(1, threads) for threads
             in sorted({max(1, most >> i) for i in range(most.bit_length())}, reverse=True)]
    return found + [(most, 1)] * (cell.batch > 1 and most > 1)


# -- what is claimed, and what is aimed at ---------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """A figure of ours in a cell, beside that of the peer that does best there, and what is aimed
    at in every run.
    """

    cell: str
    precision: str  # of both; "best": of each its quickest
    aim: float
    what: str = "times as fast as the quickest peer"  # or MEMORY (to be at most so much), or SHARE
    among: tuple = ()  # the systems that count, ours and peers; all of them if none is named

    @property
    def name(self):
        """The cell and the precision in words."""
        return (self.cell + f", {self.precision}" * (self.precision != "best")
                + ", PyTorch alone" * (self.among == PYTORCH))


SPEED, MEMORY = Claim.what, "of the peak memory of the leanest peer"
SHARE = "of the measured matrix rate"
AIMS = [
    *(
        Claim(f"train, {size}", precision, aim) for size, precision, aim
        in (("base", "bf16", 1.3), ("base", "fp32", 1.4), ("tiny", "bf16", 1.4),
            ("tiny", "fp32", 1.4))), Claim("train, base", "bf16", 0.65, SHARE),
    *(Claim("train, base", precision, 0.75, MEMORY) for precision in ("bf16", "fp32")),
    *(Claim(f"{task}, {size}, batch {batch}", "best", aim, among=among)
      for aim, among in ((1.0, ()), (1.3, PYTORCH)) for size in ("base", "tiny")
      for task in ("greedy", "beam 4") for batch in (1, 32))]
