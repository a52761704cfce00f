"""CUDA without a GPU: trace training and decoding on "cuda", and count what each step launches and
where the host waits.

    python experiments/cuda_trace.py [--out results/cuda_trace.json --as before|after]

PyTorch's FakeTensorMode computes shapes, types and devices of every operation, but no numbers:
mixed devices are errors, as on a GPU. A mode on top of it answers where the host asks for a number,
and counts. Prints JSON; `--out` puts the figures into a file, under "before" or "after". It has a
process of its own, since `cuda_guard.cpp` has to come before torch.

An operation that is no view counts as one launch (a fused optimiser or a norm's gradient is some
more on a GPU). Which kernel attends is PyTorch's rule as `cuda_guard.cpp` restates it. Time, memory
and nccl are not traced.
"""

import argparse
import contextlib
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import json
import linecache
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from functools import wraps
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
GUARD = Path(__file__).with_name("cuda_guard.cpp")
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")


def load_guard():
    """Compile `cuda_guard.cpp`, unless that was done, and load it with the libraries of torch,
    which must not be there yet.
    """
    torch = Path(importlib.util.find_spec("torch").origin).parent
    version = importlib.metadata.version("torch")
    digest = hashlib.sha256(version.encode() + GUARD.read_bytes()).hexdigest()[:16]
    library = ROOT / "_build" / "cuda_guard" / f"{digest}.so"
    if not library.exists():
        if COMPILER is None:
            print("no C++ compiler (g++, or the one that CXX names): what stands in for a CUDA "
                  "device cannot be made", file=sys.stderr)
            sys.exit(3)
        library.parent.mkdir(parents=True, exist_ok=True)
        part = library.with_suffix(f".{os.getpid()}")
        include = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
        subprocess.run([COMPILER, "-shared", "-fPIC", "-std=c++20", *include, GUARD,
                        f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", "-o", part], check=True)
        part.rename(library)
    for name in (torch / "lib" / "libc10.so", torch / "lib" / "libtorch_cpu.so", library):
        ctypes.CDLL(str(name), ctypes.RTLD_GLOBAL)


load_guard()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from torch.utils.weak import WeakIdKeyDictionary  # noqa: E402

from annotated.fast import prepare  # noqa: E402
from annotated.fast.chunked_loss import ChunkedLoss  # noqa: E402
from annotated.model.transformer import Transformer, TransformerConfig  # noqa: E402
from annotated.results import provenance  # noqa: E402
from annotated.training import loop  # noqa: E402
from annotated.training.label_smoothing import LabelSmoothingLoss  # noqa: E402
from annotated.training.loop import TrainingConfig  # noqa: E402
from annotated.translation import search  # noqa: E402

aten = torch.ops.aten
PACKAGE = str(ROOT / "annotated") + os.sep
# besides the views: memory, and what is known of it
NO_KERNEL = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty,
             aten.new_empty_strided, aten._unsafe_view, aten.lift_fresh, aten._local_scalar_dense,
             aten.set_, aten.resize_, aten._reshape_alias}
LENGTH = 125  # tokens of each sentence, its end counted
SMALL = dict(N=1, d_model=64, d_ff=128, h=4)


def line():
    """The line of the package that is being executed.

    In a backward pass, which has threads of its own, the line that asked for it.
    """
    for frame in (sys._getframe(), sys._current_frames()[threading.main_thread().ident]):
        while frame is not None:
            path, number = frame.f_code.co_filename, frame.f_lineno
            if path.startswith(PACKAGE):
                return (f"annotated/{path.removeprefix(PACKAGE)}:{number} "
                        f"{linecache.getline(path, number).strip()}")
            frame = frame.f_back
    return "outside the package"


class Trace(TorchDispatchMode):
    """Counts launches and waits of each step of a phase; answers where the host asks for numbers.

    The answers let everything go on: True, but False for `all`; 4; 0.0. Of a mask every place is
    chosen.
    """

    def __init__(self):
        super().__init__()
        self.phase, self.step, self.from_all = "steps", 1, WeakIdKeyDictionary()
        self.launches, self.waits = defaultdict(Counter), defaultdict(list)

    def during(self, phase, function):
        """The function, with all that it does counted in a phase of its own."""
        @wraps(function)
        def counted(*args, **kwargs):
            before, self.phase = self.phase, phase
            try:
                return function(*args, **kwargs)
            finally:
                self.phase = before
        return counted

    def next_step(self, *_):
        """What comes now belongs to another step."""
        self.step += 1

    def wait(self):
        self.waits[self.phase, self.step].append(line())

    def answer(self, x):
        """Numbers for a tensor without data, as Python has them."""
        value = (x not in self.from_all if x.dtype == torch.bool else 0.0 if x.is_floating_point()
                 else 4)
        for size in reversed(x.shape):
            value = [value] * size
        return value

    def tolist(self, x):
        """In place of `Tensor.tolist`: one copy to the host, however many numbers."""
        if x.device.type == "cuda":
            self.wait()
        return self.answer(x)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, packet = kwargs or {}, func.overloadpacket
        places = {x.device.type for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        waits = "cuda" in places and packet in (aten._local_scalar_dense, aten.nonzero)
        if packet is aten._local_scalar_dense:
            out = self.answer(args[0])
        elif packet is aten.nonzero:  # as many places as there can be, a column for each axis
            mask = args[0]
            out = mask.new_empty((mask.numel(), mask.dim()), dtype=torch.int64)
        else:
            out = func(*args, **kwargs)
        if packet in (aten._to_copy, aten.copy_):
            waits = ({"cpu", "cuda"} == places | {out.device.type}
                     and not self.goes_by_itself(packet, args, kwargs))
        if waits:
            self.wait()
        if packet is aten.all:
            self.from_all[out] = True
        places |= {x.device.type for x in tree_leaves(out) if isinstance(x, torch.Tensor)}
        launches = func.namespace == "aten" and not func.is_view and packet not in NO_KERNEL
        if "cuda" in places and launches:
            self.launches[self.phase, self.step][packet.__name__] += 1
        return out

    def goes_by_itself(self, packet, args, kwargs):
        """Whether a copy between host and device leaves the host free: asked for, and from memory
        that is pinned.
        """
        source = args[1] if packet is aten.copy_ else args[0]
        requested = kwargs.get("non_blocking", len(args) > 2 and args[2])
        return requested and (source.is_cuda or getattr(source if source._base is None
                                                        else source._base, "pinned", False))

    def report(self):
        """{what: figures}: waits and launches of each whole step, lines that waited, operations of
        the last step.
        """
        steps = [("steps", number) for number in range(1, self.step)]
        last = self.launches[steps[-1]] if steps else Counter()
        return {"waits": [len(self.waits[step]) for step in steps],
                "launches": [self.launches[step].total() for step in steps],
                "lines": dict(Counter(where for step in steps for where in self.waits[step])),
                "operations": dict(last.most_common())}


class SteadyReducer:
    """DistributedDataParallel's reducer with its first buckets: others would take real numbers."""

    def __init__(self, reducer):
        self.reducer = reducer

    def __getattr__(self, name):
        return getattr(self.reducer, name)

    def _rebuild_buckets(self):
        return False


def pin_memory(tensor, device=None):
    """In place of `Tensor.pin_memory`: a copy that says it is pinned."""
    pinned = tensor.clone()
    pinned.pinned = True
    return pinned


@contextlib.contextmanager
def cuda(ranks=1):
    """Yields the Trace of the block, as one process or as number 3 of several."""
    trace, whole = Trace(), DistributedDataParallel.__init__

    def unsynced(network, module, **options):
        whole(network, module, init_sync=False, **options)
        network.register_comm_hook(None, sent)
        network.reducer, network.logger = SteadyReducer(network.reducer), mock.Mock()

    def sent(_, bucket):
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    class Event:
        """In place of `torch.Event`: whoever waits for one is counted."""

        def __init__(self, *_, **__):
            self.record, self.synchronize = lambda *_: None, trace.wait

    patches = {
        "torch.cuda.amp.common.amp_definitely_not_available": lambda: False,
        "torch.cuda.is_bf16_supported": lambda *_, **__: True,
        "torch.random.fork_rng": lambda *_, **__: contextlib.nullcontext(),
        "torch.Event": Event, "torch.cuda.synchronize": lambda *_: trace.wait(),
        "torch.distributed.broadcast_object_list": lambda *_, **__: None,
        "torch.distributed.all_gather_object":
            lambda objects, own: objects.__setitem__(slice(None), [own] * ranks),
        "torch.utils._foreach_utils._foreach_supported_types":
            [torch.Tensor, torch.nn.Parameter, FakeTensor],
        "torch.Tensor.pin_memory": pin_memory,
        "torch._subclasses.fake_tensor.FakeTensor.tolist": lambda x: trace.tolist(x),
        "torch.nn.parallel.DistributedDataParallel.__init__": unsynced,
        "annotated.training.loop.sum_over_ranks": lambda *numbers, **_: numbers,
        "annotated.training.loop.rehearse": trace.during("rehearsal", loop.rehearse),
        "annotated.training.loop.validation_loss":
            trace.during("validation", loop.validation_loss)}
    with contextlib.ExitStack() as stack:
        for target, replacement in patches.items():
            stack.enter_context(mock.patch(target, replacement))
        if ranks > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=ranks)
            stack.callback(dist.destroy_process_group)
        stack.callback(register_optimizer_step_post_hook(trace.next_step).remove)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(trace)
        yield trace


def model_on_gpu(sizes, prepared):
    """A Transformer with WMT's vocabulary, made on the device: fake tensors cannot move there."""
    build = prepare.prepared_transformer if prepared else Transformer
    with torch.device("cuda"):
        return build(TransformerConfig(37_000, **sizes))


def trace_training(sizes=SMALL, prepared=True, positions=3125, steps=3, ranks=1, **config):
    """What `train` does with so many positions per process, a rehearsal and one validation."""
    config |= {"steps": steps, "max_tokens": positions * ranks, "validate_every": steps}
    config = TrainingConfig(**config)
    pairs = [([5] * (LENGTH - 1),) * 2] * (config.max_tokens // LENGTH)
    with cuda(ranks) as trace:
        loop.train(trace.during("model", model_on_gpu)(sizes, prepared), pairs, pairs, config,
                   show_progress=False, loss=ChunkedLoss if prepared else LabelSmoothingLoss)
    return trace.report()


def trace_greedy(precision=None):
    """What `greedy_decode` does for each of four tokens, of 32 sentences, one always at its end."""
    with cuda() as trace, torch.no_grad():
        torch.set_default_dtype(torch.bfloat16 if precision else torch.float32)
        model = trace.during("model", model_on_gpu)(SMALL, prepared=bool(precision)).eval()
        torch.set_default_dtype(torch.float32)
        step = search.IncrementalDecoder.step

        def counted(*args):
            trace.next_step()
            return step(*args)

        # nothing is computed, so the logits are anything, NaN too, which is said at the end
        with (mock.patch.object(search.IncrementalDecoder, "step", counted),
              contextlib.suppress(ValueError)):
            search.greedy_decode(model, torch.full((32, 20), 5, device="cuda"))
    return trace.report()


def probe(code):
    """[waits, launches] of one line of code, in which x is (4, 3)."""
    with cuda() as trace:
        x = torch.ones(4, 3, device="cuda")
        trace.next_step()
        exec(code, {"torch": torch, "x": x})
        trace.next_step()
    return [trace.report()[what][1] for what in ("waits", "launches")]


LARGE, FOLLOWED = "base, prepared, bf16, 3,125 positions", "prepared, bf16, 25,000 positions"


def all_traces():
    """{name: report} of everything.

    One run is followed for more steps than lie between two readings of the losses, twice.
    """
    return {
        LARGE: trace_training({}, precision="bf16", steps=2),
        FOLLOWED: trace_training(positions=25_000, precision="bf16", steps=34),
        "prepared, fp32, 25,000 positions, accumulation of 2, clipped":
            trace_training(positions=25_000, accumulate=2, clip=1.0),
        "prepared, bf16, rank 3 of 8, 3,125 positions, accumulation of 2":
            trace_training(ranks=8, precision="bf16", accumulate=2),
        "plain, fp32, 3,125 positions": trace_training(prepared=False),
        "plain, bf16, 3,125 positions, accumulation of 2":
            trace_training(prepared=False, precision="bf16", accumulate=2),
        "greedy, plain": trace_greedy(), "greedy, prepared, bf16": trace_greedy("bf16")}


def store(path, when, traces):
    """Put the figures into a file of results; a test holds the row of results/README.md to it."""
    facts = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    origin = provenance()
    facts.pop("uncommitted changes", None)
    facts |= {"command": "python experiments/cuda_trace.py --out results/cuda_trace.json",
              "data": "none: shapes, types and devices, computed by FakeTensorMode",
              "torch": torch.__version__.partition("+")[0],
              "metric": "waits: operations that make the host wait for the device; launches: "
                        "operations on the device that are no views",
              **origin, when: {"revision": origin["revision"], "traces": traces}}
    path.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a file of results to put the figures into")
    parser.add_argument("--as", dest="when", choices=("before", "after"), default="after")
    parser.add_argument("--probe", nargs="*", default=[], metavar="CODE",
                        help="lines of code to count as well: does this count right?")
    options = parser.parse_args()
    traces = all_traces()
    print(json.dumps({**traces, "probes": {code: probe(code) for code in options.probe}}, indent=1,
                     ensure_ascii=False))
    if options.out:
        store(options.out, options.when, traces)


if __name__ == "__main__":
    main()
