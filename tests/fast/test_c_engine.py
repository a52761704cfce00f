"""The decoder's step in C: against PyTorch and page 18, what it refuses, how it is built."""

import copy
import ctypes
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import product_error
from torch import nn
from torch.nn import functional as F

from annotated.data.tokenizers import END, PAD
from annotated.fast import c_engine
from annotated.fast.c_engine import c_steps, compile_c, quantize_weight
from annotated.model.embeddings import TokenEmbedding
from annotated.model.multi_head import MultiHeadAttention, record_attention
from annotated.model.transformer import Transformer, TransformerConfig
from annotated.translation.search import IncrementalDecoder

COMPILER = shutil.which(os.environ.get("CC", "cc"))
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler here")
every_precision = pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
SOURCE = torch.tensor([[9, 8, 7, 6, END], [5, END, *[PAD] * 3], [6, 5, 4, END, PAD]])


def tiny(vocab_size=301, **changes):
    """A random model of odd sizes, whose norms and biases do something too."""
    torch.manual_seed(0)
    sizes = {"N": 2, "d_model": 48, "d_ff": 101, "h": 3, "d_k": 10, "d_v": 13, "max_length": 9}
    model = Transformer(TransformerConfig(vocab_size, **sizes | changes)).eval()
    for vector in (parameter for parameter in model.parameters() if parameter.dim() == 1):
        vector.data.add_(0.3 * torch.randn_like(vector))
    return model


def linear(x, weight, bias, precision):
    """x W^T + b by `quantize` and `matmul` of step.c."""
    weights, y = c_steps(tiny(), precision).args[0], torch.empty(len(x), len(weight))
    matrix, rows = weights.matrix(weight, bias), ctypes.c_int64(len(x))
    sizes = {"quantized": x.size(1) + 4, "scale": 1, "zero_point": 1}
    scratch = {name: torch.empty(len(x), size) for name, size in sizes.items()}
    state = c_engine._Decoder(**{name: part.data_ptr() for name, part in scratch.items()})
    at, x_at, y_at = ctypes.byref(state), *(ctypes.c_void_p(each.data_ptr()) for each in (x, y))
    weights.library.quantize(at, rows, x_at, ctypes.c_int64(x.size(1)))
    weights.library.matmul(at, ctypes.byref(matrix), rows, y_at, 0)
    return y


def input_steps(x):
    """The distance between two numbers of 8 bits, for each row of inputs."""
    return (x.amax(1, True).clamp(min=0) - x.amin(1, True).clamp(max=0)) / 255


# The pieces

@every_precision
@pytest.mark.parametrize("rows, width, out", [(1, 1, 1), (4, 64, 32), (7, 70, 101), (33, 129, 31)])
def test_matmul_is_the_product_within_the_worst_case(precision, rows, width, out):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(rows, width), torch.randn(out, width), torch.randn(out)
    off = linear(x, weight, bias, precision) - F.linear(x.double(), weight.double(), bias.double())
    most = torch.cat([product_error(x[i : i + 1], weight, bias, precision, 2) for i in range(rows)])
    assert (off.abs() <= most).all()


def test_inputs_are_rounded_to_the_nearest():
    x = torch.cat([torch.linspace(-3, 3, 64), 1 + torch.arange(64) / 256]).view(4, 32)  # ties too
    assert torch.equal(linear(x, torch.eye(32), torch.zeros(32), "bf16"), x.bfloat16().float())
    x = torch.randn(500, 32) + torch.linspace(-40, 40, 500).unsqueeze(1)
    x[0] = 0
    off = (linear(x, torch.eye(32), torch.zeros(32), "int8") - x).abs()
    assert (off <= 0.501 * input_steps(x)).all()


@every_precision
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf"), 1e38])
def test_what_is_not_finite_leaves_other_rows_and_outputs_alone(precision, odd):
    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, 70), torch.randn(40, 70), torch.zeros(40)
    expected = linear(x, weight, bias, precision)
    x[1], weight[7] = odd, odd
    found, others = linear(x, weight, bias, precision), [i for i in range(40) if i != 7]
    assert torch.equal(found[[0, 2]][:, others], expected[[0, 2]][:, others])
    assert odd == 1e38 or not found[:, 7].isfinite().any()


# Steps

def rounded_alike(model, precision):
    """A copy whose decoder rounds weights and inputs as the C code does."""
    def forward(layer, x):
        if precision == "bf16":
            return F.linear(x.bfloat16().float(), layer.weight.bfloat16().float(), layer.bias)
        low, high = x.amin(-1, True).clamp(max=0), x.amax(-1, True).clamp(min=0)
        (q, scale), step = quantize_weight(layer.weight), (high - low) / 255
        zero = (-low / step).round()
        x = (((x / step).round() + zero).clamp(0, 255) - zero) * step
        return F.linear(x, q * scale.unsqueeze(1), layer.bias)

    model = copy.deepcopy(model)
    by_torch = "cross_attention.W_K", "cross_attention.W_V"  # keys and values of the memory
    for path, layer in model.decoder.named_modules():
        if type(layer) is nn.Linear and not path.endswith(by_torch):
            layer.__class__ = type("Rounded", (nn.Linear,), {"forward": forward})
    return model


