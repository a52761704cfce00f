"use strict";
/*
 * The Transformer of "Attention Is All You Need", without any library: loops over numbers.
 *
 * The book builds this model in PyTorch, for batches of sentences; here it is once more, for one
 * sentence at a time. A vector is a Float32Array, and a sequence is an array of vectors, one for
 * each token. One sentence needs no padding, so there is no padding mask; and the decoder is given
 * one token after the other, so that the future it must not see is not there yet.
 *
 * The names of the weights are those of `annotated`:
 * weights.encoder.layers[0].self_attention.W_Q.weight is the matrix that
 * `model.encoder.layers[0].self_attention.W_Q.weight` is in Python, with a row for each output.
 */

const Transformer = (() => {
  const [PAD, BEGIN, END] = [0, 1, 2];

  // ---- Reading the weights ----------------------------------------------------------------------

  /**
   * The number that 16 bits stand for in half precision: 1 bit of sign, 5 of exponent, 10 of
   * fraction.
   */
  function fromHalf(bits) {
    const sign = bits & 0x8000 ? -1 : 1;
    const exponent = (bits >> 10) & 31;
    const fraction = (bits & 1023) / 1024;
    return exponent ? sign * (1 + fraction) * 2 ** (exponent - 15) : sign * fraction * 2 ** -14;
  }

  /** The bytes of a base64 text, to be read as numbers of several kinds. */
  function bytesOf(base64) {
    const text = atob(base64); // a character for each byte
    const bytes = new DataView(new ArrayBuffer(text.length));
    for (let i = 0; i < text.length; i++) bytes.setUint8(i, text.charCodeAt(i));
    return bytes;
  }

  /**
   * All weights as one tree. tensors: [{name, size, rows}, …] in the order in which their bytes
   * stand in the base64 text, the lower byte of each number first. A tensor without `rows` is
   * written in half precision. A matrix with `rows` is written in 8 bits: a scale for each row, in
   * single precision, and then integers from -127 to 127, each to be multiplied by the scale of its
   * row.
   */
  function unpack(tensors, base64) {
    const bytes = bytesOf(base64);
    const tree = {};
    let place = 0;
    for (const { name, size, rows } of tensors) {
      const values = new Float32Array(size);
      if (rows) {
        const integers = place + 4 * rows;
        for (let i = 0; i < size; i++) {
          const scale = bytes.getFloat32(place + 4 * Math.floor((i * rows) / size), true);
          values[i] = bytes.getInt8(integers + i) * scale;
        }
        place = integers + size;
      } else {
        for (let i = 0; i < size; i++, place += 2) {
          values[i] = fromHalf(bytes.getUint16(place, true));
        }
      }
      const path = name.split(".");
      const last = path.pop();
      const branch = path.reduce((node, key) => (node[key] ??= {}), tree);
      branch[last] = values;
    }
    return tree;
  }

  // ---- The arithmetic of one vector -------------------------------------------------------------

  /**
   * W x + b; W has a row for each number of the result. The projections of attention have no bias.
   *
   * Four rows at a time, since a processor adds four sums side by side, which takes half the time.
   * What lies beyond the last row is not kept.
   */
  function linear(x, { weight, bias }) {
    const columns = x.length;
    const y = new Float32Array(weight.length / columns);
    for (let i = 0; i < y.length; i += 4) {
      let [a, b, c, d] = [0, 0, 0, 0];
      for (let j = 0, place = i * columns; j < columns; j++, place++) {
        const number = x[j];
        a += weight[place] * number;
        b += weight[place + columns] * number;
        c += weight[place + 2 * columns] * number;
        d += weight[place + 3 * columns] * number;
      }
      [y[i], y[i + 1], y[i + 2], y[i + 3]] = [a, b, c, d];
    }
    return bias ? y.map((sum, i) => sum + bias[i]) : y;
  }

  /** Scores as probabilities. The largest is taken off first, so that no exponential overflows. */
  function softmax(scores) {
    const largest = scores.reduce((a, b) => Math.max(a, b));
    const powers = scores.map((score) => Math.exp(score - largest));
    const sum = powers.reduce((a, b) => a + b);
    return powers.map((power) => power / sum);
  }

  /**
   * LayerNorm(x + sublayer): residual connection, then layer normalisation, as printed (section
   * 3.1; page 07).
   */
  function addAndNorm(x, sublayer, { weight, bias }) {
    const sum = x.map((number, i) => number + sublayer[i]);
    const mean = sum.reduce((a, b) => a + b) / sum.length;
    const variance = sum.reduce((a, b) => a + (b - mean) ** 2, 0) / sum.length;
    const deviation = Math.sqrt(variance + 1e-5);
    return sum.map((number, i) => ((number - mean) / deviation) * weight[i] + bias[i]);
  }

  /** max(0, x W_1 + b_1) W_2 + b_2, at each position for itself (section 3.3; page 03). */
  function feedForward(x, { W_1, W_2 }) {
    return linear(linear(x, W_1).map((unit) => Math.max(0, unit)), W_2);
  }

  /**
   * Where a token stands, as sines (even columns) and cosines (odd ones) of ever longer waves
   * (section 3.5; page 05).
   */
  function positionalEncoding(position, d_model) {
    return Float32Array.from({ length: d_model }, (_, i) => {
      const angle = position / 10000 ** ((i - (i % 2)) / d_model);
      return i % 2 ? Math.cos(angle) : Math.sin(angle);
    });
  }

  // ---- Attention --------------------------------------------------------------------------------

  /**
   * softmax(q Kᵀ / √d_k) V for one query, in h heads side by side (sections 3.2.1 and 3.2.2; pages
   * 01 and 02).
   *
   * query: the vector that asks; K, V: a key and a value for each token that may be seen, all of
   * them projected already. Head number i has the i-th share of every vector to itself:
   * concatenating the heads is writing into one vector. Returns the result, projected by W_O, the
   * weights (for each head a number for each key), and what asked: q.
   */
  function attention(query, K, V, { W_Q, W_O }, h) {
    const q = linear(query, W_Q);
    const d_k = q.length / h;
    const heads = new Float32Array(q.length);
    const weights = [];
    for (let head = 0; head < h; head++) {
      const [from, to] = [head * d_k, (head + 1) * d_k];
      const scores = K.map((key) => {
        let product = 0;
        for (let i = from; i < to; i++) product += q[i] * key[i];
        return product / Math.sqrt(d_k);
      });
      const w = softmax(scores);
      V.forEach((value, j) => {
        for (let i = from; i < to; i++) heads[i] += w[j] * value[i];
      });
      weights.push(w);
    }
    return { output: linear(heads, W_O), weights, q };
  }

  // ---- The model --------------------------------------------------------------------------------

  class Transformer {
    /** description: what tools/live.py wrote, with `config` in the paper's symbols. */
    constructor({ config, tensors, base64 }) {
      this.config = config;
      const { embedding, encoder, decoder } = unpack(tensors, base64);
      // (vocab_size, d_model): one matrix for source, target and output (section 3.4)
      this.embedding = embedding.weight;
      this.encoderLayers = Object.values(encoder.layers);
      this.decoderLayers = Object.values(decoder.layers);
    }

    /**
     * The embedding of a token, times √d_model, plus its position (sections 3.4 and 3.5; pages 04
     * and 05).
     */
    embed(id, position) {
      const { d_model } = this.config;
      const row = this.embedding.subarray(id * d_model, (id + 1) * d_model);
      const sinusoids = positionalEncoding(position, d_model);
      return row.map((number, i) => number * Math.sqrt(d_model) + sinusoids[i]);
    }

    /**
     * Source ids, end token included -> {memory, weights, asked}: a vector for each token;
     * weights[layer][query][head][key]; asked[layer] = {Q, K}, the queries and keys of all heads
     * side by side, a vector for each token.
     */
    encode(ids) {
      let x = ids.map((id, position) => this.embed(id, position));
      const [weights, asked] = [[], []];
      for (const { self_attention, feed_forward, residual } of this.encoderLayers) {
        const K = x.map((row) => linear(row, self_attention.W_K));
        const V = x.map((row) => linear(row, self_attention.W_V));
        const seen = x.map((row) => attention(row, K, V, self_attention, this.config.h));
        x = x.map((row, i) => addAndNorm(row, seen[i].output, residual[0].norm));
        x = x.map((row) => addAndNorm(row, feedForward(row, feed_forward), residual[1].norm));
        weights.push(seen.map((one) => one.weights));
        asked.push({ Q: seen.map((one) => one.q), K });
      }
      return { memory: x, weights, asked };
    }

    /**
     * The state of a decoder that has written nothing. What it will ask of the source is projected
     * once, here.
     */
    begin(memory) {
      return this.decoderLayers.map(({ cross_attention }) => ({
        K: [], V: [], // of the tokens written so far, none yet
        memoryK: memory.map((row) => linear(row, cross_attention.W_K)),
        memoryV: memory.map((row) => linear(row, cross_attention.W_V)),
      }));
    }

    /**
     * Feed the newest token -> {state, logits, self, cross, asked}: a score for each word that may
     * follow, and the attention it took, self[layer][head][key] and cross[layer][head][key], with
     * asked.self[layer] and asked.cross[layer] = {q, K}. `state` is a new one: the old may be
     * continued otherwise.
     */
    step(state, token) {
      let x = this.embed(token, state[0].K.length);
      const [next, self, cross, asked] = [[], [], [], { self: [], cross: [] }];
      this.decoderLayers.forEach((layer, i) => {
        const { self_attention, cross_attention, feed_forward, residual } = layer;
        const { memoryK, memoryV } = state[i];
        // the token sees itself and those before it: the causal mask of section 3.2.3, page 06
        const K = [...state[i].K, linear(x, self_attention.W_K)];
        const V = [...state[i].V, linear(x, self_attention.W_V)];
        const own = attention(x, K, V, self_attention, this.config.h);
        x = addAndNorm(x, own.output, residual[0].norm);
        const read = attention(x, memoryK, memoryV, cross_attention, this.config.h);
        x = addAndNorm(x, read.output, residual[1].norm);
        x = addAndNorm(x, feedForward(x, feed_forward), residual[2].norm);
        next.push({ K, V, memoryK, memoryV });
        self.push(own.weights);
        cross.push(read.weights);
        asked.self.push({ q: own.q, K });
        asked.cross.push({ q: read.q, K: memoryK });
      });
      return { state: next, logits: linear(x, { weight: this.embedding }), self, cross, asked };
    }
  }

  // ---- Decoding (section 6.1; page 18) ----------------------------------------------------------

  /**
   * The ids that may follow, best first, at most `count` of them; padding and the begin token never
   * follow. Each id in turn is put in its place among the best so far, which takes less time than
   * sorting ten thousand.
   */
  function bestTokens(scores, count) {
    const best = [];
    scores.forEach((score, id) => {
      if (id === PAD || id === BEGIN) return;
      if (best.length === count && score <= scores[best[count - 1]]) return;
      const place = best.findIndex((other) => scores[other] < score);
      best.splice(place < 0 ? best.length : place, 0, id);
      best.length = Math.min(best.length, count);
    });
    return best;
  }

  /**
   * The most probable next token, again and again, until the end token or 50 tokens more than the
   * source has.
   */
  function greedy(model, source, extra = 50) {
    const output = [];
    let state = model.begin(model.encode(source).memory);
    let token = BEGIN;
    while (token !== END && output.length < source.length + extra) {
      const next = model.step(state, token);
      [token] = bestTokens(next.logits, 1);
      state = next.state;
      output.push(token);
    }
    return output;
  }

  /** What log P is divided by to compare hypotheses of different lengths: ((5 + length) / 6)^α. */
  function lengthPenalty(length, alpha) {
    return ((5 + length) / 6) ** alpha;
  }

  /**
   * A hypothesis and each of its best continuations; one that has ended stays as it is, and keeps
   * its place.
   */
  function continuations(model, hypothesis, { beam, alpha, limit }) {
    if (hypothesis.ended) return [hypothesis];
    const { state, logits } = model.step(hypothesis.state, hypothesis.tokens.at(-1) ?? BEGIN);
    const p = softmax(Float64Array.from(logits));
    // more than `beam` from one hypothesis could not all be kept
    return bestTokens(p, beam).map((token) => {
      const tokens = [...hypothesis.tokens, token];
      const logP = hypothesis.logP + Math.log(p[token]);
      const ended = token === END || tokens.length >= limit;
      const score = logP / lengthPenalty(tokens.length, alpha);
      return { tokens, logP, score, ended, state };
    });
  }

  /**
   * Whether nothing that is still being written can overtake the best: log P only falls, and the
   * penalty has a largest value.
   */
  function settled(hypotheses, { alpha, limit }) {
    const open = hypotheses.filter((hypothesis) => !hypothesis.ended);
    const reachable = open.map(({ logP }) => logP / lengthPenalty(limit, alpha));
    const [best] = hypotheses;
    return best.ended && best.score > Math.max(...reachable); // the largest of none is -Infinity
  }

  /**
   * Beam search: {output, score, steps}, with steps[t] the hypotheses kept after step t + 1, best
   * first.
   */
  function beamSearch(model, source, beam = 4, alpha = 0.6, extra = 50) {
    const options = { beam, alpha, limit: source.length + extra };
    const { memory } = model.encode(source);
    const state = model.begin(memory);
    let hypotheses = [{ tokens: [], logP: 0, score: 0, ended: false, state }];
    const steps = [];
    do {
      const candidates = hypotheses.flatMap((one) => continuations(model, one, options));
      hypotheses = candidates.sort((a, b) => b.score - a.score).slice(0, beam);
      steps.push(hypotheses);
    } while (!settled(hypotheses, options));
    return { output: hypotheses[0].tokens, score: hypotheses[0].score, steps };
  }

  /**
   * What the model computes while it writes `output`: {encoder, asked, positions}, with the
   * encoder's weights, queries and keys, and for each token of the output {token, probabilities,
   * self, cross, asked}: of all words that might have stood there, and the attention paid.
   */
  function follow(model, source, output) {
    const { memory, weights, asked } = model.encode(source);
    let state = model.begin(memory);
    const positions = output.map((token, i) => {
      const next = model.step(state, i ? output[i - 1] : BEGIN);
      state = next.state;
      const { logits, self, cross, asked: now } = next;
      return { token, probabilities: softmax(logits), self, cross, asked: now };
    });
    return { encoder: weights, asked, positions };
  }

  return { Transformer, greedy, beamSearch, follow, bestTokens };
})();
