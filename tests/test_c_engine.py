"""The decoder's step in C: against PyTorch and page 18's decoder, what it refuses, how it is built."""

import copy
import ctypes
import os
import pickle
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from annotated import c_engine
from annotated.attention import DotProductAttention
from annotated.c_engine import c_steps, compile_c, quantize_weight
from annotated.decoding import IncrementalDecoder
from annotated.embeddings import TokenEmbedding
from annotated.feed_forward import PositionwiseFeedForward
from annotated.multi_head import MultiHeadAttention, record_attention
from annotated.tokens import END, PAD
from annotated.transformer import Transformer, TransformerConfig

COMPILER = shutil.which(os.environ.get("CC", "cc"))
compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler here")
every_precision = pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])


def tiny(vocab_size=301, **changes):
    """A random model of odd sizes, whose norms and biases do something too."""
    torch.manual_seed(0)
    sizes = {"N": 2, "d_model": 48, "d_ff": 101, "h": 3, "d_k": 10, "d_v": 13, "max_length": 9}
    model = Transformer(TransformerConfig(vocab_size, **sizes | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


SOURCE = torch.tensor([[9, 8, 7, 6, END], [5, END, *[PAD] * 3], [6, 5, 4, END, PAD]])


def roundoff(dtype, roundings):
    """The most that so many roundings in a row cost, as a share (Higham's gamma)."""
    lost = roundings * torch.finfo(dtype).eps / 2
    return lost / (1 - lost)


def pointer(tensor):
    return ctypes.c_void_p(tensor.data_ptr())


def linear(x, weight, bias, precision):
    """x W^T + b by `quantize` and `matmul` of step.c."""
    weights, rows = c_steps(tiny(), precision).args[0], ctypes.c_int64(len(x))
    matrix, y = weights.matrix(weight, bias), torch.empty(len(x), len(weight))
    scratch = [torch.empty(len(x), size) for size in (x.size(1) + 4, 1, 1)]
    names = "quantized", "scale", "zero_point"
    state = c_engine._Decoder(**{name: s.data_ptr() for name, s in zip(names, scratch, strict=True)})
    weights.library.quantize(ctypes.byref(state), rows, pointer(x), ctypes.c_int64(x.size(1)))
    weights.library.matmul(ctypes.byref(state), ctypes.byref(matrix), rows, pointer(y), 0)
    return y


# The pieces

@compiler
@every_precision
@pytest.mark.parametrize("rows, width, out", [(1, 1, 1), (4, 64, 32), (7, 70, 101), (33, 129, 31)])
def test_matmul_is_the_product_within_the_worst_case(precision, rows, width, out):
    """A rounding of fp32 for each term; in bf16 one of x and one of W; in int8 half a step of W,
    and a whole one of x: half of it for the zero point."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, width), torch.randn(out, width), torch.randn(out)
    size = F.linear(x.abs().double(), weight.abs().double(), bias.abs().double())
    most = (roundoff(torch.float32, width + 8)
            + roundoff(torch.bfloat16, 2 if precision == "bf16" else 0)) * size
    if precision == "int8":
        step = (x.amax(1, True).clamp(min=0) - x.amin(1, True).clamp(max=0)) / 255
        off = weight.abs().amax(1) / 254
        most += step * weight.abs().sum(1) + off * (x.abs().sum(1, True) + step * width)
    expected = F.linear(x.double(), weight.double(), bias.double())
    assert ((linear(x, weight, bias, precision) - expected).abs() <= most).all()


@compiler
def test_16_bits_are_rounded_as_pytorch_rounds():
    x = torch.cat([torch.linspace(-3, 3, 64), 1 + torch.arange(64) / 256]).view(4, 32)  # ties too
    assert torch.equal(linear(x, torch.eye(32), torch.zeros(32), "bf16"), x.bfloat16().float())


@compiler
def test_8_bits_are_off_by_half_a_step_at_most():
    x = torch.randn(500, 32) + torch.linspace(-40, 40, 500).unsqueeze(1)
    x[0], x[1], x[2] = 0, 3, -3
    step = (x.amax(1, True).clamp(min=0) - x.amin(1, True).clamp(max=0)) / 255
    off = (linear(x, torch.eye(32), torch.zeros(32), "int8") - x).abs()
    assert (off <= 0.501 * step).all() and off.max() > 0.49 * step[off.argmax() // 32]
    q, scale = quantize_weight(x)
    assert ((q * scale.unsqueeze(1) - x).abs() <= 0.501 * scale.unsqueeze(1)).all()


@compiler
@every_precision
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf"), 1e38])
def test_a_row_or_an_output_that_is_not_finite_leaves_the_others_alone(precision, odd):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, 70), torch.randn(40, 70), torch.zeros(40)
    expected = linear(x, weight, bias, precision)
    x[1], weight[7] = odd, odd
    found, others = linear(x, weight, bias, precision), [i for i in range(40) if i != 7]
    assert torch.equal(found[[0, 2]][:, others], expected[[0, 2]][:, others])
    assert odd == 1e38 or not found[:, 7].isfinite().any()


# Steps

def rounded_alike(model, precision):
    """The plain model, whose decoder rounds weights and inputs as the C code does."""
    def rounded(x):
        low, high = x.amin(-1, True).clamp(max=0), x.amax(-1, True).clamp(min=0)
        scale = (high - low) / 255
        zero = (-low / scale).round()
        return ((x / scale).round() + zero).clamp(0, 255).sub(zero) * scale

    def forward(layer, x):
        if precision == "bf16":
            return F.linear(x.bfloat16().float(), layer.weight.bfloat16().float(), layer.bias)
        q, scale = quantize_weight(layer.weight)
        return F.linear(rounded(x), q * scale.unsqueeze(1), layer.bias)

    kind = type("Rounded", (nn.Linear,), {"forward": forward})
    for path, layer in model.decoder.named_modules():
        if type(layer) is nn.Linear and not path.endswith(("cross_attention.W_K", "cross_attention.W_V")):
            layer.__class__ = kind  # the keys and values of the memory are PyTorch's
    return model


CHOICES = [([0, 0, 1, 1, 2, 2], [0, 1, 2]), ([1, 0, 5, 4], [0, 2]), ([3] * 9, [1]), ([0], [0])]


@torch.no_grad()
def hidden_vectors(steps, vocab_size=301):
    """The hidden vectors of nine steps on random tokens, while rows come and go."""
    draw, rows, found = torch.Generator().manual_seed(1), len(SOURCE), []
    for chosen, left in [*CHOICES, (None, None)]:
        for _ in range(2 if chosen else 1):
            found.append(steps.step(torch.randint(3, vocab_size, (rows, 1), generator=draw)))
        if chosen:
            steps.select(torch.tensor(chosen), torch.tensor(left))
            rows = len(chosen)
    return torch.cat(found)


@compiler
@every_precision
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_steps_are_those_of_page_18_for_any_number_of_threads(precision, norm_first, positions):
    model, state = tiny(norm_first=norm_first, positions=positions), torch.get_rng_state()
    found = [hidden_vectors(c_steps(model, precision, threads)(model, SOURCE, 9))
             for threads in (1, 2, None)]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    plain = model if precision == "fp32" else rounded_alike(copy.deepcopy(model), precision)
    with torch.no_grad():
        expected = hidden_vectors(IncrementalDecoder(plain, SOURCE, 9))
    # a sum in another order may be rounded to the other neighbour by the next quantization
    most = 1e-5 if precision == "fp32" else 2e-2
    assert (found[0] - expected).abs().max() <= most * expected.abs().max()
    assert torch.equal(state, torch.get_rng_state()), "random numbers were drawn"


@compiler
def test_bad_tokens_and_full_caches_are_refused_and_change_nothing(unenforced):
    model = tiny(positions="learned")
    steps = c_steps(model)(model, SOURCE, 100)
    for wrong in (301, -1, 2**40):
        with pytest.raises(ValueError, match=f"row 1 has the token {wrong}: give an id from 0 to 300"):
            steps.step(torch.tensor([[5], [wrong], [5]]))
    for shape in ((3, 2), (2, 1), (3,)):
        with pytest.raises(ValueError, match="for 3 rows: give one a row, and call select"):
            steps.step(torch.full(shape, 5))
    assert steps.length == 0
    for _ in range(9):  # as many as the model has learned positions
        assert steps.step(torch.full((3, 1), 5, dtype=torch.int32)).isfinite().all()
    with pytest.raises(ValueError, match="room for 9 positions, not 10: give a larger capacity"):
        steps.step(torch.full((3, 1), 5))


@compiler
def test_weights_are_copied_as_one_and_steps_not_at_all():
    model = tiny()
    make = c_steps(model)
    assert copy.deepcopy(make).args[0] is make.args[0]
    steps = make(model, SOURCE, 9)
    for action, what in ((pickle.dumps, make), (pickle.dumps, steps), (copy.copy, steps), (copy.deepcopy, steps)):
        with pytest.raises(TypeError, match="addresses in memory cannot be"):
            action(what)


# What is refused

def replaced(path, make):
    """A change of a model: put `make(part)` in the place of the part at this path."""
    def change(model):
        parent, _, name = path.rpartition(".")
        parent = model.get_submodule(parent)
        setattr(parent, name, make(getattr(parent, name)))
    return change


LAYER = "decoder.layers.1"
WRONG = [
    (replaced(f"{LAYER}.self_attention.attention", lambda _: nn.Identity()), "Identity, not a DotProductAttention"),
    (replaced(f"{LAYER}.feed_forward", lambda _: type("Own", (PositionwiseFeedForward,), {})(48, 101)), "Own"),
    (replaced(f"{LAYER}.feed_forward", lambda _: PositionwiseFeedForward(48, 100)), "100"),
    (replaced(f"{LAYER}.self_attention.W_Q", lambda _: nn.Linear(48, 30)), "W_Q, which has .*bias"),
    (replaced(f"{LAYER}.cross_attention", lambda _: MultiHeadAttention(48, 1, 30, 39)), "'h': 1"),
    (replaced(f"{LAYER}.residual.2.norm", lambda _: nn.LayerNorm(48, bias=False)), "residual.2.norm"),
    (replaced("decoder.norm", lambda _: nn.LayerNorm(48)), "decoder.norm, which is a LayerNorm"),
    (replaced("embedding", lambda _: TokenEmbedding(302, 48)), "embedding, which has .*302"),
    (replaced("target_positions", lambda _: nn.Identity()), "target_positions, which is a Identity"),
    (lambda model: model.decoder.layers.append(copy.deepcopy(model.decoder.layers[0])), "layers.2, which is not in"),
    (lambda model: model.decoder.layers.pop(1), "layers.1, which is missing"),
    (lambda model: setattr(model.decoder.layers[1].residual[0], "norm_first", True), "'norm_first': True"),
    (lambda model: model.decoder.layers[1].feed_forward.register_forward_hook(lambda *_: None), "feed_forward, which has a hook"),
    (lambda model: model.embedding.register_forward_pre_hook(lambda *_: None), "embedding, which has a hook"),
    (lambda model: setattr(model.decoder.layers[1].feed_forward, "forward", lambda x: x), "has a forward of its own"),
    (lambda model: model.double(), "is in torch.float64 on cpu"),
    (lambda model: model.embedding.to("meta"), "is in torch.float32 on meta")]


@compiler
@pytest.mark.parametrize("change, words", WRONG)
def test_what_the_c_code_cannot_compute_is_named(change, words):
    model = tiny()
    make = c_steps(model)
    change(model)
    for call in (lambda: c_steps(model), lambda: make(model, SOURCE, 9)):
        with pytest.raises(ValueError, match=f"engine 'c' cannot compute .*{words}.*: use engine 'torch'"):
            call()


@compiler
def test_recorded_learning_and_other_models_are_refused():
    model = tiny()
    make = c_steps(model)
    with record_attention(model), pytest.raises(ValueError, match="attention, which is a _Recorder"):
        make(model, SOURCE, 9)
    with pytest.raises(ValueError, match="the model trains"):
        make(model.train(), SOURCE, 9)
    with torch.no_grad():
        model.eval().decoder.layers[0].feed_forward.W_1.bias.add_(1)
    for other in (model, tiny()):
        with pytest.raises(ValueError, match="not the weights that were laid out: call c_steps again"):
            make(other, SOURCE, 9)
    for wrong, words in (({"precision": "fp16"}, "precision='fp16'"), ({"threads": 0}, "threads=0")):
        with pytest.raises(ValueError, match=words):
            c_steps(model, **wrong)
    with pytest.raises(ValueError, match="computes a Transformer, not a Decoder"):
        c_steps(model.decoder)


@compiler
def test_prepared_parts_count_as_the_plain_ones():
    class Prepared(DotProductAttention):
        def __init__(self, plain):
            nn.Module.__init__(self)
            self.__dict__.update(vars(plain), _modules=dict(plain._modules), plain=plain)

    model = tiny()
    expected = hidden_vectors(c_steps(model)(model, SOURCE, 9))
    replaced(f"{LAYER}.self_attention.attention", Prepared)(model)
    assert torch.equal(hidden_vectors(c_steps(model)(model, SOURCE, 9)), expected)


# The compiler

def test_without_a_compiler_or_with_a_broken_one_the_error_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(c_engine, "_library_path", lambda precision: tmp_path / "step.so")
    for name, words in (("no-such-compiler", "there is no C compiler: install"), ("false", "false does not compile")):
        monkeypatch.setenv("CC", name)
        with pytest.raises(OSError, match=f"{words}.*engine 'torch'"):
            c_engine.library.__wrapped__("fp32")
    (tmp_path / "step.so").write_text("no library")
    with pytest.raises(OSError, match="step.so cannot be loaded .*engine 'torch'"):
        c_engine.library.__wrapped__("fp32")


@compiler
def test_a_warning_is_an_error():
    with pytest.raises(OSError, match="unused variable"):
        compile_c("int f(void) { int x; return 1; }")


@compiler
def test_a_library_is_kept_where_it_can_be_and_made_for_what_it_depends_on(monkeypatch, tmp_path):
    compiled = []
    monkeypatch.setattr(c_engine, "checkout_data", lambda: None)
    monkeypatch.setattr(c_engine, "compile_c", lambda *given: compiled.append(given) or compile_c(*given))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    make = c_engine.library.__wrapped__
    assert [make("fp32").decoder_step.restype for _ in "ab"] == [ctypes.c_int64] * 2 and len(compiled) == 1
    assert make("int8") and len(compiled) == 2 and len([*tmp_path.rglob("step-*.so")]) == 2
    before = c_engine._library_path("fp32")
    monkeypatch.setattr(c_engine, "c_source", lambda text=c_engine.c_source(): text + "\n")
    assert c_engine._library_path("fp32") != before
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert [bool(make("fp32").decoder_step) for _ in "ab"] == [True] * 2 and len(compiled) == 4, "for this process alone"


SANITIZED = """
import ctypes, sys
import torch
from annotated import c_engine, decoding
sys.path.insert(0, "tests")
import test_c_engine as tests

precision, path = sys.argv[1:]
c_engine.library = lambda _: c_engine._load(path)
for sizes in ({}, {"d_model": 5, "d_ff": 7, "h": 1, "d_k": 1, "d_v": 2, "N": 1},
              {"d_model": 33, "d_ff": 32, "h": 2, "d_k": 40, "d_v": 50, "norm_first": True},
              {"positions": "learned", "d_k": 33, "d_v": 1, "d_ff": 129}):
    model = tests.tiny(**sizes)
    for threads in (1, 2):
        found = tests.hidden_vectors(c_engine.c_steps(model, precision, threads)(model, tests.SOURCE, 9))
    with torch.no_grad():
        expected = tests.hidden_vectors(decoding.IncrementalDecoder(model, tests.SOURCE, 9))
    assert (found - expected).norm() <= {"fp32": 1e-5, "bf16": 0.1, "int8": 0.2}[precision] * expected.norm()
    for odd in (float("nan"), float("inf"), 1e38):
        tests.linear(torch.full((3, 7), odd), torch.randn(5, 7), torch.zeros(5), precision)
print("clean")
"""


@pytest.mark.long
@compiler
@every_precision
@pytest.mark.parametrize("options", [[], ["-mno-avx512f"]], ids=["native", "portable"])
def test_the_sanitizers_find_nothing(precision, options, tmp_path):
    """Addresses and undefined behaviour, watched in a process that preloads their runtime."""
    if options and platform.machine() != "x86_64":
        pytest.skip("the portable code is the native code here")
    runtime = subprocess.run([COMPILER, "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not Path(runtime).is_file():
        pytest.skip("the compiler brings no sanitizer")
    bits = {"fp32": 32, "bf16": 16, "int8": 8}[precision]
    (tmp_path / "step.so").write_bytes(compile_c(
        c_engine.c_source(), f"-DBITS={bits}", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", *options))
    environment = {**os.environ, "LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run([sys.executable, "-c", SANITIZED, precision, tmp_path / "step.so"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "clean\n", done.stderr[-3000:]
