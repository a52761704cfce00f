"""Fuzz prepare, train, translate and score with random text.

    python experiments/fuzz.py [--lines 20000] [--seed 0] [--out results/fuzz.json]

The lines mix scripts, control characters, marks, parts of emoji and terminal codes, from a seed. A
tiny model learns from them and translates them all. The script fails unless each line gives one
line, blank where nothing is visible, and without a U+FFFD that the line did not contain.
"""

import argparse
import random
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from annotated.data.normalization import is_blank
from annotated.files import write_json
from annotated.results import describe_machine, provenance

SCRIPTS = {"Latin": (0x41, 0x17F), "Greek": (0x370, 0x3FF), "Cyrillic": (0x400, 0x4FF),
           "Hebrew": (0x5D0, 0x5EA), "Arabic": (0x620, 0x64A), "Devanagari": (0x904, 0x939),
           "Thai": (0xE01, 0xE3A), "kana": (0x3041, 0x30FF), "Han": (0x4E00, 0x9FFF),
           "Hangul": (0xAC00, 0xD7A3), "emoji": (0x1F300, 0x1FAFF), "any": (0x20, 0x2FFFF)}
MARKS = list(".,;:!?…'\"’‘“”„‚«»‹›–—-‐‑−`´()[]{}<>/\\|@#$%^&*_+=~·•°§¶№")
INVISIBLE = ["\u00ad", "\u200b", "\u200c", "\u200d", "\u200e", "\u200f", "\u202e", "\u2060",
             "\ufeff", "\ufe0f", "\x00", "\x01", "\x08", "\x0b", "\x0c", "\x1b[31m", "\x1b[0m",
             "\x1c", "\x85", "\u2028", "\u2029", "\u0301", "\u0308", "\U000e0041", "\ufffd", "\r"]
SPACES = [" ", " ", " ", "  ", "\t", "\u00a0", "\u2003", "\u202f", "\u3000"]


def draw_line(generator):
    """Return a line of words in some scripts, with marks and invisible characters; it may be empty.
    """
    words = []
    for _ in range(generator.choice((0, 1, 2, 4, 8, 16))):
        low, high = SCRIPTS[generator.choice(list(SCRIPTS))]
        letters = (chr(generator.randint(low, high)) for _ in range(generator.randint(1, 9)))
        word = "".join(letter for letter in letters if not "\ud800" <= letter <= "\udfff")
        kind = generator.random()
        word += generator.choice(MARKS if kind < 0.3 else INVISIBLE) if kind < 0.5 else ""
        words += [word, generator.choice(SPACES)]
    return "".join(words).replace("\n", " ")


def run_annotated(*words, **options):
    """Run an `annotated` command; returns its output, or exits with its error message."""
    done = subprocess.run([sys.executable, "-m", "annotated", *map(str, words)],
                          capture_output=True, **options)
    if done.returncode or b"Traceback" in done.stderr:
        raise SystemExit(f"annotated {words[0]}: status {done.returncode}\n"
                         f"{done.stderr.decode(errors='replace')[-3000:]}")
    return done.stdout


def check_lines(lines, output):
    """Raise an AssertionError unless each line has one valid line of output."""
    outputs = output.split("\n")
    assert outputs.pop() == "" and len(outputs) == len(lines), "one line out for one in"
    for number, (line, text) in enumerate(zip(lines, outputs, strict=True), start=1):
        line = line.removesuffix("\r")
        line = line.removeprefix("\ufeff") if number == 1 else line
        assert "\ufffd" not in text or "\ufffd" in line, f"line {number}: {line!r} → {text!r}"
        assert not (is_blank(line) and text), f"line {number}: {line!r} is blank → {text!r}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    generator, start = random.Random(options.seed), time.time()
    lines = [draw_line(generator) for _ in range(options.lines)]
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        own = folder / "own"
        own.mkdir()
        plain = [line for line in lines if "\r" not in line]  # which no reference may hold
        for split, part in (("train", lines), ("valid", lines[:200]), ("test", plain[:500])):
            for order, language in ((1, "en"), (-1, "de")):
                text = "".join(f"{line}\n" for line in part[::order])
                (own / f"{split}.{language}").write_bytes(text.encode("utf-8"))
        sizes = "--N 1 --d-model 32 --d-ff 64 --h 2 --steps 30 --max-tokens 2048".split()
        run_annotated("prepare", own, folder / "p", "--vocab-size", 800)
        run_annotated("train", folder / "p", "--out", folder / "model", *sizes)
        run_annotated("score", folder / "model", own, "test", folder / "results")
        for name in ("train.en", "train.de"):
            output = run_annotated("translate", "--model", folder / "model", "--input", own / name)
            check_lines(lines if name == "train.en" else lines[::-1], output.decode("utf-8"))
    facts = {"command": shlex.join(["python", "experiments/fuzz.py", *sys.argv[1:]]),
             "data": "random lines, drawn from the seed", "lines": options.lines,
             "metric": "one line out for one in, no new U+FFFD", "seed": options.seed,
             "translated": 2 * options.lines,
             "scripts": list(SCRIPTS), "seconds": round(time.time() - start)}
    print(facts)
    if options.out:
        write_json(options.out, facts | {"machine": describe_machine()} | provenance())


if __name__ == "__main__":
    main()
