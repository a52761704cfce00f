"""Keep a trained model among the results: results/models/NAME, in half precision, with a card.

    python experiments/keep.py gum      after `experiments/treebanks.sh gum`; so for each of MODELS

`load_checkpoint`, and every command that takes a model's folder, reads it. A model has at most 12
MB; a test sees to it that all together have at most 30.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from annotated.data.normalization import Normalizer
from annotated.files import CHECKOUT, write_text
from annotated.results import read_json, read_json_lines
from annotated.training.checkpoints import load_checkpoint, save_checkpoint

FOLDER = CHECKOUT / "results" / "models"
MAX_BYTES, MAX_TOTAL_BYTES = 12e6, 30e6
MODELS = {  # name: the folder of the trained model, its file of results, and what its card says
    "gum": ("_build/parse-gum", "parsing_gum.json", {
        "purpose": "a constituency parser for English (page 22)",
        "command": "experiments/treebanks.sh gum", "license": "mit", "language": "en",
        "data": "the trees of the GUM corpus whose texts are under CC BY (academic writing, court, "
                "news, interviews: CC BY 4.0 and 2.5; annotations CC BY 4.0), by Amir Zeldes and "
                "many annotators, https://github.com/amir-zeldes/gum"}),
    "craft": ("_build/parse-craft", "parsing_craft.json", {
        "purpose": "a constituency parser for English biomedical text (page 22)",
        "command": "experiments/treebanks.sh craft", "license": "cc-by-3.0", "language": "en",
        "data": "the trees of CRAFT's open-access articles (annotations CC BY 3.0; the articles' "
                "own terms in its ATTRIBUTION), https://github.com/UCDenver-ccp/CRAFT"}),
    "multi30k": ("_build/multi30k_record/taught-by-one.seed0", "multi30k_record.jsonl", {
        "purpose": "English captions to German, both lower-cased, in Moses tokens (page 19)",
        "command": "seeds=0 teacher_seeds=0 teachers=published experiments/multi30k_record.sh "
                   "taught-by-one --attention-gain 0.70710678 --patience 0 --precision fp32 "
                   "--steps 4640",
        "license": "other", "language": "[en, de]",
        "data": "the 29,000 pairs of Multi30k's training split, "
                "https://github.com/multi30k/dataset, which names no licence (for research and "
                "education), and translations of their English side by one model trained on them"}),
    "newstest": ("_build/newstest/model", "newstest/test.json", {
        "purpose": "English news to German (pages 19, 20, 97)",
        "command": "experiments/newstest.sh", "license": "other", "language": "[en, de]",
        "data": "224,525 pairs: news tests of the WMT shared tasks of 2008-2012 and 2015-2020 "
                "(for research), Tatoeba (CC BY 2.0 FR, through https://www.manythings.org/anki) "
                "and the training split of Multi30k (no licence named, for research and "
                "education)"}),
}
NORMALIZERS = {  # of models that were trained on text which a script had normalised
    "multi30k": Normalizer(lowercase=True, punctuation=True, moses=True)}
CARD = """---
license: {license}
language: {language}
library_name: annotated
---

# {name}: {purpose}

- **Made by** `{command}`, then `python experiments/keep.py {name}`: {steps:,} updates, \
seed {seed}, {average} checkpoints averaged, on {machine}.
- **Trained on** {data}.
- **Size**: {parameters:,} parameters in float16, which `load_checkpoint` reads as fp32; \
rounding moved no weight by more than {moved:.1e}.
- **Scores, seconds, log, revision**: [{results}](../../{results}), measured before rounding.
- **Use**: an example for a book, trained with one seed on two processor cores; not meant for \
real work.
"""


def load_result(path, folder):
    """Return the result of the run that a model comes from: in a file of many, that of the row and
    the seed which name its folder.
    """
    if path.suffix == ".json":
        return read_json(path)
    row, _, seed = Path(folder).name.partition(".seed")
    return next(run for run in read_json_lines(path)
                if (run["row"], run["training_seed"], run["split"]) == (row, int(seed), "test"))


def keep(name, place=FOLDER, root=CHECKOUT):
    """Write the model `name` into `place`; raises a ValueError if it is too large."""
    folder, results, figures = MODELS[name]
    machine = load_result(root / "results" / results, folder)["machine"]
    saved = load_checkpoint(root / folder)
    weights = saved.model.state_dict().values()
    moved = max((weight.half() - weight).abs().max().item() for weight in weights)
    with tempfile.TemporaryDirectory() as part:
        new = Path(part) / name
        if name in NORMALIZERS:
            saved.tokenizer.normalizer = NORMALIZERS[name]
        save_checkpoint(new, saved.model.half(), saved.tokenizer, **saved.info)
        write_text(new / "README.md", CARD.format(
            name=name, results=results, machine=machine, moved=moved,
            steps=saved.info["log"][-1]["step"],
            seed=saved.info["training"]["seed"], average=len(saved.info["averaged"]),
            parameters=sum(weight.numel() for weight in saved.model.parameters()), **figures))
        size = sum(path.stat().st_size for path in new.iterdir())
        if size > MAX_BYTES:
            got = f"the model {name} has {size / 1e6:.1f} MB, more than {MAX_BYTES / 1e6:.0f}"
            raise ValueError(f"{got}: keep a smaller one")
        shutil.rmtree(place / name, ignore_errors=True)
        shutil.copytree(new, place / name, copy_function=shutil.copyfile)
    print(f"{place / name}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    if sys.argv[1:2] == [] or sys.argv[1] not in MODELS:
        sys.exit(f"usage: python experiments/keep.py {{{','.join(MODELS)}}}")
    keep(sys.argv[1])
