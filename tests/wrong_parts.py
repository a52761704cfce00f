"""Wrong solutions that people write: the library's code with one change, and what is said of it.

{definition: [(what stands in the library, what stands there instead, words of the sentence), …]}
"""

import inspect
import textwrap
from importlib import import_module

from annotated.checks import CHECKS, PAGES

HOMES = {name: module for module in PAGES.values() for name in CHECKS
         if getattr(vars(import_module(f"annotated.{module}")).get(name), "__module__", "")
         == f"annotated.{module}"}
SCALE, PLAIN = "math.sqrt(key.size(-1))", "scores.masked_fill(~mask, finfo(scores.dtype).min)"
ZEROED, ALONE = "return weights.masked_fill(~mask, 0.0)", "not what the plain loop gives alone"
SPLIT, JOIN = "x.unflatten(-1, (self.h, -1)).transpose(1, 2)", "heads.transpose(1, 2).flatten(-2)"
STACKED = "torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)"
POST, PLACES = "self.norm(x + self.dropout(sublayer(x)))", "torch.arange(start, start + length)"
CROSS = "self.cross_attention(x, memory, memory, memory_mask)"
ATTEND, SELF = "self.attention(Q, K, V, mask)[0]", "self.self_attention(x, x, x, mask)"
FIRST, SECOND = f"self.residual[0](x, lambda x: {SELF})", "self.residual[1](x, self.feed_forward)"
RATE, RATES = "min(step**-0.5, step * warmup**-1.5)", "[rate for _ in self.optimizer.param_groups]"
MODE, LEFT = "with evaluating(model):", "model.eval()\n    with torch.no_grad():"
AXIS, FUTURE = "do not sum to 1: along which axis", "a later token changes an earlier output"
WHOLE, TAIL = f"{PLAIN}.softmax(dim=-1)\n    {ZEROED}", ".softmax(dim=-1)\n    return weights"
MASKED, SQUEEZED = "masked_softmax(scores, mask)", "masked_softmax(scores.squeeze(-1), mask)"
DROP, BLOCK = f"nn.functional.dropout({MASKED}, dropout)", "layer(x, memory, mask, memory_mask)"
NORM = 'nn.LayerNorm(d_model) if options.get("norm_first") else nn.Identity()'
PAST = "causal_mask(target.size(1), target.device) & padding_mask"
UPDATE = "norm = update_weights(model, optimizer, config.clip)"
ANGLES = f"{PLACES}[:, None] * frequencies(d_model)"