@torch.no_grad()
def hidden_vectors(steps):
    """The hidden vectors of nine steps on random tokens, while rows come and go."""
    draw, rows, found = torch.Generator().manual_seed(1), len(SOURCE), []
    for chosen, left in [([0, 0, 1, 1, 2, 2], [0, 1, 2]), ([1, 0, 5, 4], [0, 2]), ([3] * 9, [1]),
                         ([0], [0]), ([0], [0])]:
        for _ in range(2 if steps.length < 8 else 1):
            found.append(steps.step(torch.randint(3, 301, (rows, 1), generator=draw)))
        steps.select(torch.tensor(chosen), torch.tensor(left))
        rows = len(chosen)
    return torch.cat(found)


@every_precision
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_steps_are_those_of_page_18_with_any_threads(precision, norm_first, positions):
    model, state = tiny(norm_first=norm_first, positions=positions), torch.get_rng_state()
    found, *others = (hidden_vectors(c_steps(model, precision, threads)(model, SOURCE, 9))
                      for threads in (1, 2, None))
    assert all(torch.equal(found, other) for other in others)
    assert torch.equal(state, torch.get_rng_state()), "random numbers were drawn"
    plain = model if precision == "fp32" else rounded_alike(model, precision)
    with torch.no_grad():
        expected = hidden_vectors(IncrementalDecoder(plain, SOURCE, 9))
    # a sum in another order may be rounded to the other neighbour by the next quantization
    most = 1e-5 if precision == "fp32" else 2e-2
    assert (found - expected).abs().max() <= most * expected.abs().max()


def test_bad_tokens_and_full_caches_are_refused_and_change_nothing(unenforced):
    model = tiny(positions="learned")
    steps = c_steps(model)(model, SOURCE, 100)
    for tokens, words in (([[5], [301], [5]], "row 1 has the token 301: give an id from 0 to 300"),
                          ([[5], [5], [-1]], "row 2 has the token -1"),
                          ([[5]] * 2, "for 3 rows: give one a row, and call select")):
        with pytest.raises(ValueError, match=words):
            steps.step(torch.tensor(tokens))
    for _ in range(9):  # as many as the model has learned positions
        assert steps.step(torch.full((3, 1), 5, dtype=torch.int32)).isfinite().all()
    with pytest.raises(ValueError, match="room for 9 positions, not 10: give a larger capacity"):
        steps.step(torch.full((3, 1), 5))


def test_weights_are_copied_as_one_and_steps_not_at_all():
    model = tiny()
    make = c_steps(model)
    steps = make(model, SOURCE, 9)
    assert copy.deepcopy(make).args[0] is make.args[0]
    for act, on in ((pickle.dumps, make), (copy.copy, steps), (copy.deepcopy, steps)):
        with pytest.raises(TypeError, match="addresses in memory cannot be copied or pickled"):
            act(on)


# What is refused

def replaced(path, part):
    """A change of a model: put another part in the place of the one at this path."""
    parent, _, name = path.rpartition(".")
    return lambda model: setattr(model.get_submodule(parent), name, part)


LAST, HOOK = "decoder.layers.1.", lambda *_: None
WRONG = [
    (replaced(LAST + "self_attention.attention", nn.Identity()), "not a DotProductAttention"),
    (replaced(LAST + "self_attention.W_Q", nn.Linear(48, 30)), "W_Q, which has .*bias"),
    (replaced(LAST + "cross_attention", MultiHeadAttention(48, 1, 30, 39)), "'h': 1"),
    (replaced("embedding", TokenEmbedding(302, 48)), "embedding, which has .*302"),
    (replaced(LAST + "residual.0.norm_first", True), "'norm_first': True"),
    (replaced(LAST + "feed_forward.forward", HOOK), "feed_forward, which has a forward of its own"),
    (lambda model: model.decoder.layers.append(nn.Identity()), "layers.2.*, which is not in it"),
    (lambda model: model.decoder.norm.register_forward_pre_hook(HOOK), "norm, which has a hook"),
    (lambda model: model.double(), "is in torch.float64 on cpu"),
    (lambda model: model.embedding.to("meta"), "is in torch.float32 on meta")]


@pytest.mark.parametrize("change, words", WRONG)
def test_what_the_c_code_cannot_compute_is_named(change, words):
    model = tiny()
    make = c_steps(model)
    change(model)
    for call in (lambda: c_steps(model), lambda: make(model, SOURCE, 9)):
        with pytest.raises(ValueError, match=f"cannot compute .*{words}.*: use engine 'torch'"):
            call()


