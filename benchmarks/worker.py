"""The worker process of one system: `python -m benchmarks.worker SYSTEM [DEVICE]`.

It answers the requests of `harness.Worker`.
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

from . import workloads
from .harness import serve

PACKAGES = {"annotated": "annotated-attention", "torch": "torch", "marian": "transformers",
            "x-transformers": "x-transformers", "joeynmt": "joeynmt", "ctranslate2": "ctranslate2"}


def reset_peak_memory():
    """Return freed memory to the operating system and start a new peak.

    False where the system has no such peak (it is a feature of Linux).
    """
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        return True
    return False


def peak_memory():
    """Return the most bytes resident since `reset_peak_memory`, on Linux; None elsewhere."""
    with suppress(OSError, IndexError):
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


@contextmanager
def timed(device, result):
    """Record start, end and seconds of the block in `result`, when a GPU has finished its work."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    yield
    synchronize()
    result |= {"start": start, "end": time.perf_counter()}  # on a clock that all processes share
    result["seconds"] = result["end"] - start


def shortest_time(function, seconds=0.5):
    """Return the shortest time of a call, of at least three calls in about `seconds`."""
    function()
    times, end = [], time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


@contextmanager
def record_syncs(device):
    """Yield a list that grows by one at each synchronisation of the host with a GPU.

    PyTorch's debug mode reports them; it misses waits for a recorded event, and copies that the
    driver makes in steps.
    """
    with warnings.catch_warnings(record=True) as syncs:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", "called a synchronizing CUDA operation")
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        yield syncs
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def machine_rates(device):
    """Return what this machine reaches: operations a second in matrix products of the model's
    shapes by precision, bytes a second read from memory, and microseconds per call of an operator.
    """
    shapes, rates = ((256, 512, 512), (2048, 512, 2048), (2048, 2048, 512), (2048, 512, 8192),
                     (2048, 2048, 2048)), {}
    repeats = 1
    if device == "cuda":
        shapes = ((25_000, 512, 2048), (25_000, 2048, 512), (8192, 8192, 8192))
        repeats = 20  # a single call takes no longer than the wait for its end

    def seconds_per_call(function, seconds):
        def repeat():
            for _ in range(repeats):
                function()
            if device == "cuda":
                torch.cuda.synchronize()

        return shortest_time(repeat, seconds) / repeats

    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("int8", torch.int8)):
        best = 0.0
        for m, k, n in shapes:
            if dtype == torch.int8:
                a, b = (torch.ones(shape, dtype=dtype, device=device) for shape in ((m, k), (k, n)))
                products = [lambda a=a, b=b: torch._int_mm(a, b)]
            else:
                a, b = (torch.randn(shape, device=device).to(dtype) for shape in ((m, k), (n, k)))
                products = [lambda a=a, b=b: torch.nn.functional.linear(a, b)]
            # the library that PyTorch does not choose may be the faster one
            if name == "fp32" and device == "cpu":
                products.append(
                    lambda a=a, b=b: torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], ""))
            for product in products:
                with suppress(RuntimeError, AttributeError), torch.inference_mode():
                    best = max(best, 2 * m * k * n / seconds_per_call(product, 0.15))
            if best < rates.get("fp32", 0.0) / 20:  # plain loops, slow beyond use
                break
        rates[name] = best
    # where torch has no fast int8 product of its own
    rates["int8"] = max(rates["int8"], rates["bf16"])
    block = torch.ones(64_000_000, device=device)  # 256 MB, more than the caches hold
    rates["bandwidth"] = block.numel() * 4 / seconds_per_call(block.sum, 0.5)
    scalar, calls = torch.zeros(1, device=device), 1000
    with torch.inference_mode():  # calls that compute next to nothing
        seconds = seconds_per_call(lambda: [scalar.add_(0.0) for _ in range(calls)], 0.15)
    rates["call_us"] = 1e6 * seconds / calls
    return rates