MODEL = {
    "masked_softmax": [
        ("softmax(dim=-1)", "softmax(dim=-2)", AXIS), ("softmax(dim=-1)", "softmax(dim=1)", AXIS),
        ("softmax(dim=-1)", "softmax(dim=0)", AXIS), ("~mask", "mask", "mask is inverted"),
        (PLAIN + ".softmax(dim=-1)", "scores.softmax(dim=-1)", "removed after the softmax"),
        ("finfo(scores.dtype).min", "0.0", "a score of 0 is not hidden"),
        ("finfo(scores.dtype).min", "1e-9", "a score of 0 is not hidden"),
        (WHOLE, f"(scores + mask){TAIL}", "0 and 1 hides nothing"),
        (WHOLE, f"(scores * mask){TAIL}", "a score of 0 is not"),
        (WHOLE, f"scores{TAIL}", "mask changes nothing"),
        (WHOLE, f"scores.masked_fill(~mask, -math.inf){TAIL}", "becomes NaN"),
        (ZEROED, "return weights", "shares its weight among hidden keys"),
        ("finfo(scores.dtype).min", "-1e9", "half precision")],
    "scaled_dot_product_attention": [
        (f"(query / {SCALE})", "query", "right for d_k = 1 only: is the scale missing?"),
        (SCALE, "key.size(-1)", "not by its square root"),
        ("query / math", "query * math", "multiply by √d_k: divide"),
        (SCALE, "math.sqrt(key.size(-2))", "root of another size"),
        (SCALE, "math.sqrt(value.size(-1))", "root of another size"),
        (SCALE, "math.sqrt(key.size(1) * key.size(-1))", "√d_model"),
        ("weights @ value, weights", "weights, weights @ value", "return (output, weights)"),
        ("return weights @ value, weights", "return weights @ value", "return two tensors"),
        ("key.transpose(-2, -1)", "key.transpose(2, 3)", "wrong with two"),
        ("key.transpose(-2, -1)", "key.transpose(1, 2)", "fails with four axes"),
        ("key.transpose(-2, -1)", "key.T", "fails with four axes"),
        (MASKED, "scores.softmax(dim=-2)", AXIS), (MASKED, "scores.softmax(dim=1)", AXIS),
        (MASKED, "masked_softmax(scores)", "mask changes nothing"),
        (MASKED, "masked_softmax(scores, mask if mask is None else ~mask)", "mask is inverted"),
        (MASKED, "(scores if mask is None else scores + mask).softmax(-1)", "added to the scores"),
        (DROP, MASKED, "dropout does nothing"),
        (f"{DROP}\n    return weights @ value", f"{MASKED}\n    return nn.functional.dropout("
         "weights @ value, dropout)", "drop from the weights"),
        (DROP, f"{MASKED} * (torch.rand_like(scores) >= dropout)", "must grow by")],
    "DotProductAttention": [
        ("self.dropout if self.training else 0.0", "self.dropout", "two calls in eval() differ"),
        ("self.dropout if self.training else 0.0", "0.0", "no weight is dropped"),
        ("key, value, mask, dropout)", "key, value, None, dropout)", "mask changes nothing")],
    "AdditiveAttention": [
        (".tanh()", "", "tanh is missing"),
        (SQUEEZED, "scores.squeeze(-1).softmax(-1)", "hidden keys have weights"),
        (SQUEEZED, "scores.squeeze(-1).softmax(-2)", "along which axis"),
        ("(d_key, d_hidden)", "(d_key, d_hidden, bias=False)", "no parameter `W_k.bias`"),
        ("d_query, d_hidden, bias=False", "d_query, d_hidden", "`W_q.bias` is not in the equation"),
    ],
    "MultiHeadAttention": [
        (SPLIT, "x.reshape(len(x), self.h, x.size(1), -1)", "a view gives the right shape"),
        (JOIN, "heads.reshape(len(heads), heads.size(2), -1)", "a view gives the right shape"),
        (SPLIT, "x.unflatten(-1, (-1, self.h)).permute(0, 3, 1, 2)", "cut the wrong way round"),
        (ATTEND, "self.attention(Q * K.size(-1)**0.5, K, V, mask)[0]", "scale √d_k is missing"),
        (ATTEND, "self.attention(Q / self.h**0.5, K, V, mask)[0]", "you divide by √d_model"),
        ("self.W_V(value)", "self.W_V(key)", "key and value are swapped"),
        ("values(key, value)", "values(value, key)", "key and value are swapped"),
        ("values(key, value)", "values(query, query)", "made of the query"),
        (ATTEND, "self.attention(Q, K, V)[0]", "mask changes nothing"),
        (ATTEND, "self.attention(Q, K, V, mask if mask is None else ~mask)[0]", "mask is inverted"),
        ("h * d_k, bias=False", "h * d_k", "is not in the equation"),
        ("(d_model, h * d_v", "(d_model, h * d_k", "W_V.weight should have the shape"),
        (f"self.W_O({JOIN})", JOIN, "should be a tensor of shape (2, 4, 12)"),
        ("d_model % h", "False", "does not divide it"),
        ("mask.dim() == 3", "False", "mask of three axes")],
    "PositionwiseFeedForward": [
        (".relu()", "", "ReLU is missing"), (".relu()", ".sigmoid()", "activation is not ReLU"),
        ("self.W_1(x).relu()", "nn.functional.gelu(self.W_1(x))", "activation is not ReLU"),
        ("self.W_2(self.dropout(hidden))", "self.W_2(self.dropout(hidden)).relu()", "behind W_2"),
        ("self.W_2(self.dropout(hidden))", "x + self.W_2(self.dropout(hidden))", "x is added"),
        ("W_2(self.dropout(hidden))", "dropout(self.W_2(hidden))", "dropout acts on the output"),
        ("self.W_2(self.dropout(hidden))", "self.W_2(hidden)", "drops nothing"),
        ("(d_ff, d_model)", "(d_ff, d_model, bias=False)", "no parameter `W_2.bias`")],
    "TokenEmbedding": [
        (" * math.sqrt(self.weight.size(1))", "", "factor √d_model is missing"),
        ("* math.sqrt(self", "/ math.sqrt(self", "you divide by √d_model"),
        ("math.sqrt(self.weight.size(1))", "self.weight.size(1)", "not by its square root"),
        ("weight.T", "weight.T * math.sqrt(self.weight.size(1))", "logits are scaled too"),
        ("x @ self.weight.T", "(x @ self.weight.T).softmax(-1)", "softmax belongs to the loss"),
        (" * d_model**-0.5", "", "begin with deviation 1/8"),
        ("self.weight = nn.Parameter(", "self.output = nn.Parameter(torch.ones(vocab_size, d_model"
         "))\n        self.weight = nn.Parameter(", "`output` is not in the equation")],
    "sinusoidal_encoding": [
        (STACKED, "torch.cat([angles.sin(), angles.cos()], dim=1)", "all sines come first"),
        ("angles.sin(), angles.cos()", "angles.cos(), angles.sin()", "sine and cosine are swapped"),
        (ANGLES, f"{PLACES}[:, None] * 1000.0 ** -(torch.arange(0, d_model, 2) / d_model)",
         "base is not 10000"), (PLACES, "torch.arange(length)", "start is ignored"),
        (PLACES, "torch.arange(start + 1, start + length + 1)", "positions begin at 1"),
        ("[:, :d_model]", "", "an odd d_model fails"),
        ("* frequencies(d_model)", "* frequencies(d_model).float()", "loses digits"),
        (f"{ANGLES}  # (length, pairs)", f"{PLACES}[:, None] / 10_000 ** (torch.arange(d_model) / "
         "d_model)\n    return torch.where(torch.arange(d_model) % 2 == 0, angles.sin(), "
         "angles.cos())", "each column has a speed of its own")],
    "shift_matrix": [
        ("[cos, sin, -sin, cos]", "[cos, -sin, sin, cos]", "turns backwards"),
        ("(k * frequencies(d_model))", "(0 * frequencies(d_model))", "use k"),
        ("if d_model % 2", "if False", "an odd d_model is taken")],
    "PositionalEncoding": [
        ("x + sinusoidal_encoding(x.size(1), self.d_model, start).to(x)", "x", "nothing is added"),
        ("x + sinusoidal", "x * sinusoidal", "encoding is multiplied"),
        ("(1), self.d_model, start)", "(0), self.d_model, start)[:, None]", "positions are axis 1"),
        ("self.d_model, start)", "self.d_model)", "start is ignored"),
        ("self.dropout(x + ", "x + self.dropout(", "dropout must act on the sum"),
        ("self.d_model, self.dropout = d_model", "self.register_buffer('table', torch.ones(9, "
         "d_model))\n        self.d_model, self.dropout = d_model", "saves its table"),
        ("x + sinusoidal", "x * self.d_model**0.5 + sinusoidal", "x is scaled here as well")],
    "LearnedPositionalEmbedding": [
        ("if end > most", "if False", "past a table of 9 rows"),
        ("self.table[start:end]", "self.table[:x.size(1)]", "start is ignored"),
        ("* 0.5**0.5", "* 0.02", "begin with deviation √½")],
    "padding_mask": [
        ("ids != pad_id", "ids == pad_id", "mask is inverted"),
        ("[:, None, None, :]", "", "axes of heads and queries are missing"),
        ("[:, None, None, :]", "[:, None, :, None]", "it hides queries, not keys"),
        ("(ids != pad_id)", "(ids != 0)", "pad_id is ignored"),
        ("[:, None, None, :]", "[:, None, None, :].float()", "give bools")],
    "causal_mask": [
        (".tril()", ".triu()", "it is turned round"), (".tril()", ".triu(1)", "mask is inverted"),
        (".tril()", ".tril(-1)", "the diagonal is hidden"),
        (".tril()", ".tril(1)", "one position of the future"),
        (".tril()", "", "a later token changes an earlier output"),
        (".tril()", ".tril().float()", "give bools")],
    "ResidualConnection": [
        (POST, "x + self.dropout(sublayer(self.norm(x)))", "norm comes before the sub-layer"),
        (POST, "x + self.norm(self.dropout(sublayer(x)))", "normalise the sum"),
        (POST, "self.norm(self.dropout(sublayer(x)))", "residual is missing"),
        (POST, "x + self.dropout(sublayer(x))", "norm is missing"),
        (POST, "self.norm(x + sublayer(x))", "dropout is missing"),
        (POST, "self.norm(self.dropout(x + sublayer(x)))", "dropout acts on the sum"),
        (f"return {POST}", "x = x + self.dropout(sublayer(x))\n"
         "        x = (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)\n"
         "        return x * self.norm.weight + self.norm.bias", "divided by d − 1"),
        ("if self.norm_first", "if False", "norm_first=True must give")],
    "EncoderLayer": [
        (SELF, "self.self_attention(x, x, x)", "mask changes nothing"),
        ("dropout, norm_first) for", "dropout) for", "norm_first is ignored"),
        ("(ResidualConnection(d_model, dropout, norm_first) for _ in range(2))",
         "[ResidualConnection(d_model, dropout, norm_first)] * 2", "one object"),
        ("dropout, norm_first) for", "0.0, norm_first) for", "drops nothing"),
        (f"{FIRST}\n        return {SECOND}", f"{SECOND}\n        return {FIRST}", "at the order")],
    "DecoderLayer": [
        (SELF, "self.self_attention(x, x, x)", FUTURE),
        (CROSS, "self.cross_attention(x, memory, memory)", "padding of the source"),
        (CROSS, "self.cross_attention(x, memory, memory, mask)", "one mask is used for both"),
        ("mask: _Past = None, memory_mask: _Across", "memory_mask=None, mask", "masks are swapped"),
        (CROSS, "self.cross_attention(memory, x, x, memory_mask)", "queries come from the memory"),
        (CROSS, "self.cross_attention(x, x, x, memory_mask)", "memory changes nothing"),
        ("dropout, norm_first) for", "dropout) for", "norm_first is ignored")],
    "Encoder": [
        ("nn.ModuleList(EncoderLayer(d_model, h, d_ff, **options) for _ in range(N))",
         "nn.ModuleList([EncoderLayer(d_model, h, d_ff, **options)] * N)", "one object"),
        ("x = layer(x, mask)", "x = layer(x)", "mask changes nothing"),
        ("x = layer(x, mask)", "y = layer(x, mask)", "what the one before it returned"),
        (NORM, "nn.Identity()", "no parameter `norm.weight`"),
        (NORM, "nn.LayerNorm(d_model)", "is not")],
    "Decoder": [
        (BLOCK, "layer(x, memory, None, memory_mask)", FUTURE),
        (BLOCK, "layer(x, memory, mask)", "padding of the source"),
        (BLOCK, "layer(x, memory, memory_mask, mask)", "masks are swapped"),
        (BLOCK, "layer(x, x, mask, memory_mask)", "memory changes nothing")],
    "Transformer": [
        (PAST, "padding_mask", f"{FUTURE}: look at the mask"),
        (f"{PAST}(target, self.config.pad_id)", "None", FUTURE),
        ("embedding(source)), mask)", "embedding(source)))", "padding of the source changes"),
        ("memory, mask, memory_mask)", "memory, mask)", "padding of the source changes"),
        ("source_positions(self.embedding(source)", "embedding(source", "where are the positions?"),
        ("target_positions(self.embedding(target)", "embedding(target", "where are the positions?"),
        ("(source, target))", "(source, target)).log_softmax(-1)", "softmax belongs to the loss"),
        ("self.apply(_initialise)", "self.output = nn.Linear(config.d_model, config.vocab_size)\n"
         "        self.apply(_initialise)", "is not in the equation"),
        ("self.apply(_initialise)", "pass", "not initialised"),
        ('_check_ids("source", source)', "pass", "ids without a batch axis"),
        ("return self.decode(", "return self(source, target)\n\n    def logits(self, source, "
         "target):\n        return self.decode(", "it raises RecursionError")],
}  # fmt: skip

