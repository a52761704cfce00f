"""`make test-long`: plant known faults, each in a copy of the checkout of its own, and see a test catch it.

    python tools/mutate.py              all of them; the report goes to results/mutations.json
    python tools/mutate.py "pre-norm"   those whose name contains the words
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from annotated.files import provenance
from notebooks import ROOT

# (fault, module, code as it is, code with the fault, the test files that guard it)
MUTATIONS = [
    ("pre-norm where post-norm is printed", "stacks", "if self.norm_first:", "if not self.norm_first:", "stacks"),
    ("the causal mask is off by one", "masking", ".tril()", ".tril(1)", "masking transformer"),
    ("sine and cosine swapped", "positional", "[angles.sin(), angles.cos()]", "[angles.cos(), angles.sin()]", "positional"),
    ("√d_model left out of the embedding", "embeddings", " * math.sqrt(self.weight.size(1))", "", "embeddings"),
    ("√d_k left out of the scores", "attention", "(query / math.sqrt(key.size(-1)))", "query", "attention"),
    ("attention dropout on in eval mode", "attention", "self.dropout if self.training else 0.0", "self.dropout", "attention multi_head"),
    ("translating with dropout on", "decoding", "with evaluating(model):", "with torch.no_grad():", "decoding"),
    ("the output projection untied from the embedding", "embeddings", "self.weight.T", "self.weight.detach().T", "embeddings"),
    ("the last token of the target dropped", "batches", "[BEGIN, *target, END]", "[BEGIN, *target[:-1], END]", "batches"),
    ("the end token dropped", "batches", "[*source, END]", "[*source]", "batches"),
    ("the loss counts padding", "regularization", "loss.masked_fill(padding, 0.0).sum()", "loss.sum()", "regularization"),
    ("the schedule is one update late", "schedule", "self.last_epoch + 1", "max(1, self.last_epoch)", "schedule"),
    ("a reshape mixes up the heads", "multi_head", "x.unflatten(-1, (self.h, -1)).transpose(1, 2)",
     "x.reshape(x.size(0), self.h, x.size(1), -1)", "multi_head"),
    ("masked weights are small instead of 0", "attention", "weights.masked_fill(~mask, 0.0)", "weights", "attention"),
    ("the decoder sees the padding of the source", "transformer", "memory, mask, memory_mask)",
     "memory, mask, torch.ones_like(memory_mask))", "transformer"),
    ("the smoothing leaves out the right token", "regularization", "log_p.mean(dim=-1)",
     "(log_p.sum(dim=-1) - right) / (log_p.size(-1) - 1)", "regularization"),
    ("perplexity of the smoothed loss", "training", "nll = loss(0.0,", "nll = loss(0.1,", "training"),
    ("validation with dropout on", "training", "with evaluating(model):\n        for", "with torch.no_grad():\n        for", "training"),
    ("every sentence gets the limit of the longest in its batch", "decoding", "(source != PAD).sum(dim=1) + extra",
     "torch.full((len(source),), source.size(1) + extra)", "decoding"),
    ("a cached step stands one position too early", "decoding", "model.embedding(tokens), start)",
     "model.embedding(tokens), max(0, start - 1))", "decoding"),
    ("several new tokens see those after them", "decoding", "mask = None if new == 1 else", "mask = None if new else", "decoding"),
    ("the cache does not follow the beam", "decoding", "(left.unsqueeze(1) * slots + slot[left]).flatten(), left)",
     "(left.unsqueeze(1) * slots + slot[left].sort().values).flatten(), left)", "decoding"),
    ("the length penalty is left out", "decoding", "return ((5 + length) / 6) ** alpha", "return 1.0 + 0 * length", "decoding"),
    ("finished hypotheses leave the beam", "decoding", "new[..., 0].masked_fill_(finished, 0.0)", "pass", "decoding"),
    ("padding is not dropped from the chunks", "fast", "x.flatten(0, axes) if gpu else x[real] for x", "x.flatten(0, axes) for x", "fast"),
    ("the chunked gradient forgets the outer one", "fast", "grad.mul_(outer)", "grad", "fast"),
    ("the second look misses the end of the vocabulary", "fast", "places[whole:].expand(len(x), -1)",
     "places[types:].expand(len(x), -1)", "fast"),
    ("hypotheses share the wrong memory", "decoding", "len(sentences) < len(self.memory[0][0])", "False", "decoding"),
    ("the mask of the memory stays behind", "decoding", "self.memory_mask[sentences]", "self.memory_mask[: len(sentences)]", "decoding"),
    ("a temperature multiplies", "decoding", ".float() / temperature", ".float() * temperature", "decoding"),
    ("a nucleus leaves out its last token", "decoding", "p.cumsum(dim=1) - p >= top_p", "p.cumsum(dim=1) > top_p", "decoding"),
    ("places are drawn in place of tokens", "decoding", "tokens.gather(1, p.multinomial(1, generator=generator))",
     "p.multinomial(1, generator=generator)", "decoding"),
    ("a beam stops with its first finished hypothesis", "decoding", " & (score[:, n_best - 1] > reachable)", "", "decoding"),
    ("queries and keys exchanged in the recorded weights", "multi_head", "weights.detach()",
     "weights.detach().transpose(-1, -2)", "multi_head"),
    ("the loss is divided by the tokens of each share", "training", "batch.target_out) / tokens",
     "batch.target_out) / max(1, batch.tokens)", "training"),
    ("the schedule moves once a micro-batch", "training", "            schedule.step()",
     "            [schedule.step() for _ in range(config.accumulate)]", "training"),
    ("a run goes on with other random numbers", "run_state", 'set_random_state(progress["random"][rank], self.device)',
     "pass", "run_state"),
    ("a run goes on at the beginning of the data", "training", "loader.seek(run.position, run.step)", "pass", "run_state"),
    ("the largest batch is taken for one of pairs of equal length", "batches", "counts.cumsum()[there]",
     "counts[there]", "training"),
    ("another corpus on the disk goes unnoticed", "run_state", "[split.digest] if", "[''] if", "run_state"),
    ("the speed counts steps", "run_state", "(self.tokens - tokens)", "(self.step - tokens)", "callbacks"),
    ("gradients that are not finite are applied", "training", "(~norm.isfinite()).float()", "0 * (~norm.isfinite()).float()", "training"),
    ("a short gradient is made longer", "training", ".clamp(min=1).float()", ".float()", "training"),
    ("the numbers of steps that are not sent yet are lost", "run_state", "        if self.pending:\n", "        if False:\n", "run_state"),
    ("a checkpoint changes while it is written", "checkpoints", '.to("cpu", copy=True)', '.to("cpu")', "checkpoints"),
    ("what goes wrong in a thread is lost", "callbacks", "            last.result()", "            last.exception()", "callbacks"),
    ("what SIGTERM wrote enters the average", "checkpoints", 'info.get("scheduled", True)', "True", "checkpoints"),
    ("only the newest checkpoint keeps its optimiser", "checkpoints", "[:-RESUMABLE]", "[:-1]", "checkpoints"),
    ("ranks with different corpora train together", "run_state", "difference = first_difference(first, facts_there)",
     "difference = None", "processes"),
    ("each rank keeps the optimiser that it began with", "checkpoints", "        broadcast_state(model, optimizer)", "        pass",
     "processes"),
    ("a prepared corpus is tokenised anew", "training", "if not isinstance(corpus.train, PairArrays):", "if corpus.train:", "terminal"),
    ("an average of checkpoints is their sum", "checkpoints", "(tensor / len(folders))", "tensor", "checkpoints"),
    ("curves are logged one row late", "terminal", 'writer.add_scalar(name, value, row["step"])',
     'writer.add_scalar(name, value, row["step"] + 1)', "terminal"),
    ("an empty folder of somebody else is replaced", "files", "if os.path.lexists(path):  # an empty", "if False:  # an empty", "files"),
    ("what another writer is at is swept away", "files", "st_mtime > 86_400", "st_mtime > 0", "files"),
    ("a folder has its name before the disk has its files", "files", "(*part.rglob(\"*\"), part)", "(part,)", "files"),
    ("a link in an archive is taken for a file", "files", "if found is None or not found.isfile():", "if found is None:", "files"),
    ("lines of two files slip in silence", "corpora", "        if None in pair:",
     "        if None in pair:\n            return\n        if None in pair:", "corpora"),
    ("broken letters pass the cleaning", "corpora", 'return "broken"', "pass", "corpora"),
    ("an epoch leaves out the last block", "batches", "-(-len(lengths) // block)", "len(lengths) // block", "batches"),
    ("every epoch takes the blocks in the same order", "batches", "np.random.default_rng(seed).permutation(-",
     "np.random.default_rng(0).permutation(-", "batches"),
    ("truncated files of encoded pairs are accepted", "prepared", 'if size != facts["bytes"] or check', "if size < 0 or check", "prepared"),
    ("ids above 65,535 wrap round", "prepared", 'dtype = "<u2" if len(tokenizer) <= 1 << 16 else "<i4"', 'dtype = "<u2"', "prepared"),
    ("a share of a batch is as wide as its own rows only", "batches", "longest = pairs.lengths[indices].max(axis=0)",
     "longest = pairs.lengths[indices[part::parts]].max(axis=0, initial=1)", "batches"),
    ("a late start in an epoch forgets what it skipped", "batches", "            skip -= batches\n", "            skip = 0\n", "batches"),
    ("a thread goes on making what nobody asks for", "batches", "                future.cancel()", "                pass", "batches"),
    ("the validation set is cleaned", "prepared", "valid = write_encoded(plain(corpus.valid),",
     "valid = write_encoded(plain(clean_pairs(corpus.valid, {}, *limits)),", "prepared"),
    ("tokens end the script of a saved page", "saving", '.replace("<", "\\\\u003c")', "", "saving"),
    ("tokens become elements in the table of a saved page", "saving", "<td>{html.escape(cell)}</td>", "<td>{cell}</td>", "saving"),
    ("the stepper shows the attention of the step after", "attention_charts", '"datum.row", "(step - 1)"', '"datum.row", "step"',
     "attention_charts"),
    ("an explorer exchanges queries and keys", "attention_charts", "weights[at][{head}][{query}][datum.key]",
     "weights[at][{head}][datum.key][{query}]", "attention_charts"),
    ("null bytes reach the files of charts", "style", "text.translate(_CONTROLS)", "text", "saving"),
    ("charts to touch stay white on a dark page", "attention_charts", "dark ? '{DARK[name]}'", "dark ? '{COLOURS[name]}'",
     "attention_charts"),
    ("a batch of several sentences is drawn as its first", "style", "array[0] if array.ndim == 4 and len(array) == 1 else array",
     "array[0] if array.ndim == 4 else array", "attention_charts"),
    ("the policy of a saved page allows any script", "saving", "script-src {allowed}", "script-src 'unsafe-inline' 'unsafe-eval'",
     "saving"),
    ("a table loses the panels after the first", "style", "if len(tables) == 1:", "if tables:", "style"),
    ("traces stay in the trees", "trees", 'if node.label == "-NONE-" else', 'if node.label == "-X-" else', "trees"),
    ("a wrong closing label passes", "parsing", "if label != symbol[1:]:", "if label is None:", "parsing"),
    ("output that stops early counts as a tree", "parsing",
     'return tree if next(words, None) is None else Malformed("fewer leaves than words")', "return tree", "parsing"),
    ("malformed output is not counted", "parsing", "errors + wrong", "errors", "parsing"),
    ("the root counts as a bracket", "parsing", "if label not in ROOTS and place[start] < place[end]:",
     "if place[start] < place[end]:", "parsing"),
    ("punctuation moves the brackets", "parsing", 'PUNCTUATION = (",", ":", "``", "\'\'", ".")', "PUNCTUATION = ()", "parsing"),
    ("parses are searched with the penalty for translations", "parsing", "beam=21, alpha=0.3, extra=300, max_tokens",
     "beam=21, alpha=0.6, extra=300, max_tokens", "parsing"),
    ("words are numbered from 0 wherever the count begins", "parsing", "in enumerate(ids, start)", "in enumerate(ids)", "parsing"),
    ("a word that is no leaf passes for one", "parsing", 'word = "word {}" if', "word = LEAF if", "parsing"),
    ("dropout does not make up for what it drops", "fast", ".mul_(65536 / (65536 - drop))", "", "fast"),
    ("four neighbours share a draw of dropout", "fast", "words.view(torch.int16)[: x.numel()]",
     "words.view(torch.int16)[::4].repeat_interleave(4)[: x.numel()]", "fast"),
    ("the chunks read their sum off the right token", "fast", "z.amax(dim=1) - p.amax(dim=1).log()",
     "(z.gather(1, at) - p.gather(1, at).log()).squeeze(1)", "fast"),
    ("the gradient of the last chunk replaces the others", "fast", "outer.addmm_(logits.T, x)", "logits.T @ x", "fast"),
    ("the bf16 gradient of the last chunk replaces the others", "fast", "outer.add_", "torch.empty_like(weight).copy_", "fast"),
    ("kept memory lies in small pages", "files", "mmap.MADV_HUGEPAGE",
     "mmap.MADV_NORMAL", "fast"),
    ("large pages are lost when memory is given back", "files", "malloc(1 << 26), 1 << 21",
     "None, 1 << 21", "fast"),
    ("training keeps the slow dropout", "fast", "JoinedAttention, nn.Dropout: SixteenBitDropout,", "JoinedAttention,", "fast"),
    ("a beam's softmax is taken in half precision", "fast", "part.log_softmax(dim=1, dtype=torch.promote_types(part.dtype, torch.float32))",
     "part.log_softmax(dim=1)", "fast"),
    ("a plain beam's softmax is taken in half precision", "decoding", "log_softmax(dim=1, dtype=precision)", "log_softmax(dim=1)",
     "decoding"),
    ("the error names the line before", "trees", "stream_lines(path), start=1)", "stream_lines(path), start=0)", "trees"),
    ("masks are taken for granted to hide nothing", "fast", "bool(mask.all())", "True", "fast"),
    ("the first sentence's mask is everybody's", "fast", "mask[:1] if surely_all(mask == mask[:1]) else mask", "mask[:1]", "fast"),
    ("the mask is dropped in the fused function", "fast", "else (mask, dropout)", "else (None, dropout)", "fast"),
    ("a causal mask may hide padding before words", "fast", " & (real[..., 1:] <= real[..., :-1]).all()", "", "fast"),
    ("what is causal alone hides nothing", "fast", "(None, dropout, True) if hasattr", "(None, dropout) if hasattr", "fast"),
    ("the mask is dropped where attention is spelled out", "fast", "weights = lean_softmax(scores, mask)",
     "weights = lean_softmax(scores)", "fast"),
    ("undo stops at the first prepared part", "fast", "        undo(getattr(model, name))\n", "", "fast"),
    ("undo forgets what has changed since", "fast", "plain.update((each, vars(child)[each]) for each in plain)", "pass", "fast"),
    ("what was put in from outside is read past", "fast", 'type(getattr(one, "plain", one)) is nn.Linear and one.bias is None', "True",
     "fast"),
    ("packed weights are used in training", "fast", "return super().forward(x) if self.training else self.product(x).to(self.dtype)",
     "return self.product(x).to(self.dtype)", "fast"),
    ("all rows of 8 bits share a scale", "products", "weight.abs().amax(dim=1) / 127",
     "weight.abs().amax().expand(len(weight)) / 127", "products"),
    ("what was quickest for other rows is taken", "products", "bias is None, rows, torch", "bias is None, torch", "products"),
    ("a product is taken that is not quick", "products", "if seconds[name] <= enough)", "if seconds[name] >= enough)", "products"),
    ("four rows at once are read as two", "native", "else tile(ROWS / 2, w,", "else tile(ROWS / 4, w,", "native"),
    ("the padding of the target is not asked for", "transformer", "target.device) & padding_mask(target, self.config.pad_id)",
     "target.device)", "transformer"),
    ("kept positions begin at 0", "fast", "self.table[start:end].to(x.dtype)", "self.table[: end - start].to(x.dtype)", "fast"),
    ("the plain part records in another mode", "multi_head", "self.train(part.training)", "pass", "multi_head fast"),
    ("the memory is rounded for each product", "fast", "inputs = rounded(memory), lean(mask)",
     "inputs = memory, lean(mask)", "fast"),
    ("products with gradients overlook autocast", "fast", 'if not alike or torch.is_autocast_enabled("cpu") or', "if not alike or", "fast"),
    ("oneDNN is taken without a gain", "products", "< 0.95 * seconds", "< 9.5 * seconds", "products"),
    ("products from outside get rounded weights too", "fast", 'type(getattr(part, "plain", part)) is nn.Linear',
     "isinstance(part, nn.Linear)", "fast"),
    ("a layer's rounded weights are exchanged", "fast", "zip(weights, parts, strict=True)", "zip(weights, parts[::-1], strict=True)",
     "fast"),
    ("a folder prepared with other facts will do", "batches", "prepared.facts.get(fact, False)", "value", "batches"),
    ("compiled layers stay when the training is over", "training", "            del layer.forward", "            pass", "training"),
    ("scores of a step in C are not scaled", "native", "score * turn", "score", "fast"),
    ("three projections in one where the inputs differ", "fast", "query is not key or key is not value or not (", "not (", "fast"),
    ("a step in C passes by what is from outside", "fast", "decoder.native is None or not consists_of(model, _KNOWN)",
     "decoder.native is None", "fast"),
    ("a row in C forgets whose past it has", "native", "self.past[rows], self.sentences[rows]",
     "self.past[0 * rows], self.sentences[rows]", "fast"),
    ("a token in C may be below 0", "native", "tokens[r] < 0 || ", "", "fast"),
    ("a target in C may be below 0", "products", "target[r] < 0 || ", "", "products"),
    ("the loss in C forgets what is smoothed", "products", " - less * sum;", ";", "products"),
    ("the right token in C keeps the gradient of the others", "products", "* turn - less - most);", "* turn - less);", "products"),
    ("what dropout takes in C keeps its gradient", "products", "nearest(KEPT(i) ? to[i] * scale : 0)",
     "nearest(to[i] * scale)", "products"),
    ("all draws of dropout in C are one", "products", ".random_().item() if rate else 0", ".random_().item() * 0", "products"),
    ("the last rows of a sub-layer in C are in no sum", "products", "part < (rows + block - 1) / block", "part < rows / block", "products"),
    ("small sub-layers end in C too", "fast", "small, drops = x.numel() <= 1 << 17, ", "small, drops = False, ", "fast"),
    ("no sub-layer ends in C", "fast", ", ResidualConnection: QuickResidual}", "}", "fast"),
    ("what C cannot sum is lost", "fast", "if losses is not None else", "if losses is not None else 0 *", "fast"),
    ("biases of the decoder are passed by in C", "native", "return found == [shapes for _, shapes in wanted] and all(", "return all(",
     "fast"),
    ("heads of another number are passed by in C", "native", 'for name in ("h", "norm_first")', 'for name in ("norm_first",)', "fast"),
    ("a damaged library is loaded", "files", " and sha256_of(path) == mark.read_text()", "", "files"),
    ("a library is taken for another processor", "files", "compiler, torch, *_processor()]", "compiler, torch]", "files"),
    ("the quickest precision of other rows is taken", "native", 'vars(model.config), "rows": rows}', "vars(model.config)}", "fast"),
    ("a rough look leaves no room for rounding", "fast", "slack = torch.stack(", "slack = 0 * torch.stack(", "fast"),
    ("a rough look is sure of everything", "fast", "logits > eighth + 2**-8 * eighth.abs()", "logits > -math.inf", "fast"),
    ("what a rough look is not sure of stays", "fast", "if sure is not None and sure.all():", "if sure is not None:", "fast"),
    ("a rough look may say padding", "fast", "bounds[:, [PAD, BEGIN]] = -math.inf", "pass", "fast"),
    ("the wrong matrices are joined", "fast", "layers = self.W_Q, self.W_K, self.W_V", "layers = self.W_K, self.W_Q, self.W_V", "fast"),
    ("all processes draw the same dropout", "distributed", "seed + (ranks()[0] << 20)", "seed", "distributed"),
    ("seeds differ in bits that PyTorch does not read", "distributed", "ranks()[0] << 20", "ranks()[0] << 32", "distributed"),
    ("words of the test set in the vocabulary", "terminal", "tokens.WordTokenizer.fit(corpus.train, *languages)",
     "tokens.WordTokenizer.fit(corpus.train + corpus.test, *languages)", "terminal"),
    ("pieces are learnt from the test set too", "terminal", "tokens.SubwordTokenizer.fit(corpus.train, pieces",
     "tokens.SubwordTokenizer.fit(corpus.train + corpus.test, pieces", "terminal"),
    ("words of the validation set in the book's vocabulary", "../experiments/toy", "WordTokenizer.fit(corpus.train)",
     "WordTokenizer.fit(corpus.train + corpus.valid)", "toy"),
    ("the mean of the first checkpoints, not of the last", "terminal", "[-options.average :]", "[: options.average]", "terminal"),
    ("a preset is forgotten for the defaults", "terminal", "options if preset == first else read(preset)", "options", "terminal"),
    ("the commands train the plain model", "terminal", "build or fast.transformer_to_train", "build or training.Transformer",
     "terminal"),
    ("a smaller start leaves the values out", "terminal", '"W_K.weight", "W_V.weight"', '"W_K.weight"', "terminal"),
    ("a damaged checkpoint is taken", "checkpoints", "            check_folder(folder, training=True)\n            return folder",
     "            return folder", "run_state"),
    ("words of the validation set in that of Table 3", "variations",
     "        tokenizer = WordTokenizer.fit(corpus.train, corpus.source_language",
     "        tokenizer = WordTokenizer.fit(corpus.train + corpus.valid, corpus.source_language", "variations"),
    ("pieces of the validation set in those of Table 3", "variations", "SubwordTokenizer.fit(corpus.train, size",
     "SubwordTokenizer.fit(corpus.train + corpus.valid, size", "variations"),
    ("merges are carried out in reverse", "tokens", "library_tokenizer(model, self.vocabulary, self.merges)",
     "library_tokenizer(model, self.vocabulary, self.merges[::-1])", "tokens"),
    ("no dropout in the fused function", "fast", "else (mask, dropout)\n", "else (mask, 0.0)\n", "fast"),
    ("-10,000 in place of the lowest number", "attention", "finfo(scores.dtype).min", "-1e4", "attention"),
    ("Table 3 is decoded greedily", "variations", "corpus.source_language, **DECODING)", "corpus.source_language)", "variations"),
    ("a beam of 5 where nobody says otherwise", "decoding", 'source: Int[Tensor, "batch n"], beam=4,',
     'source: Int[Tensor, "batch n"], beam=5,', "decoding"),
    ("a run goes on with another smoothing", "run_state", '["steps", "patience", "save_every", "keep_last"',
     '["steps", "patience", "label_smoothing", "save_every", "keep_last"', "run_state"),
    ("a run goes on with another seed", "run_state", '["steps", "patience", "save_every", "keep_last"',
     '["steps", "patience", "seed", "save_every", "keep_last"', "run_state"),
    ("a restarted process reads the addresses of the dead", "distributed", 'os.environ.get("GROUP_WORLD_SIZE") == "1"',
     "False", "distributed"),
    ("a kept model computes in half precision", "checkpoints", "tensor.float() if tensor.dtype", "tensor.clone() if tensor.dtype",
     "checkpoints"),
    ("the vocabulary is learnt before cleaning", "prepared", "(pair for pair in clean if generator",
     "(pair for pair in corpus.train if generator", "prepared"),
    ("one seed for every pool", "batches", "seed=(*seed, number)", "seed=seed", "batches"),
    ("half of all words are hidden, rare or not", "parsing", "draw() < word_dropout / (word_dropout + counts[word])", "draw() < 0.5",
     "parsing"),
    ("a parser is the mean of its last checkpoints, past the best", "parsing", "int(path.name[5:]) <= until", "path", "parsing"),
    ("a training ends although the loss has just fallen", "callbacks", "min(losses[-self.patience:]) >= min(losses[:-self.patience])",
     "True", "callbacks"),
    ("right-branching takes the commonest label anywhere", "parsing", "if place[end] == place[-1] and place[end] - place[start] > 1)", ")",
     "parsing"),
    ("right-branching takes the root's label inside", "parsing", "label = max(inner, key=inner.get, default=root)", "label = root",
     "parsing"),
    ("German quotes stay in the definition with plain ones", "evaluation", "map(plain_quotes, lines)", "lines", "evaluation"),
    ("punctuation is normalised as in English", "evaluation", "MosesPunctNormalizer(lang=language)", "MosesPunctNormalizer()",
     "evaluation"),
    ("the log of a run is not kept while it goes", "callbacks", "write_json_lines(self.path, run.log)", "pass", "run_state"),
    ("every process writes the log", "callbacks", "if ranks()[0] == 0:\n            write_json_lines",
     "if True:\n            write_json_lines", "callbacks"),
    ("an optimiser is saved without progress", "checkpoints", "if (optimizer is None) != (progress is None):", "if False:", "checkpoints"),
]


def checkout(folder):
    """Make a folder a checkout in which a fault can be planted: processes that tests start find the fault wherever they look.

    Package, experiments, tests and tools are copies, all else links.
    """
    for entry in ROOT.iterdir():
        if entry.name in ("annotated", "experiments", "tests", "tools"):
            shutil.copytree(entry, folder / entry.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif entry.name not in (".git", ".venv", "_build", "data"):
            (folder / entry.name).symlink_to(entry)
    (folder / "data").mkdir()
    (folder / "data" / "toy").symlink_to(ROOT / "data" / "toy")


def plant(copy, module, old, new):
    """Put one fault into the copied package; the code as it is must be there exactly once or everywhere the same."""
    file = copy / "annotated" / f"{module}.py"
    source = file.read_text(encoding="utf-8")
    if old not in source:
        raise SystemExit(f"annotated/{module}.py no longer holds {old!r}: bring tools/mutate.py up to date")
    file.write_text(source.replace(old, new), encoding="utf-8")


def caught_by(copy, tests, known=None):
    """Run the test files of the copy, the test `known` before them; the name of the first test that fails, or None."""
    file, _, function = (known or "").partition("[")[0].partition("::")
    if function and f"def {function}(" in (copy / "tests" / file).read_text(encoding="utf-8"):
        found = first_failure(copy, [f"tests/{file}::{function}"])
        if found:
            return found
    return first_failure(copy, [f"tests/test_{name}.py" for name in tests.split()])


def first_failure(copy, files):
    """Run tests of the copy up to the first that fails; its name, or None."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(copy), str(copy / "tools")]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *files]
    run = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    found = re.search(r"^(?:FAILED|ERROR) (\S+\.py(?:::.*?)?)(?: - .*)?$", run.stdout, re.MULTILINE)
    if run.returncode not in (0, 1) or (run.returncode == 1 and not found):
        raise SystemExit(f"pytest could not run:\n{run.stdout[-3000:]}{run.stderr[-2000:]}")
    return found.group(1).split("/tests/")[-1].removeprefix("tests/") if found else None


