"""What a processor cannot run: the numbers of a GPU beside its own, in fp32, TF32 and bf16.

    python tests/test_cuda.py

By unittest, so that a machine with a GPU needs what the package needs and no more. Without a GPU
all is skipped; TEST_DEVICE=cpu rehearses it, and compares the processor with itself.

How far a GPU may be off is measured, not chosen. The processor's own error, beside double
precision, shows what the roundings of a type do to this model; sums in another order and another
exponential get three bits more (`ROOM`). A wrong mask, scale or position is off by far more than
that in fp32.
"""

import copy
import os
import tempfile
import unittest
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional as F

from annotated.data.batches import Batch
from annotated.data.corpora import load_corpus
from annotated.data.tokenizers import PAD
from annotated.fast.chunked_loss import ChunkedLoss
from annotated.fast.prepare import PreparedPart, prepare, undo
from annotated.model.transformer import Transformer, TransformerConfig
from annotated.training.checkpoints import book_model, load_checkpoint, run_checkpoints
from annotated.training.label_smoothing import LabelSmoothingLoss
from annotated.training.loop import TrainingConfig, forward_backward, train
from annotated.translation.search import translate

DEVICE = os.environ.get("TEST_DEVICE", "cuda")
ROOM = 8
SMOOTHING = 0.1


def model_and_pairs(dropout=0.0):
    """A small model, and 64 pairs of 1 to 40 ids a side."""
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(500, N=2, d_model=64, d_ff=256, h=4, dropout=dropout))
    lengths = torch.randint(1, 41, (64, 2)).tolist()
    return model, [tuple(torch.randint(4, 500, (n,)).tolist() for n in pair) for pair in lengths]


def far(found, right):
    """The distance of two vectors as a share of the second, both in double precision."""
    found, right = found.double().cpu(), right.double().cpu()
    return ((found - right).norm() / right.norm()).item()


def measure(model, pairs, device, precision="fp32", loss=ChunkedLoss):
    """(mean loss, loss of each token, gradient) of a copy of a model on a device."""
    model, batch = copy.deepcopy(model).to(device).train(), Batch.collate(pairs).to(device)
    criterion = loss(SMOOTHING, PAD, reduction="sum")
    if loss is ChunkedLoss:  # in parts, as with a large vocabulary
        criterion.of_hidden = partial(criterion.of_hidden, chunk=256)
    mean = forward_backward(model, [batch], batch.tokens, criterion, precision)
    gradient = torch.cat([weight.grad.flatten() for weight in model.parameters()])
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
        logits = model(batch.source, batch.target_in).double()
    losses = F.cross_entropy(logits.flatten(0, 1), batch.target_out.flatten(), ignore_index=PAD,
                             reduction="none", label_smoothing=SMOOTHING)
    return mean.item(), losses[losses > 0], gradient


@unittest.skipIf(DEVICE == "cuda" and not torch.cuda.is_available(), "there is no GPU here")
class OnAGPU(unittest.TestCase):
    def setUp(self):
        self.addCleanup(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("highest")

    def test_losses_and_gradients_are_as_near_to_double_precision_as_a_processor_s(self):
        """TF32 keeps three bits more of a factor than bf16: without `ROOM` it beats bf16 here."""
        model, pairs = model_and_pairs()
        mean, losses, gradient = measure(copy.deepcopy(model).double(), pairs, "cpu",
                                         loss=LabelSmoothingLoss)
        prepare(model)
        for products, precision, like, room in (("highest", "fp32", "fp32", ROOM),
                                                ("high", "fp32", "bf16", 1),
                                                ("highest", "bf16", "bf16", ROOM)):
            _, *here = measure(model, pairs, "cpu", like)
            torch.set_float32_matmul_precision(products)
            found, *there = measure(model, pairs, DEVICE, precision)
            torch.set_float32_matmul_precision("highest")
            for what, own, other, right in zip(("losses", "gradient"), here, there,
                                               (losses, gradient), strict=True):
                with self.subTest(precision=precision, products=products, what=what):
                    self.assertLessEqual(far(other, right), room * far(own, right))
            with self.subTest(precision=precision, products=products, what="mean loss"):
                # a mean of errors is at most the root of their mean square
                error = (here[0].double() - losses).square().mean().sqrt().item()
                self.assertLessEqual(abs(found - mean), room * error)

    def test_the_book_s_model_translates_as_on_a_processor(self):
        """In fp32 but for a tie; in bf16 about as many sentences change as on a processor."""
        sentences, references = zip(*load_corpus("toy").test[:100], strict=True)
        saved = book_model()

        def outputs(model, device, beam):
            model = prepare(copy.deepcopy(model)).to(device)
            return translate(sentences, model, saved.tokenizer, beam=beam)

        def changed(texts, plain):
            return sum(a != b for a, b in zip(texts, plain, strict=True))

        for beam in (1, 4):
            with self.subTest(beam=beam):
                plain = translate(sentences, saved.model, saved.tokenizer, beam=beam)
                self.assertLess(changed(plain, references), 50)
                self.assertLessEqual(changed(outputs(saved.model, DEVICE, beam), plain), 1)
                low = copy.deepcopy(saved.model).bfloat16()
                here, there = (changed(outputs(low, device, beam), plain)
                               for device in ("cpu", DEVICE))
                self.assertLessEqual(there, here + 3 * (here + 1) ** 0.5)  # three deviations

    def test_a_prepared_model_computes_the_same_and_undo_gives_the_first_one_back(self):
        model, pairs = model_and_pairs()
        batch = Batch.collate(pairs)
        right = copy.deepcopy(model).double()(batch.source, batch.target_in)
        model, batch = model.to(DEVICE).eval(), batch.to(DEVICE)
        ids, weights = (batch.source, batch.target_in), [*model.state_dict()]
        with torch.no_grad():
            plain = model(*ids)
            fast = prepare(model)(*ids)
            self.assertTrue(any(isinstance(part, PreparedPart) for part in model.modules()))
            self.assertEqual([*model.state_dict()], weights)
            again = undo(model)(*ids)
        self.assertFalse(any(isinstance(part, PreparedPart) for part in model.modules()))
        self.assertTrue(torch.equal(again, plain))
        real = (batch.target_out != PAD).cpu()
        plain, fast, right = (logits.detach().cpu()[real] for logits in (plain, fast, right))
        self.assertLessEqual(far(fast, right), ROOM * far(plain, right))

    def test_a_run_from_a_gpu_goes_on_on_a_processor(self):
        """More steps than lie between two readings of the losses, in bf16, with dropout."""
        model, pairs = model_and_pairs(dropout=0.1)
        config = {"max_tokens": 512, "warmup": 20, "factor": 0.1, "validate_every": 20,
                  "save_every": 20}
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            there = train(prepare(model).to(DEVICE), pairs, pairs[:8],
                          TrainingConfig(40, precision="bf16", **config), False, run,
                          loss=ChunkedLoss)
            saved = load_checkpoint(run_checkpoints(run)[-1]).model
            for weight, own in zip(saved.parameters(), model.parameters(), strict=True):
                self.assertEqual(weight.device.type, "cpu")
                self.assertTrue(torch.equal(weight, own.cpu()))
            here = train(saved, pairs, pairs[:8],
                         TrainingConfig(60, precision="bf16", **config), False, run)
        self.assertEqual([row["step"] for row in here], [20, 40, 60])
        self.assertEqual(here[:2], there)
        self.assertLess(here[-1]["train_loss"], here[0]["train_loss"])


if __name__ == "__main__":
    unittest.main()