LEARNING = {
    "noam_rate": [
        (RATE, RATE.replace("min", "max"), "it is min"),
        ("return factor * d_model", "return d_model", "factor is ignored"),
        ("d_model**-0.5 * min", "min", "d_model**-0.5 is missing"),
        ("d_model**-0.5 * min", "d_model**0.5 * min", "the exponent is −0.5"),
        ("warmup**-1.5)\n", "warmup**-0.5)\n", "exponent of warmup is −1.5"),
        (f"* {RATE}\n", "* step * warmup**-1.5\n", "it only rises"),
        (f"* {RATE}\n", "* step**-0.5\n", "no warm-up"),
        ("min(step, d_model, warmup) >= 1", "min(d_model, warmup) >= 1", "rate of step 0"),
        ("    if not min(", "    step = max(step, 1)\n    if not min(", "rate of step 0")],
    "NoamSchedule": [
        ("self.last_epoch + 1", "self.last_epoch", "it raises ValueError: step=0"),
        ("noam_rate(self.last_epoch + 1", "(noam_rate if self.last_epoch else lambda *_: 0.0)("
         "self.last_epoch", "count from 1"),
        ("self.last_epoch + 1", "max(self.last_epoch, 1)", "count from 1"),
        ("self.last_epoch + 1", "self.last_epoch + 2", "one update ahead"),
        (RATES, "[rate * base for base in self.base_lrs]", "multiplied by the optimiser's own"),
        (RATES, "[rate, *self.base_lrs[1:]]", "only the first group"),
        ("self.warmup, self.factor)\n", "self.warmup)\n", "factor is ignored")],
    "LabelSmoothingLoss": [
        ("loss.masked_fill(padding, 0.0).sum()", "loss.sum()", "padding is counted"),
        ("total / (~padding).sum()", "total / padding.numel()", "padding is counted"),
        ("self.pad_id\n", "-1\n", "padding is counted"),
        ("log_p.mean(dim=-1)", "(log_p.sum(dim=-1) - right) / (log_p.size(-1) - 1)",
         "here it is spread over all"), ("if self.smoothing:", "if False:", "nothing is smoothed"),
        ("logits.log_softmax(", "logits.softmax(dim=-1).log_softmax(", "softmax is taken twice"),
        (' if self.reduction == "sum" else total / (~padding).sum()', "", "it is the sum"),
        ("total = loss.", "total = -loss.", "sign is wrong"),
        ("(1 - self.smoothing) * loss - self.smoothing * log_p",
         "self.smoothing * loss - (1 - self.smoothing) * log_p", "are swapped"),
        ('total if self.reduction == "sum" else total', "total", "must not divide"),
        ("target == self.pad_id", "target == 0", "pad_id is ignored"),
        ("not 0 <= smoothing < 1", "False", "smoothing=1.0 is taken"),
        ("self(hidden @ weight.T", "self((hidden @ weight.T).softmax(-1)", "of_hidden")],
    "forward_backward": [
        ("batch.target_out) / tokens", "batch.target_out)", "not divided by the tokens"),
        ("batch.target_out) / tokens", "batch.target_out) / batch.tokens", "its own tokens"),
        ("(loss * w", "model.zero_grad()\n            (loss * w", "only one of the micro-batches"),
        ("(loss * world).backward()", "pass", "no gradient"),
        ("source, batch.target_in)", "source, batch.target_out)", "fed target_in"),
        ("total += loss.detach()", "total = loss.detach()", "summed over the micro-batches"),
        ("total += loss.detach()", "total += loss", "detach it")],
    "validation_loss": [
        (MODE, "with torch.no_grad():", "dropout is on"),
        ("nll = loss(0.0", "nll = loss(0.1", "it is smoothed"),
        ("return total / tokens", "return total", "it is a sum"),
        ("batch.target_out))\n", "batch.target_out) / batch.tokens)\n    return sum(losses) / "
         "len(losses)\n", "mean of the batches' means"), (MODE, LEFT, "left in eval()")],
    "train": [
        ("            optimizer.zero_grad()\n", "", "gradients add up"),
        ("            schedule.step()\n", "", "the rate never changes"),
        (f"{UPDATE}\n            schedule.step()", f"schedule.step()\n            {UPDATE}",
         "step the schedule once per update"),
        (UPDATE, "norm = torch.ones(())", "weights do not move"),
        ("loss(config.label_smoothing", "loss(0.0", "label_smoothing is ignored"),
        ("run = start_run(", "config = type(config)(**vars(config) | {'steps': config.steps + 1})\n"
         "    run = start_run(", "another number of updates"),
        ("return run.log", "return None", "return the log"),
        ("    model.eval()\n    return run.log", "    return run.log", "left in train()")],
    "generate": [
        ("i not in (PAD, END)", "i != PAD", "the end token is part of the result"),
        ("return [[i for", "return [[BEGIN] + [i for", "begin is part of the result"),
        ("(token[:, 0] != END) & ", "", "goes on after the end token"),
        ("1 < limits[rows])", "1 < int(limits.max()))", "share the limit of the longest"),
        ("_limits(model, source, extra)", "_limits(model, source, 0)", "stops too early"),
        (MODE, "with torch.no_grad():", "dropout is on"), (MODE, LEFT, "left in eval()"),
        ("next_token(rule_out(logits))", "rule_out(logits).argmax(dim=1, keepdim=True)",
         "next_token must be asked"),
        ("rule_out(logits))", "logits.index_fill(1, torch.tensor([PAD, BEGIN]), 99.0))", ALONE)],
    "greedy_decode": [
        ("logits.max(dim=1", "logits.min(dim=1", ALONE),
        ("extra, steps)", "0, steps)", "stops too early")],
    "beam_search": [
        ("log_p[..., 0].masked_fill_(beams.finished, 0.0)", "", "forgets what has ended"),
        ("length_penalty(lengths, alpha).repeat_interleave(k, 1)", "torch.ones_like(total)",
         "no length penalty"),
        ("beams.lengths + ~beams.finished", "beams.lengths", "length_penalty(length)"),
        ("[i for i in row if i != END], v", "row, v", "the end token is part of the result"),
        ("score[i], n_best)", "score[i], n_best)[::-1]", "the worst comes first"),
        ("score[i], n_best)", "score[i], 1)", "n_best pairs"),
        ("i != END], value)", "i != END], 2 * value)", "the score is not"),
        (MODE, LEFT, "left in eval()")],
}  # fmt: skip


def library_part(name):
    """The library's own definition."""
    return getattr(import_module(f"annotated.{HOMES[name]}"), name)


def changed(name, old, new):
    """The library's definition with a change: in it, wherever it fits, or at one other place."""
    module = import_module(f"annotated.{HOMES[name]}")
    source, own = inspect.getsource(module), inspect.getsource(library_part(name))
    if old in own:
        source = source.replace(own, own.replace(old, new))
    else:
        assert source.count(old) == 1, f"{source.count(old)} places with {old!r}"
        source = source.replace(old, new)
    space = {"__name__": module.__name__}
    exec(textwrap.dedent(source), space)
    return space[name]


def rows(table):
    """A table of mistakes as rows."""
    return [(name, *row) for name, mistakes in table.items() for row in mistakes]
