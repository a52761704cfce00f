"use strict";
/*
 * The live page: what is typed becomes tokens (words.js, subwords.js), goes through transformer.js,
 * and every step of it is drawn.
 *
 * Texts become elements by textContent only, so that whatever a visitor types stays text. Colours
 * are left to live.css, where they follow the theme: the heat map is one colour whose opacity is
 * the weight.
 */

(() => {
  const find = (id) => document.getElementById(`live-${id}`);
  const message = find("message");
  const { element, cell, option, drawing, token, percent, number } = Draw;

  const LONGEST = 40; // tokens of a sentence that the page still draws
  const PACE = 350; // milliseconds from token to token while the translation is played

  let used = null; // the model on the page: see `use`
  let shown = null; // the sentence on the page: see `translate`
  let position = 1; // how many tokens of its translation are written
  let timer = null; // while it is played

  // ---- Models -----------------------------------------------------------------------------------

  const folder = new URL(".", document.currentScript.src);
  const models = {}; // {name: promise of {name, data, net, words}}: those that were asked for

  /**
   * The model of this name. Its file is a script that puts data into MODELS, and is loaded when it
   * is asked for the first time.
   */
  async function load(name) {
    if (!window.MODELS?.[name]) {
      await new Promise((resolve, reject) => {
        const gone = () => reject(new Error(location.protocol === "file:"
          ? `The model is missing: \`make site\` writes it to _static/live/${name}.js, which this `
            + "page needs beside it."
          : "The model could not be loaded. Choose it again, or load the page anew."));
        document.head.append(element("script", {
          src: new URL(`${name}.js`, folder), onerror: gone,
          onload: () => (window.MODELS?.[name] ? resolve() : gone()),
        }));
      });
    }
    const data = window.MODELS[name];
    const words = data.subwords ? new Subwords(data.subwords) : new Words(data);
    return { name, data, words, net: new Transformer.Transformer(data) };
  }

  /** Change to a model; if it cannot be had, say why, and keep the one that is there. */
  async function choose(name, { played = true } = {}) {
    const box = (wanted) => document.querySelector(`input[name=live-model][value=${wanted}]`);
    const before = find("sentence").value;
    pause();
    say("Loading the model …");
    box(name).checked = true;
    try {
      const found = await (models[name] ??= load(name));
      if (box(name).checked) use(found, played, before); // unless another was chosen meanwhile
    } catch (error) {
      delete models[name]; // it may be there the next time
      if (!box(name).checked) return; // another was chosen meanwhile
      say(error.message);
      if (used) box(used.name).checked = true;
    }
  }

  // ---- Elements ---------------------------------------------------------------------------------

  /** Put texts or paragraphs into the place for messages, which a screen reader reads out. */
  function say(...lines) {
    const paragraph = (line) => (typeof line === "string" ? element("p", {}, line) : line);
    message.replaceChildren(...lines.filter(Boolean).map(paragraph));
  }

  /** A word as typed, with what would not be seen spelt out. */
  function visible(word) {
    const code = (character) => `\\u{${character.codePointAt(0).toString(16)}}`;
    const text = word.replace(/[\p{C}\p{Z}]/gu, code);
    return element("bdi", {}, `“${text.length > 40 ? `${text.slice(0, 40)}…` : text}”`);
  }

  // ---- From a sentence to everything the page shows ---------------------------------------------

  /**
   * Both translations of a sentence and, for the one that is chosen, all the model computed; null
   * if a word is unknown.
   */
  function translate(text) {
    const { net, words } = used;
    const { pieces, ids, unknown, strange } = words.encode(text);
    if (unknown.length) {
      const more = unknown.length > 5 ? `And ${unknown.length - 5} more unknown.` : "";
      return complain(...unknown.slice(0, 5).map(explain), more);
    }
    if (!pieces.length) return complain("Type a sentence, or choose an example.");
    if (pieces.length > LONGEST) {
      return complain(`That is ${pieces.length} tokens; this page draws ${LONGEST} at most.`);
    }
    const source = [...ids, END];
    const outputs = { greedy: Transformer.greedy(net, source) };
    const decoding = document.querySelector("input[name=live-decoding]:checked").value;
    // the front page does not draw the beam
    const search = find("beam") || decoding === "beam" ? Transformer.beamSearch(net, source) : null;
    outputs.beam = search?.output;
    const output = outputs[decoding];
    return { text, source, strange, outputs, search, output, ...everything(source, output) };
  }

  /** All that the model computes while it writes `output`, and the pieces of source and output. */
  function everything(source, output) {
    const { net, words } = used;
    return {
      ...Transformer.follow(net, source, output),
      read: words.pieces(source),
      written: words.pieces(output),
      fed: words.pieces([BEGIN, ...output.slice(0, -1)]),
    };
  }

  /** Say what is wrong with the sentence, which stays as it is. */
  function complain(...lines) {
    say(...lines);
    find("sentence").setAttribute("aria-invalid", "true");
    return null;
  }

  /** Why a word cannot be translated, and which ones could. */
  function explain(word) {
    const buttons = used.words.similar(word).map((known) => {
      const button = element("button", { type: "button" }, known);
      button.addEventListener("click", () => {
        const exactly = word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
        const whole = new RegExp(`(^|[\\s.,?])${exactly}(?=[\\s.,?]|$)`, "gu");
        find("sentence").value = cleanText(find("sentence").value).replace(whole, `$1${known}`);
        find("sentence").focus();
        start();
      });
      return button;
    });
    const line = element("p", {}, visible(word), ` ${used.words.refusal(word)}`);
    if (buttons.length) line.append(" Perhaps", ...buttons.flatMap((button) => [" ", button]), "?");
    return line;
  }

  // ---- The steps of the translation -------------------------------------------------------------

  function drawTokens() {
    const { layer, head } = choice();
    const reads = mean(shown.positions[position - 1].cross[layer], head);
    find("source").replaceChildren(...shown.read.map((text, j) => {
      const item = element("li", {}, token(text));
      item.style.setProperty("--weight", reads[j].toFixed(3));
      return item;
    }));
    find("target").replaceChildren(...shown.written.slice(0, position).map((text, i) => {
      const p = shown.positions[i].probabilities[shown.output[i]];
      const item = element("li", {}, token(text), element("small", {}, percent(p)));
      if (i === position - 1) item.setAttribute("aria-current", "step");
      return item;
    }));
    const complete = position === shown.output.length;
    const [, german] = used.data.pairs.find(([english]) => english === shown.text.trim()) ?? [];
    const said = used.words.decode(shown.output.slice(0, position));
    const verdict = german === said ? [" The corpus says the same."]
      : [" The corpus says: ", element("span", { lang: "de" }, german)];
    find("verdict").replaceChildren(
      element("strong", { lang: "de", id: "live-translation" }, said),
      ...(german && complete ? verdict : []));
  }

  function drawCandidates() {
    const { probabilities, token: chosen } = shown.positions[position - 1];
    const best = Transformer.bestTokens(probabilities, 5);
    if (!best.includes(chosen)) best.push(chosen); // a beam may choose what was not likely at first
    find("candidates").replaceChildren(...best.map((id) => {
      const bar = element("span", { className: "live-bar" });
      bar.style.width = `${100 * probabilities[id]}%`;
      const [piece] = used.words.pieces([id]);
      return element("tr", { className: id === chosen ? "live-chosen" : "" },
        element("th", { scope: "row" }, token(piece)), cell(percent(probabilities[id])), cell(bar));
    }));
    const said = `Token ${position} of ${shown.output.length}: `;
    const after = position > 1 ? `after “${shown.fed.slice(1, position).join(" ")}”` : "the first";
    find("step").replaceChildren(said, token(shown.written[position - 1]), `, ${after}`);
    const slider = find("position");
    slider.max = shown.output.length;
    slider.value = position;
    const [last, piece] = [shown.output.length, shown.written[position - 1]];
    slider.setAttribute("aria-valuetext", `${position} of ${last}: ${piece}`);
    for (const id of ["next", "whole"]) find(id).setAttribute("aria-disabled", position === last);
    find("again").setAttribute("aria-disabled", position === 1);
  }

  // ---- Attention --------------------------------------------------------------------------------

  /** What is chosen: layer and head are counted from 0, and head -1 is the mean. */
  const choice = () => ({
    kind: find("kind").value, layer: find("layer").value - 1, head: find("head").value - 1,
  });

  /** The name of a block: "Cross-attention, layer 2". */
  function nameOf(layer) {
    return `${find("kind").selectedOptions[0].text.split(":")[0]}, layer ${layer + 1}`;
  }

  /** One head's row of weights, or the mean of all heads. */
  function mean(heads, head) {
    if (head >= 0) return heads[head];
    return heads[0].map((_, j) => heads.reduce((sum, row) => sum + row[j], 0) / heads.length);
  }

  /**
   * One matrix: {rows: weights of each query, queries, keys}. Of a translation only what has been
   * written is drawn.
   */
  function matrix(kind, layer, head, of = shown, until = position) {
    if (kind === "encoder") {
      const rows = of.encoder[layer].map((heads) => mean(heads, head));
      return { rows, queries: of.read, keys: of.read };
    }
    const [name, keys] = kind === "cross" ? ["cross", of.read] : ["self", of.fed.slice(0, until)];
    const rows = of.positions.slice(0, until).map((step) => mean(step[name][layer], head));
    return { rows, queries: of.written.slice(0, until), keys };
  }

  /** The matrices of all heads of a block: {matrices, queries, keys}. */
  function matricesOf(of, kind, layer, until = Infinity) {
    const { h } = used.data.config;
    const all = Array.from({ length: h }, (_, head) => matrix(kind, layer, head, of, until));
    return { matrices: all.map(({ rows }) => rows), queries: all[0].queries, keys: all[0].keys };
  }

  /** Everything of a sentence in one go, without a word to the visitor: for searches. */
  function quietly(text) {
    const source = [...used.words.encode(text).ids, END];
    const output = Transformer.greedy(used.net, source);
    return everything(source, output);
  }

  function drawApart() {
    const { kind, layer, head } = choice();
    Apart.draw({
      shown, kind, layer, head, model: used.name, h: used.data.config.h, name: nameOf(layer),
      ...matricesOf(shown, kind, layer, position), matricesOf, quietly,
      pairs: used.data.pairs.filter(([english]) => english !== shown.text.trim()),
      open: (text) => {
        find("sentence").value = text;
        find("examples").value = "";
        start({ played: false });
      },
    });
  }

  function drawHeatmap() {
    const { kind, layer, head } = choice();
    const { rows, queries, keys } = matrix(kind, layer, head);
    const name = `${nameOf(layer)}, ${head < 0 ? "mean of the heads" : `head ${head + 1}`}`;
    const [size, letter] = [28, 7.4]; // pixels
    const longest = (labels) => Math.max(...labels.map((label) => label.length)) * letter;
    const [left, top] = [longest(queries) + 14, longest(keys) * 0.75 + 18];
    const width = left + keys.length * size + longest(keys.slice(-4)) * 0.7;
    const height = top + queries.length * size + 4;
    const current = kind === "encoder" ? -1 : position - 1;
    const cells = rows.flatMap((row, i) => Array.from(row, (weight, j) => drawing("rect", {
      x: left + j * size, y: top + i * size, width: size - 1, height: size - 1,
      class: "live-weight", "fill-opacity": weight.toFixed(3),
    }, drawing("title", {}, `${queries[i]} reads ${keys[j]}: ${number(weight)}`))));
    const label = (text, attributes) => drawing("text", {
      class: /^<.*>$/.test(text) ? "live-special" : "", ...attributes,
    }, text);
    const columns = keys.map((key, j) => label(key, {
      transform: `translate(${left + (j + 0.6) * size} ${top - 7}) rotate(-48)`,
    }));
    const lines = rows.map((_, i) => label(queries[i], {
      x: left - 8, y: top + (i + 0.5) * size, "text-anchor": "end",
      "dominant-baseline": "central", "font-weight": i === current ? 700 : 400,
    }));
    const frame = drawing("rect", {
      x: left - 1, y: top + current * size - 1, width: keys.length * size + 1, height: size + 1,
      class: "live-frame",
    });
    const ground = drawing("rect", {
      x: left, y: top, width: keys.length * size - 1, height: queries.length * size - 1,
      class: "live-ground",
    });
    const svg = drawing("svg", {
      viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": `Heat map of ${name}; a table of its numbers is below.`,
    }, ground, ...cells, ...columns, ...lines, ...(current < 0 ? [] : [frame]));
    svg.style.width = `${width}px`;
    svg.style.minWidth = `${Math.min(0.8 * width, 900)}px`;
    const places = rows.flatMap((row, query) => Array.from(row, (_, key) => [query, key]));
    cells.forEach((one, place) => one.addEventListener("click", () => {
      Apart.choose(...places[place]);
      drawApart();
    }));
    find("heatmap").replaceChildren(svg);
    find("heatmap").classList.toggle("live-clickable", Boolean(find("products")));
    find("attention-caption").textContent = {
      cross: `${name}. A row is a token of the translation while it is written, `
        + "a column a token of the source.",
      encoder: `${name}. Rows and columns are the tokens of the source.`,
      decoder: `${name}. A row is a token while it is written, `
        + "a column a token written before it; later tokens are masked.",
    }[kind];
    drawTable(name, rows, queries, keys);
  }

  function drawTable(name, rows, queries, keys) {
    const header = (text, scope) => element("th", { scope }, token(text));
    const head = element("tr", {}, cell(), ...keys.map((key) => header(key, "col")));
    const body = rows.map((row, i) => element("tr", {}, header(queries[i], "row"),
      ...keys.map((_, j) => cell(j < row.length ? number(row[j], 2) : "–"))));
    find("weights").replaceChildren(element("table", {}, element("caption", {}, name),
      element("thead", {}, head), element("tbody", {}, ...body)));
  }

  /**
   * Small pictures of every layer and head: a pixel for each weight, enlarged by the style sheet.
   */
  function drawOverview() {
    const chosen = choice();
    for (const button of find("overview").children) {
      const [layer, head] = [Number(button.dataset.layer), Number(button.dataset.head)];
      const { rows, queries, keys } = matrix(chosen.kind, layer, head);
      const canvas = button.querySelector("canvas");
      [canvas.width, canvas.height] = [keys.length, queries.length];
      const context = canvas.getContext("2d");
      context.fillStyle = getComputedStyle(canvas).color;
      rows.forEach((row, i) => row.forEach((weight, j) => {
        context.globalAlpha = weight;
        context.fillRect(j, i, 1, 1);
      }));
      button.setAttribute("aria-pressed", layer === chosen.layer && head === chosen.head);
    }
  }

  // ---- The beam ---------------------------------------------------------------------------------

  function drawBeam() {
    if (!find("beam")) return; // the front page shows less
    const { words } = used;
    const { steps, output } = shown.search;
    const last = position === shown.output.length || position > steps.length;
    // a search may go on after its best has ended, until nothing can overtake it
    const step = last ? steps.length : position;
    find("beam").replaceChildren(...steps[step - 1].map(({ tokens, logP, score, ended }, rank) => {
      const wins = tokens.every((id, i) => id === output[i]);
      const pieces = words.pieces(tokens);
      const star = { className: "live-star", title: "becomes the result" };
      const newest = ended ? -1 : pieces.length - 1;
      const text = element("td", { lang: "de" }, wins ? element("span", star, "★ ") : "",
        ...pieces.flatMap((piece, i) => [i ? " " : "",
          i === newest ? element("strong", {}, token(piece)) : token(piece)]));
      return element("tr", { className: wins ? "live-chosen" : "" },
        element("th", { scope: "row" }, `${rank + 1}`), text,
        cell(number(logP)), cell(`${tokens.length}`), cell(number(score)));
    }));
    find("beam-caption").textContent = last
      ? `After step ${step}, the last: no unfinished hypothesis could still overtake the best.`
      : `After step ${step}: the four best hypotheses.`;
    const [greedy, beam] = [words.decode(shown.outputs.greedy), words.decode(shown.outputs.beam)];
    const line = (text) => element("em", { lang: "de" }, text);
    find("compare").replaceChildren(...(greedy === beam
      ? ["Greedy decoding and the beam give the same translation: ", line(greedy)]
      : ["Greedy decoding gives: ", line(greedy), " The beam gives: ", line(beam)]));
  }

  // ---- Events -----------------------------------------------------------------------------------

  function draw() {
    drawTokens();
    drawCandidates();
    drawHeatmap();
    drawOverview();
    drawApart();
    drawBeam();
  }

  function pause() {
    clearInterval(timer);
    timer = null;
    find("step").setAttribute("aria-live", "polite");
  }

  function goTo(wanted) {
    pause();
    position = Math.min(Math.max(wanted, 1), shown.output.length);
    draw();
  }

  /** Write the translation token by token, unless the visitor wants nothing to move. */
  function play() {
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) return goTo(Infinity);
    goTo(1);
    find("step").setAttribute("aria-live", "off"); // the result has been announced as a whole
    timer = setInterval(() => {
      if (position < shown.output.length) {
        position += 1;
        draw();
      } else {
        pause();
      }
    }, PACE);
  }

  /** Translate what is typed, and show it: played, or all at once. */
  function start({ played = true } = {}) {
    const wanted = document.querySelector("input[name=live-model]:checked").value;
    if (wanted !== used.name) return; // its model is on its way
    pause();
    const found = translate(find("sentence").value);
    if (!found) return;
    shown = found;
    find("sentence").removeAttribute("aria-invalid");
    for (const part of document.querySelectorAll("[data-result]")) {
      part.hidden = (part.dataset.only ?? used.name) !== used.name;
    }
    say(...(played ? summary() : []));
    if (played) play();
    else goTo(Infinity);
  }

  /**
   * What a screen reader hears first, and a hint where the sentence is unlike those that the model
   * knows.
   */
  function summary() {
    const said = element("span", { lang: "de" }, used.words.decode(shown.output));
    return [element("p", { className: "live-hidden" }, "In German: ", said), hint()];
  }

  function hint() {
    const { text, source, strange } = shown;
    const { longest } = used.data;
    if (strange.length) {
      const met = strange.slice(0, 8).flatMap((character) => [visible(character), " "]);
      return element("p", {}, "The model hardly met ", ...met,
        "while it was trained, so it cannot translate them.");
    }
    if (longest && source.length - 1 > longest) {
      return `The model was trained on sentences of at most ${longest} tokens; `
        + `this one has ${source.length - 1}.`;
    }
    if (used.name === "toy" && !/^\s*\p{Lu}.*[.?]\s*$/su.test(text)) {
      return "The model has only seen sentences that begin with a capital letter "
        + "and end with . or ?";
    }
    return "";
  }

  /**
   * Put a model on the page: its examples, layers and heads, facts, and its first example
   * translated. What was typed since `before` was there, or refused, stays if the model knows it.
   */
  function use(model, played, before) {
    used = model;
    const { config: { N, h }, examples } = used.data;
    const count = (length, make) => Array.from({ length }, (_, i) => make(i));
    find("examples").replaceChildren(option("", "choose one …"),
      ...examples.map(([name, sentence]) => option(sentence, `${name}: ${sentence}`)));
    find("layer").replaceChildren(...count(N, (i) => option(i + 1, `${i + 1}`, i === N - 1)));
    find("head").replaceChildren(...count(h, (i) => option(i + 1, `${i + 1}`)),
      option(0, "mean", true));
    find("overview").replaceChildren(...count(N * h, (i) => {
      const [layer, head] = [Math.floor(i / h), i % h];
      const button = element("button", { type: "button" },
        element("canvas", { ariaHidden: "true" }),
        element("span", {}, `layer ${layer + 1}, head ${head + 1}`));
      Object.assign(button.dataset, { layer, head });
      return button;
    }));
    find("words").querySelector("p").textContent = used.words.known().join(" ");
    if (find("facts")) find("facts").textContent = facts(used.data);
    find("form").hidden = false;
    const box = find("sentence");
    const own = box.value !== before || box.getAttribute("aria-invalid") === "true";
    const { pieces, unknown } = used.words.encode(box.value);
    const fits = pieces.length > 0 && pieces.length <= LONGEST && !unknown.length;
    if (!(own && fits)) [, box.value] = examples[0];
    find("examples").value = examples.some(([, one]) => one === box.value) ? box.value : "";
    start({ played });
  }

  /** Sizes in the paper's symbols. */
  function facts({ config: { N, d_model, d_ff, h, vocab_size }, parameters, subwords, tensors }) {
    const words = subwords ? "pieces of words" : "words";
    const kept = tensors.some(({ rows }) => rows) ? "8 bits" : "half precision";
    const comma = (count) => count.toLocaleString("en");
    return `The chosen model has ${comma(parameters)} parameters: N = ${N}, d_model = ${d_model}, `
      + `d_ff = ${d_ff}, h = ${h}, ${comma(vocab_size)} ${words} for both languages. `
      + `Its matrices are kept in ${kept}.`;
  }

  function listen() {
    const onChange = (boxes, then) => document.querySelectorAll(boxes).forEach((box) => {
      box.addEventListener("change", () => then(box.value));
    });
    onChange("input[name=live-model]", (name) => choose(name));
    onChange("input[name=live-decoding]", () => start());
    find("form").addEventListener("submit", (event) => {
      event.preventDefault();
      start();
    });
    find("examples").addEventListener("change", (event) => {
      if (!event.target.value) return;
      find("sentence").value = event.target.value;
      start();
    });
    find("sentence").addEventListener("input", () => {
      find("examples").value = "";
    });
    find("random").addEventListener("click", () => {
      const { pairs } = used.data;
      [find("sentence").value] = pairs[Math.floor(Math.random() * pairs.length)];
      find("examples").value = "";
      start();
    });
    find("again").addEventListener("click", () => goTo(1));
    find("next").addEventListener("click", () => goTo(position + 1));
    find("whole").addEventListener("click", () => goTo(Infinity));
    find("position").addEventListener("input", (event) => goTo(Number(event.target.value)));
    for (const id of ["kind", "layer", "head"]) find(id).addEventListener("change", draw);
    // a search, or an open menu, would be gone with the next token that is played
    for (const [id, event] of [["search", "click"], ["query", "focus"], ["key", "focus"]]) {
      find(id)?.addEventListener(event, () => timer && goTo(Infinity));
    }
    find("overview").addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (!button) return;
      find("layer").value = Number(button.dataset.layer) + 1;
      find("head").value = Number(button.dataset.head) + 1;
      draw();
    });
    new MutationObserver(() => shown && drawOverview())
      .observe(document.documentElement, { attributeFilter: ["data-theme"] });
  }

  listen();
  choose("toy", { played: false });
})();
