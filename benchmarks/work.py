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
        seconds = 60 if base else 25  # five rounds or so
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


# -- what is claimed, and what is aimed at -----------------------------------------------------------------------------

OTHERS = ("torch", "marian", "x-transformers", "joeynmt")  # an entrant of the system "others" is the quickest of them


@dataclass(frozen=True)
class Claim:
    """A figure of ours in a cell: beside what it stands, and what is aimed at in every run and in the median of all runs."""

    cell: str
    ours: Entrant
    theirs: Entrant | None
    every: float | None = None
    median: float | None = None
    what: str = "times as fast"  # or "of the peak memory" (to be at most so much), "of the matrix rate"

    @property
    def key(self):
        """What tells a claim from others, in words."""
        return self.cell, str(self.ours), self.theirs and str(self.theirs), self.what


def claims():
    """All ratios between ours and a peer: of one precision in training; in writing each at its best, CTranslate2 also alike."""
    found = []
    for cell in cells():
        peers = [one for one in cell.entrants if not one.system.startswith("annotated")]
        if cell.task == "train":
            found += [Claim(cell.name, Entrant("annotated", one.precision), one) for one in peers]
        elif cell.task != "attention":
            alike = [one for one in peers if one.system == "ctranslate2"]
            found += [Claim(cell.name, _best("annotated"), _best(name)) for name in dict.fromkeys(one.system for one in peers)]
            found += [Claim(cell.name, Entrant("annotated", one.precision), one) for one in alike]
    return found


def _best(system):
    return Entrant(system, "best")  # the quickest of its precisions


def _aims():
    for table, *least in (("fair", 2.0, 1.1), ("people", 1.9, 1.5)):
        for precision, every in zip(("bf16", "fp32"), least, strict=True):
            yield Claim(f"train, base, equal lengths, {table}", Entrant("annotated", precision), Entrant("torch", precision), every)
    for precision, every in (("bf16", 2.2), ("fp32", 1.9)):
        yield Claim("train, tiny, equal lengths, people", Entrant("annotated", precision), Entrant("torch", precision), every)
    yield Claim("train, base, equal lengths, fair", Entrant("annotated", "bf16"), None, 0.45, what="of the matrix rate")
    for table in ("fair", "people"):
        for precision in ("bf16", "fp32"):
            yield Claim(f"train, base, equal lengths, {table}", Entrant("annotated", precision), Entrant("torch", precision), 0.75,
                        what="of the peak memory")
    for size, median in (("base", 1.3), ("tiny", None)):
        for task in ("greedy", "beam 4"):
            for batch in (1, 32):
                name = f"{task}, {size}, batch {batch}"
                yield Claim(name, _best("annotated"), _best("ctranslate2"), 1.0, median)
                yield Claim(name, _best("annotated"), _best("others"), 1.3)


AIMS = list(_aims())
