"""Write the training folder of a longer run: experiments/prepare.py multi30k|newstest FOLDER

multi30k: the corpus lower-cased, with punctuation normalised, in Moses tokens, the form in which it
is usually scored. newstest: pairs of news (2008-2012 and 2015-2020, each three times), Tatoeba and
Multi30k to train on; newstest2013 to choose, newstest2014 to score.
"""

import sys
from pathlib import Path

from annotated.data.corpora import load_corpus, read_pairs
from annotated.files import data_root, find_file, whole_folder
from annotated.translation.scores import multi30k_form


def multi30k():
    """The three splits of Multi30k in the form that is scored."""
    corpus = load_corpus("multi30k", source_language="en", target_language="de")
    for split, pairs in corpus.splits().items():
        source, target = zip(*pairs, strict=True)
        pairs = zip(multi30k_form(source, "en"), multi30k_form(target, "de"), strict=True)
        yield split, list(pairs)


def newstest():
    """News (three times), Tatoeba and Multi30k without held-out ones; newstest2013 and 2014."""
    folder = data_root() / "wmt14-en-de"

    def news(stem):
        files = [find_file(folder, f"{stem}.{language}") for language in ("en", "de")]
        if None in files:
            advice = "put the WMT news tests there, one sentence a line"
            raise SystemExit(f"{folder} lacks {stem}.en or {stem}.de: {advice}")
        return list(read_pairs(*files))

    train = 3 * [*news("news-2008-2012"), *news("news-2015-2020")]
    train += load_corpus("tatoeba-en-de").train + load_corpus("multi30k").train
    valid, test = news("newstest2013"), news("newstest2014")
    kept_back = {side for pair in valid + test for side in pair}
    yield "train", [pair for pair in train
                    if all(side.strip() for side in pair) and not kept_back & set(pair)]
    yield "valid", valid
    yield "test", test


def main(name, folder):
    Path(folder).parent.mkdir(parents=True, exist_ok=True)
    with whole_folder(folder) as part:
        for split, pairs in {"multi30k": multi30k, "newstest": newstest}[name]():
            for side, language in enumerate(("en", "de")):
                text = "".join(f"{pair[side]}\n" for pair in pairs)
                (part / f"{split}.{language}").write_bytes(text.encode("utf-8"))
            print(f"{split}: {len(pairs):,} pairs in {folder}")


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("multi30k", "newstest"):
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
