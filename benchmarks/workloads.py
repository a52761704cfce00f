"""What is measured: model sizes, batches, the operations and bytes that the work needs at least,
the cells of the comparison, and the targets.
"""

from dataclasses import dataclass

import numpy as np

PAD, BEGIN, END = 0, 1, 2
BATCH_TOKENS = 2048  # target tokens of a training batch, about
TRAINING_LENGTH = 32  # tokens of each training sentence, source and target
# in decoding: tokens of a source sentence with its end token, and of each translation
SOURCE_LENGTH, TARGET_LENGTH = 25, 40


@dataclass(frozen=True)
class Size:
    """A model size in the paper's symbols; embeddings and output projection share one matrix."""

    N: int
    d_model: int
    d_ff: int
    h: int
    vocab_size: int
    positions: int = 512  # the longest sequence

    @property
    def weights(self):
        """The number of matrix entries: (encoder stack, decoder stack, embedding)."""
        d, f = self.d_model, self.d_ff
        return self.N * (4 * d * d
                         + 2 * d * f), self.N * (8 * d * d + 2 * d * f), d * self.vocab_size


SIZES = {"base": Size(6, 512, 2048, 8, 37_000), "big": Size(6, 1024, 4096, 16, 37_000),
         "tiny": Size(4, 128, 256, 4, 8000)}


def random_pairs(count, length, vocab_size, seed=0):
    """Return pairs of random token ids, `length` tokens a side when the begin or end is added."""
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(4, vocab_size - 1, length - 1).tolist() for _ in range(2))
            for _ in range(count)]


# -- lower bounds ----------------------------------------------------------------------------------


def forward_flops(size, source, target, pairs=1):
    """Return the floating-point operations of the matrix products in a forward pass over pairs of
    sentences of these lengths, without padding.
    """
    d = size.d_model
    encoder, decoder, vocabulary = size.weights
    # keys and values of the memory are computed once per source token
    per_source = encoder + size.N * 2 * d * d
    per_target = decoder - size.N * 2 * d * d + vocabulary
    attention = 4 * d * size.N * (source * source + target * target + target * source)
    return pairs * (2 * (source * per_source + target * per_target) + attention)


def min_training_seconds(size, pairs, steps, rates, precision):
    """Return the least seconds that `steps` updates over so many pairs of sentences can take.

    The matrix products are three times those of a forward pass, at the measured rate. Then Adam
    reads weights, gradients and two running means and writes three of them, all in fp32.
    """
    flops = 3 * forward_flops(size, TRAINING_LENGTH, TRAINING_LENGTH, pairs)
    bytes_moved = 7 * 4 * sum(size.weights) * steps
    return flops / rates[precision] + bytes_moved / rates["bandwidth"]


def decoding_cost(size, batch, beam, rates, precision, source=SOURCE_LENGTH, target=TARGET_LENGTH):
    """Return (operations, bytes, least seconds) of translating `batch` sentences of `source` tokens
    into `target` tokens each.

    A step reads each matrix of the decoder once, and all cached keys and values; those of the
    memory are read once per sentence.
    """
    d, width = size.d_model, {"fp32": 4, "bf16": 2, "int8": 1}[precision]
    cached = 4 if precision == "fp32" else 2
    encoder, decoder, vocabulary = size.weights
    step_weights = decoder - size.N * 2 * d * d + vocabulary
    memory_weights = encoder + size.N * 2 * d * d
    flops = 2 * batch * source * memory_weights + batch * 4 * d * size.N * source**2
    bytes_moved = width * memory_weights
    seconds = max(flops / rates[precision], bytes_moved / rates["bandwidth"])
    for length in range(1, target + 1):
        hypotheses = batch * (beam if length > 1 else 1)
        step_flops = hypotheses * (2 * step_weights + 4 * d * size.N * (length + source))
        cache = cached * 2 * d * size.N * (hypotheses * length + batch * source)
        step_bytes = width * step_weights + cache
        seconds += max(step_flops / rates[precision], step_bytes / rates["bandwidth"])
        flops, bytes_moved = flops + step_flops, bytes_moved + step_bytes
    return flops, bytes_moved, seconds


# -- cells -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contender:
    """A system in one precision."""

    system: str
    precision: str = "fp32"

    def __str__(self):
        return f"{self.system} {self.precision}"


@dataclass(frozen=True)
class Cell:
    """A cell of the comparison: one workload, which all its contenders do in turn."""

    task: str  # train, greedy or beam
    size: str
    contenders: tuple
    batch: int = 0  # sentences in decoding
    units: int = 1  # training steps, or decoded batches, in one timed run
    seconds: float = 30  # for the whole cell, about

    @property
    def name(self):
        """The name of the cell in tables."""
        if self.task == "train":
            return f"train, {self.size}"
        return f"{'greedy' if self.task == 'greedy' else 'beam 4'}, {self.size}, batch {self.batch}"

    @property
    def group(self):
        """The group of the cell: the cells of a group share worker processes."""
        return "train" if self.task == "train" else "decode", self.size


