"""What the tests of several modules share: small models, random tensors, texts, pages, programs."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from annotated.model.transformer import Transformer, TransformerConfig

ROOT = Path(__file__).resolve().parent.parent
TEXTS = [("the dog sleeps .", "der Hund schläft ."), ("a cat sleeps .", "eine Katze schläft ."),
         ("the cat sees a dog .", "die Katze sieht einen Hund ."),
         ("a dog sees the cat .", "ein Hund sieht die Katze .")]
# In double precision a rounding costs 2^-53 of a number: room for a million roundings of numbers up
# to ten. Where tests write 1e-12, it is for ten thousand of numbers near one.
EXACT = {"rtol": 0, "atol": 1e-9}
PAIRS = [("a dog sleeps", "ein Hund schläft"), ("the dog sees a cat", "der Hund sieht eine Katze")]


@pytest.fixture(scope="module")
def one_thread():
    """Weights are equal bit for bit only for a fixed number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def examples(count, **options):
    """So many examples of a property, in the profile "long" ten times as many."""
    return settings(max_examples=count * settings.default.max_examples // 100, **options)


def roundoff(dtype, roundings):
    """The largest relative error of so many roundings in a row, half an epsilon each (Higham)."""
    error = roundings * torch.finfo(dtype).eps / 2
    return error / (1 - error)


def random_model(vocab_size=12, seed=0, **sizes):
    """A small model with random weights, without dropout unless it is asked for."""
    torch.manual_seed(seed)
    sizes = {"N": 1, "d_model": 16, "d_ff": 32, "h": 2, "dropout": 0.0, **sizes}
    return Transformer(TransformerConfig(vocab_size, **sizes))


def disturbed(model, vectors=0.3, matrices=0.0):
    """A model whose norms and biases are random as well: new ones hide a wrong place."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * (vectors if weight.dim() == 1 else matrices))
    return model.eval()


def state(model):
    """All weights of a model in one vector."""
    return torch.cat([weight.flatten() for weight in model.state_dict().values()])


def inputs(*shapes, seed=1, dtype=torch.float64, scale=1.0):
    """Random tensors of these shapes, which ask for their gradients."""
    generator = torch.Generator().manual_seed(seed)
    numbers = (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)
               for shape in shapes)
    return [tensor.to(dtype).requires_grad_() for tensor in numbers]


def random_mask(*shape, seed=2, share=0.7):
    """A random boolean mask, of which about this share is True."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < share


def cells(path):
    """The cells of a stored page."""
    import nbformat  # which takes two seconds that processes of training do not need

    return nbformat.read(path, as_version=4).cells


def run_python(code, **options):
    """What a program prints in a process of its own, which has to end well."""
    return subprocess.check_output([sys.executable, "-c", code], encoding="utf-8", **options)
