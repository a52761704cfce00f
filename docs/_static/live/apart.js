"use strict";
/*
 * Attention taken apart: all heads of a block as lines between tokens, one weight as the products
 * it is made of, and a search for what a head reads in other sentences. live.js calls `draw`
 * whenever what is shown has changed.
 */

const Apart = (() => {
  const { element, option, drawing, token, number } = Draw;
  const find = (id) => document.getElementById(`live-${id}`);
  const SEARCHED = 48; // sentences that a search looks at, at most
  const FOUND = 8; // of them are listed

  let view = null; // what is shown: see `draw`
  let chosen = { query: 0, key: 0 }; // the weight that is taken apart, as the visitor chose it
  let pair = chosen; // the same, where it is there
  let near = null; // the token whose lines are stressed: {side, index}
  let search = 0; // number of the search that runs; an older one stops
  let searching = false; // whether one runs
  let listed = ""; // of which head the results of a search are listed

  // ---- From the model to numbers ----------------------------------------------------------------

  /** The query vector and the key vector of one weight, of one head: {q, k}. */
  function vectors({ shown, kind, layer, head, h }, { query, key }) {
    const step = shown.positions[query];
    const { Q, K } = shown.asked[layer]; // of the encoder
    const asked = { cross: step?.asked.cross[layer], decoder: step?.asked.self[layer] }[kind];
    const q = asked ? asked.q : Q[query];
    const k = (asked ? asked.K : K)[key];
    const d_k = q.length / h;
    const own = (vector) => Array.from(vector.slice(head * d_k, (head + 1) * d_k));
    return { q: own(q), k: own(k) };
  }

  // ---- All heads as lines -----------------------------------------------------------------------

  function shownHeads() {
    return [...find("toggles").querySelectorAll("input")].map((box) => box.checked);
  }

  /** The weights that are drawn as lines: {head, i, j, weight} for query i and key j. */
  function seenWeights() {
    const heads = shownHeads();
    const all = view.matrices.flatMap((rows, head) => rows.flatMap((row, i) => (
      Array.from(row, (weight, j) => ({ head, i, j, weight })))));
    return all.filter(({ head, weight }) => heads[head] && weight >= 0.02);
  }

  /** How dark the line of a weight is: all are faint but those of the token that is stressed. */
  function opacity(i, j, weight) {
    const stressed = !near || near.index === (near.side === "query" ? i : j);
    return (stressed ? weight : 0.06 * weight).toFixed(3);
  }

  function fillToggles(h) {
    if (find("toggles").childElementCount === h) return;
    find("toggles").replaceChildren(...Array.from({ length: h }, (_, head) => {
      const box = element("input", { type: "checkbox", checked: true });
      box.addEventListener("change", drawLines);
      return element("label", { className: `live-head-${head}` }, box, ` head ${head + 1}`);
    }));
  }

  /**
   * Tokens that are read on the left, tokens that ask on the right, and a line of each head for
   * each weight that can be seen.
   */
  function drawLines() {
    const { h, queries, keys, name } = view;
    const [line, letter] = [22, 7.6]; // pixels
    const longest = (labels) => Math.max(...labels.map((label) => label.length)) * letter;
    const [left, gap] = [longest(keys) + 10, 220];
    const y = (i) => 16 + i * line;
    const beside = (head) => (head - (h - 1) / 2) * 3; // heads that agree are seen side by side
    const lines = seenWeights().map(({ head, i, j, weight }) => {
      const title = `head ${head + 1}: ${queries[i]} reads ${keys[j]}: ${number(weight)}`;
      return drawing("line", {
        x1: left + gap, y1: y(i) + beside(head), x2: left, y2: y(j) + beside(head),
        class: `live-line-of live-head-${head}`, "stroke-opacity": opacity(i, j, weight),
      }, drawing("title", {}, title));
    });
    const labels = (texts, side, x, anchor) => texts.map((text, index) => {
      const node = drawing("text", {
        x, y: y(index), "text-anchor": anchor, "dominant-baseline": "central", tabindex: 0,
        "data-side": side, "data-index": index,
      }, text);
      const on = (event, wanted) => node.addEventListener(event, () => stress(wanted));
      for (const event of ["mouseenter", "focus"]) on(event, { side, index });
      for (const event of ["mouseleave", "blur"]) on(event, null);
      return node;
    });
    const width = left + gap + longest(queries) + 12;
    const svg = drawing("svg", {
      viewBox: `0 0 ${width} ${y(Math.max(keys.length, queries.length))}`, role: "group",
      "aria-label": `All heads of ${name} as lines from the queries, on the right, `
        + "to the keys, on the left.",
    }, ...lines, ...labels(keys, "key", left - 6, "end"),
    ...labels(queries, "query", left + gap + 6, "start"));
    svg.style.width = `${width}px`;
    const active = document.activeElement;
    const held = find("lines").contains(active) ? { ...active.dataset } : null;
    find("lines").replaceChildren(svg);
    if (held) svg.querySelector(`[data-side=${held.side}][data-index="${held.index}"]`)?.focus();
  }

  /** Stress the lines of one token; the labels stay as they are, so that none loses the focus. */
  function stress(wanted) {
    near = wanted;
    const lines = find("lines").querySelectorAll("line");
    seenWeights().forEach(({ i, j, weight }, place) => {
      lines[place].setAttribute("stroke-opacity", opacity(i, j, weight));
    });
  }

  /**
   * Show what a phrase of the text beside the lines speaks of: its block, its heads, and the lines
   * of its token.
   */
  function look(phrase) {
    const { kind, layer, heads, token: asking } = phrase.dataset;
    [find("kind").value, find("layer").value] = [kind, layer];
    find("toggles").querySelectorAll("input").forEach((box, head) => {
      box.checked = heads.includes(head + 1);
    });
    find("kind").dispatchEvent(new Event("change")); // live.js draws, and calls `draw` below
    const index = view.queries.indexOf(asking); // -1: it is not written yet
    stress(index < 0 ? null : { side: "query", index });
    for (const button of find("guide").querySelectorAll("button")) {
      button.setAttribute("aria-pressed", button === phrase);
    }
  }

  function isGuided() {
    return view.shown.text.trim() === find("guide").dataset.sentence;
  }

  // ---- One weight, taken apart ------------------------------------------------------------------

  function fillPair() {
    const { queries, keys, kind } = view;
    pair = { query: Math.min(chosen.query, queries.length - 1) };
    const readable = kind === "decoder" ? keys.slice(0, pair.query + 1) : keys;
    pair.key = Math.min(chosen.key, readable.length - 1);
    for (const [id, texts] of [["query", queries], ["key", readable]]) {
      find(id).replaceChildren(
        ...texts.map((text, i) => option(i, `${i + 1}: ${text}`, i === pair[id])));
    }
  }

  /**
   * Strips of the query and the key, bars of their products, dimension by dimension, and what
   * becomes of their sum.
   */
  function drawPair() {
    const { queries, keys, head, matrices } = view;
    const { q, k } = vectors(view, pair);
    const products = q.map((value, i) => value * k[i]);
    const sum = products.reduce((a, b) => a + b, 0);
    const weight = matrices[head][pair.query][pair.key];
    const largest = (values) => Math.max(...values.map(Math.abs), 1e-9);
    const sign = (value) => (value < 0 ? "live-minus" : "live-plus");
    const [cell, height, left] = [16, 46, 46];
    const strip = (values, y) => values.map((value, i) => drawing("rect", {
      x: left + i * cell, y, width: cell - 1, height: cell, class: sign(value),
      "fill-opacity": (Math.abs(value) / largest(values)).toFixed(3),
    }, drawing("title", {}, `dimension ${i + 1}: ${number(value, 2)}`)));
    const middle = 2 * cell + 14 + height;
    const bars = products.map((value, i) => {
      const size = (Math.abs(value) / largest(products)) * height;
      return drawing("rect", {
        x: left + i * cell, y: value < 0 ? middle : middle - size, width: cell - 1, height: size,
        class: sign(value),
      }, drawing("title", {}, `dimension ${i + 1}: `
        + `${number(q[i], 2)} × ${number(k[i], 2)} = ${number(value, 2)}`));
    });
    const label = (text, y) => drawing("text", {
      x: left - 8, y, "text-anchor": "end", "dominant-baseline": "central",
    }, text);
    const width = left + q.length * cell + 4;
    const svg = drawing("svg", {
      viewBox: `0 0 ${width} ${middle + height + 4}`, role: "img",
      "aria-label": `The ${q.length} numbers of the query and of the key, and their products; `
        + `the sum of the products is ${number(sum, 2)}.`,
    }, label("q", cell / 2), label("k", 1.5 * cell + 4), label("q × k", middle),
    ...strip(q, 0), ...strip(k, cell + 4),
    drawing("line", { x1: left, x2: width, y1: middle, y2: middle, class: "live-axis" }), ...bars);
    svg.style.width = `${width}px`;
    svg.style.minWidth = `${0.8 * width}px`; // its box scrolls
    find("products").replaceChildren(svg);
    const most = products.indexOf(Math.max(...products)) + 1;
    const strong = (value, digits) => element("strong", {}, number(value, digits));
    const said = element("p", {},
      "The products add up to ", strong(sum, 2), `; dimension ${most} contributes most. `,
      `Divided by √${q.length} that is the score `, strong(sum / Math.sqrt(q.length), 2),
      ". The softmax over all scores of ", token(queries[pair.query]),
      " makes it the weight ", strong(weight, 3), " of ", token(keys[pair.key]), ".");
    // a screen reader reads what is replaced
    const place = find("sum");
    if (said.textContent !== place.textContent) place.replaceChildren(...said.childNodes);
  }

  // ---- Other sentences with the same query ------------------------------------------------------

  /**
   * Look, a sentence at a time, for those that hold the chosen query too, and list what the head
   * reads most there. Where the German of a sentence is known, those without the query are passed
   * over at once.
   */
  async function searchAlike() {
    const mine = ++search;
    searching = true;
    const { kind, layer, head, queries, pairs, quietly, matricesOf, open } = view;
    const query = queries[pair.query];
    const holds = (text) => query === "</s>" || text.split(/[\s.,?]+/).includes(query)
      || (/^[.,?]$/.test(query) && text.includes(query));
    const promising = pairs.filter(([english, german]) => (
      !german || holds(kind === "encoder" ? english : german)));
    const candidates = promising.slice(0, SEARCHED);
    const [found, status] = [[], find("search-status")];
    find("alike").replaceChildren();
    status.textContent = `Looking at ${candidates.length} sentences …`;
    for (const [english] of candidates) {
      await new Promise((next) => setTimeout(next));
      if (mine !== search) return;
      const { matrices, queries: asking, keys } = matricesOf(quietly(english), kind, layer);
      const row = asking.indexOf(query);
      if (row < 0) continue; // the model wrote something else
      const weights = Array.from(matrices[head][row]);
      const most = weights.indexOf(Math.max(...weights));
      found.push({ english, key: keys[most], weight: weights[most] });
    }
    searching = false;
    status.replaceChildren(...(found.length
      ? [token(query), ` stands in ${found.length} of ${candidates.length} other sentences that `
        + "were looked at. What this head attends to most in the first "
        + `${Math.min(FOUND, found.length)}:`]
      : ["No other sentence that was looked at has ", token(query), " here."]));
    find("alike").replaceChildren(...found.slice(0, FOUND).map(({ english, key, weight }) => {
      const button = element("button", { type: "button" }, english);
      button.addEventListener("click", () => open(english));
      const most = element("strong", {}, token(key));
      return element("li", {}, button, " ", most, ` ${number(weight, 2)}`);
    }));
  }

  // ---- Together ---------------------------------------------------------------------------------

  let listening = false;

  function listen() {
    if (listening) return;
    listening = true;
    for (const id of ["query", "key"]) {
      find(id).addEventListener("change", () => {
        chosen = { query: Number(find("query").value), key: Number(find("key").value) };
        draw(view);
      });
    }
    find("search").addEventListener("click", searchAlike);
    for (const phrase of find("guide").querySelectorAll("button")) {
      // another sentence is left alone until a click
      phrase.addEventListener("mouseenter", () => isGuided() && look(phrase));
      phrase.addEventListener("click", () => {
        view.open(find("guide").dataset.sentence);
        look(phrase);
      });
    }
  }

  /**
   * Draw all of it. wanted: {shown, kind, layer, head, model, h, name, matrices, queries, keys,
   * pairs}: matrices[head] are rows of weights; matricesOf(shown, kind, layer), quietly(text) and
   * open(text) belong to live.js. A head below 0 stands for the mean of all; the one with the
   * largest weight of the chosen pair is taken apart then.
   */
  function draw(wanted) {
    if (!find("products")) return; // the front page shows less
    view = { ...wanted, mean: wanted.mean ?? wanted.head < 0 };
    search += 1;
    near = null; // what was stressed may be gone
    for (const phrase of find("guide").querySelectorAll("button")) {
      phrase.setAttribute("aria-pressed", false);
    }
    fillToggles(view.h);
    fillPair();
    if (view.mean) {
      const weights = view.matrices.map((rows) => rows[pair.query][pair.key]);
      view.head = weights.indexOf(Math.max(...weights));
    }
    forgetSearch(`${view.model} ${view.name} ${view.head}`);
    find("apart-head").textContent = `layer ${view.layer + 1}, head ${view.head + 1}`;
    drawLines();
    drawPair();
    listen();
  }

  /** Take the results of a search away that runs, or was for another head than this. */
  function forgetSearch(head) {
    if (!searching && head === listed) return;
    if (find("alike").contains(document.activeElement)) find("search").focus();
    find("search-status").replaceChildren();
    find("alike").replaceChildren();
    [searching, listed] = [false, head];
  }

  /** Take another weight apart. */
  function choose(query, key) {
    chosen = { query, key };
  }

  return { draw, choose };
})();