# they divide a batch among workers of their own within one process
INTERNAL_WORKERS = ("ctranslate2", "annotated, CTranslate2")
PYTORCH = ("annotated", "marian")  # those that decode with PyTorch
TRAINERS = ("annotated", "torch", "marian", "x-transformers", "joeynmt")
# on a GPU, and with --compile: on processors each takes minutes
COMPILED = tuple(f"{name}, compiled" for name in TRAINERS)


def _contenders(systems, *precisions):
    return tuple(Contender(system, precision) for precision in precisions for system in systems)


def _training_cells(size, device, compiled):
    repeats = 8 if device == "cuda" else 1  # the steps of a GPU are short
    for precision in ("bf16", "fp32"):
        systems = TRAINERS + (COMPILED if compiled else ())
        yield Cell("train", size, _contenders(systems, precision),
                   units={"base": repeats, "big": 2, "tiny": 4 * repeats}[size],
                   seconds=15 if size == "tiny" else 50)


def _decoding_cell(size, task, batch):
    contenders = (_contenders(PYTORCH, "fp32", "bf16")
                  + _contenders(["annotated, CTranslate2"], "fp32", "int8")
                  + _contenders(["ctranslate2"], "fp32", "bf16", "int8"))
    # a timed run takes some tenths of a second
    units = {("base", 1): 4, ("base", 32): 1, ("tiny", 1): 20, ("tiny", 32): 5}[size, batch]
    return Cell(task, size, contenders, batch, units=units, seconds=25 if size == "base" else 10)


def cells(device="cpu", compiled=False):
    """Return all cells in order; with `compiled` every system also trains with `torch.compile`.

    The big model is measured on GPUs only.
    """
    sizes = ("base", "big", "tiny") if device == "cuda" else ("base", "tiny")
    training = [cell for size in sizes for cell in _training_cells(size, device, compiled)]
    return training + [_decoding_cell(size, task, batch) for size in ("base", "tiny")
                       for task in ("greedy", "beam") for batch in (1, 32)]


def settings(cell, max_threads, system=""):
    """Return the settings that a system tries before a cell: [(workers, threads of each), …].

    Several workers have one thread each and share a batch. A compiled step is specialised to the
    number of threads that it first runs with, and the library's engine chooses for itself: these
    have a single setting.
    """
    if "compiled" in system:
        return [(1, max_threads)]
    if system.partition("@")[0] == "annotated, CTranslate2":
        return [(max_threads, 1)]
    counts = {max(1, max_threads >> i) for i in range(max_threads.bit_length())}
    return ([(1, threads) for threads in sorted(counts, reverse=True)]
            + [(max_threads, 1)] * (cell.batch > 1 and max_threads > 1))


# -- targets ---------------------------------------------------------------------------------------

SPEEDUP = "times as fast as the quickest peer"
PEAK_MEMORY = "of the peak memory of the leanest peer"
MFU = "of the measured matrix rate"  # model FLOPs utilisation


@dataclass(frozen=True)
class Target:
    """A value that our metric in a cell shall reach in every run, beside the best peer there."""

    cell: str
    precision: str  # of both; "best": of each its fastest
    value: float
    metric: str = SPEEDUP
    systems: tuple = ()  # the systems, ours and peers, that count; all of them if empty

    @property
    def name(self):
        """The cell and the precision in words."""
        return (self.cell + f", {self.precision}" * (self.precision != "best")
                + ", PyTorch alone" * (self.systems == PYTORCH))

    def is_met(self, measured):
        """Whether a measured value meets the target: less memory is better, all else more."""
        return measured <= self.value if self.metric == PEAK_MEMORY else measured >= self.value


TARGETS = [
    *(
        Target(f"train, {size}", precision, value) for size, precision, value
        in (("base", "bf16", 1.3), ("base", "fp32", 1.4), ("tiny", "bf16", 1.4),
            ("tiny", "fp32", 1.4))), Target("train, base", "bf16", 0.65, MFU),
    *(Target("train, base", precision, 0.75, PEAK_MEMORY) for precision in ("bf16", "fp32")),
    *(Target(f"{task}, {size}, batch {batch}", "best", value, systems=systems)
      for value, systems in ((1.0, ()), (1.3, PYTORCH)) for size in ("base", "tiny")
      for task in ("greedy", "beam 4") for batch in (1, 32))]


def find_target(cell, precision="best", metric=SPEEDUP, systems=()):
    """Return the target of a cell."""
    wanted = cell, precision, metric, systems
    return next(target for target in TARGETS
                if (target.cell, target.precision, target.metric, target.systems) == wanted)