class RequestHandler:
    """Answers requests about one system, and keeps its model and batches between them."""

    def __init__(self, name, device="cpu"):
        self.name, self.device, self.batches = name, device, {}

    def handle(self, request):
        """Call the method that a request names: rates, build, measure or profile."""
        return getattr(self, request.pop("method"))(**request)

    def rates(self, threads):
        """Measure the machine."""
        torch.set_num_threads(threads)
        return machine_rates(self.device)

    def build(self, size, precision=None):
        """Build the model; returns its number of parameters and the versions of the packages.

        size: a name in `workloads.SIZES`, or the fields of a `Size`; precision: of decoding.
        """
        from . import systems

        versions = {"python": sys.version.split()[0], "torch": torch.__version__}
        with suppress(metadata.PackageNotFoundError):
            package = PACKAGES[self.name.split(",")[0]]
            versions[package] = metadata.version(package)
        if isinstance(size, dict):
            workloads.SIZES["custom"], size = workloads.Size(**size), "custom"
        self.size, self.system = size, systems.make_system(self.name, size, precision, self.device)
        return {"parameters": self.system.num_parameters(), "versions": versions}

    def measure(self, task, precision, setting, warmup=False, trim=False, **options):
        """Do a task once and time it.

        warmup: do it untimed before, counting synchronisations with a GPU, and return the peak of
        memory; trim: return freed memory to the operating system before and after.
        """
        function, result = getattr(self, f"_{task}"), {}
        self.system.set_parallelism(*setting)
        if warmup or trim:
            has_peak = self.release_memory()
            # one unit, or two where a compiler specialises at the second
            short = options | {"units": 2 if "compiled" in self.name else 1}
            # the second training step allocates memory anew, too
            for _ in range(2 if task == "train" else 1):
                with record_syncs(self.device) as syncs:
                    function(precision, **short)
            if warmup:
                result["waits"] = len(syncs) / short["units"]
        with timed(self.device, result):
            result["tokens"] = function(precision, **options)
        if warmup:
            peak = torch.cuda.max_memory_allocated if self.device == "cuda" else peak_memory
            result["peak"] = peak() if has_peak else None
        if trim:
            self.release_memory()
        return result

    def profile(self, precision, setting, steps=3, tokens=workloads.BATCH_TOKENS):
        """Profile training steps after six untimed ones.

        Returns per step {"seconds" of wall clock, "operations": {host operation: seconds without
        those of operations that it calls}, "kernels": {GPU kernel: seconds}, "calls": {attention or
        driver call: count}}.
        """
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        activities, result = [ProfilerActivity.CPU], {}
        if self.device == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self.system.set_parallelism(*setting)
        self._train(precision, 6, tokens)
        self._batches(steps, tokens)
        with profile(activities=activities) as profiler, timed(self.device, result):
            self._train(precision, steps, tokens)
        rows = profiler.key_averages()
        host = [row for row in rows if row.device_type == DeviceType.CPU]
        kernels = [row for row in rows if row.device_type != DeviceType.CPU
                   and not row.is_user_annotation]  # spans of kernels that have rows of their own
        return {"seconds": result["seconds"] / steps,
                "operations": {row.key: row.self_cpu_time_total / 1e6 / steps for row in host},
                "kernels": {row.key: row.self_device_time_total / 1e6 / steps for row in kernels},
                "calls": {row.key: row.count / steps for row in host
                          if row.key.startswith("cu") or "dot_product" in row.key}}

    def release_memory(self):
        """Return freed memory and start a new peak; whether the peak can be measured."""
        has_peak = reset_peak_memory()
        if self.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return has_peak

    def _batches(self, units, tokens, length=workloads.TRAINING_LENGTH):
        """Return batches of random sentences, which are made once."""
        if (units, tokens, length) not in self.batches:
            from annotated.data.batches import Batch

            count = tokens // length
            pairs = workloads.random_pairs(units * count, length,
                                           workloads.SIZES[self.size].vocab_size)
            collated = [Batch.collate(pairs[i * count:(i + 1) * count]).to(self.device)
                        for i in range(units)]
            self.batches[units, tokens, length] = [
                (batch.source, batch.target_in, batch.target_out) for batch in collated]
        return self.batches[units, tokens, length]

    def _train(self, precision, units=1, tokens=workloads.BATCH_TOKENS,
               length=workloads.TRAINING_LENGTH):
        total = 0
        for batch in self._batches(units, tokens, length):
            loss = self.system.train_step(batch, precision)
            if not 0 < loss < 1e7:
                raise ArithmeticError(f"the loss is {loss}")
            total += int((batch[2] != workloads.PAD).sum())
        return total

    def _generate(self, precision, beam=1, batch=1, units=1, target=workloads.TARGET_LENGTH,
                  source=workloads.SOURCE_LENGTH):
        rng = np.random.default_rng(batch)
        for _ in range(units):
            ids = rng.integers(4, workloads.SIZES[self.size].vocab_size - 1, (batch, source))
            ids[:, -1] = workloads.END
            output = self.system.generate(torch.tensor(ids, device=self.device), beam, target)
            lengths = {len(row) for row in output}
            if len(output) != batch or lengths != {target}:
                raise ArithmeticError(f"wrote {len(output)} sentences of {sorted(lengths)} tokens, "
                                      f"not {batch} of {target}")
        return units * batch * target


def main():
    """Serve requests; what libraries print to standard output goes to standard error instead."""
    warnings.filterwarnings("ignore")
    if sys.argv[2:] == ["cuda"]:
        torch.set_float32_matmul_precision("high")  # fp32 is TF32 for all, as in `train`
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(RequestHandler(*sys.argv[1:]).handle, sys.stdin, replies)


if __name__ == "__main__":
    main()