def test_recorded_learning_and_other_models_are_refused():
    model = tiny()
    make = c_steps(model)
    with record_attention(model), pytest.raises(ValueError, match="attention, which is a _Rec"):
        make(model, SOURCE, 9)
    with pytest.raises(ValueError, match="the model trains"):
        make(model.train(), SOURCE, 9)
    with torch.no_grad():
        model.eval().decoder.layers[0].feed_forward.W_1.bias.add_(1)
    for other in (model, tiny()):
        with pytest.raises(ValueError, match="not the weights that were laid out: call c_steps"):
            make(other, SOURCE, 9)
    for given, words in (((model, "fp16"), "precision='fp16'"), ((model, "fp32", 0), "threads=0"),
                         ((model.decoder,), "computes a Transformer, not a Decoder")):
        with pytest.raises(ValueError, match=words):
            c_steps(*given)


def test_prepared_parts_count_as_the_plain_ones():
    model = tiny()
    make, plain = c_steps(model), model.get_submodule(LAST + "self_attention.attention")
    expected = hidden_vectors(make(model, SOURCE, 9))
    prepared = type("Prepared", (type(plain),), {"plain": plain})()
    replaced(LAST + "self_attention.attention", prepared)(model)
    assert torch.equal(hidden_vectors(make(model, SOURCE, 9)), expected)


# The compiler

def test_what_cannot_be_compiled_or_loaded_is_an_error_that_says_why(monkeypatch, tmp_path):
    with pytest.raises(OSError, match="unused variable"):  # a warning
        compile_c("int f(void) { int x; return 1; }")
    monkeypatch.setattr(c_engine, "_library_path", lambda precision: tmp_path / "step.so")
    for name, words in (("no-such-cc", "there is no C compiler"), ("false", "does not compile"),
                        ("kept", "step.so cannot be loaded")):
        monkeypatch.setenv("CC", name)
        (tmp_path / ("step.so" if name == "kept" else "other")).touch()
        with pytest.raises(OSError, match=f"{words}.*engine 'torch'"):
            c_engine.library.__wrapped__("fp32")


def test_a_library_is_kept_where_it_can_be_under_a_name_of_its_source(monkeypatch, tmp_path):
    compiled, make, text = [], c_engine.library.__wrapped__, c_engine.c_source()
    monkeypatch.setattr(c_engine, "checkout_data", lambda: None)
    monkeypatch.setattr(c_engine, "compile_c", lambda *given: compiled.append(1) or
                        compile_c(*given))
    for folder, made in ((tmp_path / "cache", 1), (Path(__file__), 3)):  # no folder
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
        assert [bool(make("fp32").decoder_step) for _ in "ab"] == [True] * 2
        assert len(compiled) == made and len([*tmp_path.rglob("*.so")]) == 1
    (kept,) = tmp_path.rglob("*.so")
    monkeypatch.setattr(c_engine, "c_source", lambda: text + "\n")
    assert c_engine._library_path("fp32").name != kept.name


def watched(precision, path):
    """What a process does while the sanitizers watch it: any complaint ends it."""
    c_engine.library = lambda _: ctypes.CDLL(path)
    for sizes in ({}, {"d_model": 5, "d_ff": 7, "h": 1, "d_k": 1, "d_v": 2, "positions": "learned"},
                  {"d_model": 33, "d_ff": 32, "h": 2, "d_k": 40, "d_v": 50, "norm_first": True}):
        model = tiny(**sizes)
        steps = c_steps(model, precision, threads=2)(model, SOURCE, 9)
        assert hidden_vectors(steps).isfinite().all()
    for odd in (float("nan"), float("inf"), 1e38):
        linear(torch.full((3, 7), odd), torch.randn(5, 7), torch.zeros(5), precision)


@pytest.mark.long
@every_precision
@pytest.mark.parametrize("options", [[], ["-mno-avx512f"]], ids=["native", "portable"])
def test_the_sanitizers_find_nothing(precision, options, tmp_path):
    """Addresses and undefined behaviour, watched in a process that preloads their runtime."""
    command = [COMPILER, "-print-file-name=libasan.so"]
    runtime = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    if not Path(runtime).is_file() or options and os.uname().machine != "x86_64":
        pytest.skip("the compiler has no sanitizer, or no such processor")
    library, bits = tmp_path / "step.so", c_engine._BITS[precision]
    watched = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", *options]
    library.write_bytes(compile_c(c_engine.c_source(), f"-DBITS={bits}", *watched))
    environment = {**os.environ, "LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0"}
    program = f"import test_c_engine; test_c_engine.watched({precision!r}, {str(library)!r})"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True,
                          text=True, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr[-3000:]