def tried(fault, module, old, new, tests, known=None):
    """Plant one fault in a copy of the checkout; the name of the first test that fails, or None."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder).resolve()
        checkout(copy)
        plant(copy, module, old, new)
        found = caught_by(copy, tests, known)
    print(f"{fault:60} {found or 'NOT CAUGHT'}", flush=True)
    return found


def main():
    wanted, report = " ".join(sys.argv[1:]), ROOT / "results" / "mutations.json"
    before = json.loads(report.read_text(encoding="utf-8"))["caught by"] if report.is_file() else {}
    faults = [mutation for mutation in MUTATIONS if wanted in mutation[0]]
    with tempfile.TemporaryDirectory() as folder:  # a test that fails anyway would catch everything
        checkout(copy := Path(folder).resolve())
        if faults and (fails := caught_by(copy, " ".join(sorted({name for *_, tests in faults for name in tests.split()})))):
            raise SystemExit(f"{fails} fails without any fault: mend it first")
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # a test run is a process of one thread
        found = list(pool.map(lambda mutation: tried(*mutation, before.get(mutation[0])), faults))
    caught = {fault: test for (fault, *_), test in zip(faults, found, strict=True)}
    missed = [fault for fault, test in caught.items() if test is None]
    if not wanted:
        facts = {"command": "make test-long", **provenance(), "caught by": caught}
        report.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{len(caught) - len(missed)} passed, {len(missed)} failed")
    sys.exit(bool(missed or not caught))


if __name__ == "__main__":
    main()
