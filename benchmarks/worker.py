"""One system in a process of its own: `python -m benchmarks.worker SYSTEM [DEVICE]`, asked by
`protocol.Worker`.
"""

import ctypes
import gc
import os
import sys
import time
import warnings
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

import numpy as np
import torch

from . import work
from .protocol import serve

PACKAGES = {"annotated": "annotated-attention", "torch": "torch", "marian": "transformers",
            "x-transformers": "x-transformers", "joeynmt": "joeynmt", "ctranslate2": "ctranslate2"}


def peak_reset():
    """Give freed memory back to the system and begin a new peak.

    False where Linux's way is not there.
    """
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        return True
    return False


def peak():
    """Most memory resident since `peak_reset`, in bytes (Linux); None elsewhere."""
    with suppress(OSError, IndexError):
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


@contextmanager
def measured(device, result):
    """Put the wall-clock seconds of the block into `result`; a GPU has finished then."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    yield
    wait()
    result |= {"start": start, "end": time.perf_counter()}  # on a clock that all processes share
    result["seconds"] = result["end"] - start


def best_of(function, seconds=0.5):
    """The shortest time of repeated calls."""
    function()
    times, end = [], time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def again(function, device):
    """A function that does it once.

    Twenty times on a GPU, where one is over before it is waited for. And how often.
    """
    if device != "cuda":
        return function, 1

    def often():
        for _ in range(20):
            function()
        torch.cuda.synchronize()

    return often, 20


@contextmanager
def counting_waits(device):
    """Yields a list that grows by one whenever the host waits for a GPU, as far as PyTorch notices:
    not for an event that was recorded, and not for a copy that the driver does step by step.
    """
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", "called a synchronizing CUDA operation")
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        yield found
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def machine_rates(device):
    """What this machine can do: operations a second of matrix products of the model's shapes, bytes
    a second read, µs per call.
    """
    shapes, rates = ((256, 512, 512), (2048, 512, 2048), (2048, 2048, 512), (2048, 512, 8192),
                     (2048, 2048, 2048)), {}
    if device == "cuda":
        shapes = ((25_000, 512, 2048), (25_000, 2048, 512), (8192, 8192, 8192))
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("int8", torch.int8)):
        best = 0.0
        for m, k, n in shapes:
            if dtype == torch.int8:
                a, b = (torch.ones(shape, dtype=dtype, device=device) for shape in ((m, k), (k, n)))
                product = lambda a=a, b=b: torch._int_mm(a, b)  # noqa: E731
            else:
                a, b = (torch.randn(shape, device=device).to(dtype) for shape in ((m, k), (n, k)))
                product = lambda a=a, b=b: torch.nn.functional.linear(a, b)  # noqa: E731
            ways = [product]
            # of two libraries the one that PyTorch does not take may be the faster
            if name == "fp32" and device == "cpu":
                ways.append(
                    lambda a=a, b=b: torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], ""))
            for way in ways:
                call, times = again(way, device)
                with suppress(RuntimeError, AttributeError), torch.inference_mode():
                    best = max(best, 2 * m * k * n * times / best_of(call, 0.15))
            if best < rates.get("fp32", 0.0) / 20:  # plain loops, slow beyond use
                break
        rates[name] = best
    # where torch has no fast int8 product of its own
    rates["int8"] = max(rates["int8"], rates["bf16"])
    block = torch.ones(64_000_000, device=device)  # 256 MB, more than the caches hold
    read, times = again(block.sum, device)
    rates["bandwidth"] = block.numel() * 4 * times / best_of(read)
    one, calls = torch.zeros(1, device=device), 1000
    with torch.inference_mode():
        call, times = again(lambda: [one.add_(0.0) for _ in range(calls)], device)
        # a call that computes next to nothing
        rates["call_us"] = 1e6 * best_of(call, 0.15) / times / calls
    return rates


class Bench:
    """What a worker keeps between requests, and how it answers them."""

    def __init__(self, name, device="cpu"):
        self.name, self.device, self.data = name, device, {}

    def handle(self, request):
        """Answer one request: facts, rates, build or visit."""
        return getattr(self, request.pop("do"))(**request)

    def rates(self, threads):
        torch.set_num_threads(threads)
        return machine_rates(self.device)

    def build(self, size, precision=None):
        """Make the model; says how many parameters it has, and which versions are at work.

        size: a name in `work.SIZES`, or the fields of a `work.Size`; precision: of decoding.
        """
        from . import systems

        versions = {"python": sys.version.split()[0], "torch": torch.__version__}
        with suppress(metadata.PackageNotFoundError):
            package = PACKAGES[self.name.split(",")[0]]
            versions[package] = metadata.version(package)
        if isinstance(size, dict):
            work.SIZES["given"], size = work.Size(**size), "given"
        self.size, self.system = size, systems.make(self.name, size, precision, self.device)
        return {"parameters": self.system.parameters(), "versions": versions}

    def visit(self, kind, precision, setting, first=False, trim=False, **options):
        """Do a cell's work once and time it.

        `first`: after something untimed, in which the waits of the host for a GPU are counted, and
        the peak of memory is looked at.
        """
        function = getattr(self, f"_{kind}")
        result = {}
        self.system.arrange(*setting)
        if first or trim:
            known = self.give_back()
            for _ in range(2 if kind == "train" else 1):  # the second step, too, takes memory anew
                with counting_waits(self.device) as found:
                    function(precision, **self.shorter(options))
            if first:
                result["waits"] = len(found) / self.shorter(options)["units"]
        with measured(self.device, result):
            result["tokens"] = function(precision, **options)
        if first:
            result["peak"] = (torch.cuda.max_memory_allocated() if self.device == "cuda" else peak()
                              if known else None)
        if trim:
            self.give_back()
        return result

    def profile(self, precision, setting, steps=3, tokens=work.TOKENS):
        """What a training step is made of, after six untimed: its seconds on the clock, of the host
        by operation (each without those that it calls) and of a GPU by kernel, and how often it
        attends and calls the driver: {"seconds", "operations", "kernels", "calls"}.
        """
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        watched, result = [ProfilerActivity.CPU], {}
        if self.device == "cuda":
            watched.append(ProfilerActivity.CUDA)
        self.system.arrange(*setting)
        self._train(precision, 6, tokens)
        self._batches(steps, tokens)
        with profile(activities=watched) as kept, measured(self.device, result):
            self._train(precision, steps, tokens)
        rows = kept.key_averages()
        host = [row for row in rows if row.device_type == DeviceType.CPU]
        kernels = [row for row in rows if row.device_type != DeviceType.CPU
                   and not row.is_user_annotation]  # spans of kernels that have rows of their own
        return {"seconds": result["seconds"] / steps,
                "operations": {row.key: row.self_cpu_time_total / 1e6 / steps for row in host},
                "kernels": {row.key: row.self_device_time_total / 1e6 / steps for row in kernels},
                "calls": {row.key: row.count / steps for row in host
                          if row.key.startswith("cu") or "dot_product" in row.key}}

    def give_back(self):
        """Give back memory that is free, and begin a new peak; whether there is a peak to be
        known.
        """
        known = peak_reset()
        if self.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return known

    def shorter(self, options):
        """What to do untimed: one unit, or two where a compiler sees more at the second."""
        return options | {"units": 2 if "compiled" in self.name else 1}

    def _batches(self, units, tokens, length=32):
        """The batches of a cell, made once."""
        if (units, tokens, length) not in self.data:
            from annotated.data.batches import Batch

            pairs = work.sentences(np.concatenate([work.equal_lengths(tokens, length)] * units),
                                   work.SIZES[self.size].vocab_size)
            of_one = len(pairs) // units
            collated = [Batch.collate(pairs[i * of_one:(i + 1) * of_one]).to(self.device)
                        for i in range(units)]
            self.data[units, tokens, length] = [(batch.source, batch.target_in, batch.target_out)
                                                for batch in collated]
        return self.data[units, tokens, length]

    def _train(self, precision, units=1, tokens=work.TOKENS, length=32):
        total = 0
        for batch in self._batches(units, tokens, length):
            loss = self.system.train_step(batch, precision)
            if not 0 < loss < 1e7:
                raise ArithmeticError(f"the loss is {loss}")
            total += int((batch[2] != work.PAD).sum())
        return total

    def _write(self, precision, beam=1, batch=1, units=1, written=work.WRITTEN, source=work.SOURCE):
        size, total = work.SIZES[self.size], 0
        draw = np.random.default_rng(batch)
        for _ in range(units):
            ids = draw.integers(4, size.vocab_size - 1, (batch, source))
            ids[:, -1] = work.END
            found = self.system.write(torch.tensor(ids, device=self.device), beam, written)
            lengths = {len(row) for row in found}
            if len(found) != batch or lengths != {written}:
                raise ArithmeticError(f"wrote {len(found)} sentences of {sorted(lengths)} tokens, "
                                      f"not {batch} of {written}")
            total += batch * written
        return total


def main():
    """Keep standard output for replies; whatever libraries print goes to standard error."""
    warnings.filterwarnings("ignore")
    if sys.argv[2:] == ["cuda"]:
        torch.set_float32_matmul_precision("high")  # fp32 is TF32 for all, as in `train`
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(Bench(*sys.argv[1:]).handle, sys.stdin, replies)


if __name__ == "__main__":
    main()
