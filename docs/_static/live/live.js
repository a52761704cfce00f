"use strict";
/*
 * The live page: what is typed goes through words.js and transformer.js, and every step of it is drawn.
 *
 * Texts become elements by textContent only, so that whatever a visitor types stays text. Colours are left to live.css, where they follow
 * the theme: the heat map is one colour whose opacity is the weight.
 */

(() => {
  const find = (id) => document.getElementById(`live-${id}`);
  const message = find("message");
  if (typeof MODEL === "undefined") {
    message.textContent = "The model is missing: `make site` writes it to _static/live/model.js, which this page needs beside it.";
    return;
  }

  const LONGEST = 40; // tokens of a sentence that the page still draws
  const PACE = 350; // milliseconds from token to token while the translation is played
  const model = new Transformer.Transformer(MODEL);
  const words = new Words(MODEL);
  const { N, h } = MODEL.config;

  let shown = null; // the sentence on the page: see `translate`
  let position = 1; // how many tokens of its translation are written
  let timer = null; // while it is played

  // ---- Elements -----------------------------------------------------------------------------------------------------

  const { element, drawing, token, percent, number } = Draw;

  /** A word as typed, with what would not be seen spelt out. */
  function visible(word) {
    const code = (character) => `\\u{${character.codePointAt(0).toString(16)}}`;
    const text = word.replace(/[\p{C}\p{Z}]/gu, code);
    return element("bdi", {}, `“${text.length > 40 ? `${text.slice(0, 40)}…` : text}”`);
  }

  // ---- From a sentence to everything the page shows -----------------------------------------------------------------

  /** Both translations of a sentence and, for the one that is chosen, all the model computed; null if a word is unknown. */
  function translate(text) {
    const { pieces, ids, unknown } = words.encode(text);
    if (!pieces.length) return complain([element("p", {}, "Type a sentence, or take an example.")]);
    if (unknown.length) {
      const more = unknown.length - 5;
      return complain([...unknown.slice(0, 5).map(explain), ...(more > 0 ? [element("p", {}, `And ${more} more unknown.`)] : [])]);
    }
    if (pieces.length > LONGEST) {
      return complain([element("p", {}, `That is ${pieces.length} tokens; this page draws ${LONGEST} at most.`)]);
    }
    const source = [...ids, END];
    const outputs = { greedy: Transformer.greedy(model, source) };
    const search = Transformer.beamSearch(model, source);
    outputs.beam = search.output;
    const decoding = document.querySelector("input[name=live-decoding]:checked").value;
    const output = outputs[decoding];
    const { encoder, asked, positions } = Transformer.follow(model, source, output);
    return {
      text, source, outputs, search, decoding, output, positions, encoder, asked,
      read: words.pieces(source),
      written: words.pieces(output),
      fed: words.pieces([BEGIN, ...output.slice(0, -1)]),
    };
  }

  /** Say what is wrong with the sentence, which stays as it is. */
  function complain(lines) {
    message.replaceChildren(...lines);
    find("sentence").setAttribute("aria-invalid", "true");
    return null;
  }

  /** Why a word cannot be translated, and which ones could. */
  function explain(word) {
    if (words.german.has(word)) {
      return element("p", {}, visible(word), " is a German word of the toy language; this page translates from English.");
    }
    const buttons = words.similar(word).map((known) => {
      const button = element("button", { type: "button" }, known);
      button.addEventListener("click", () => {
        const exactly = word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
        const whole = new RegExp(`(?<![^\\s.,?])${exactly}(?![^\\s.,?])`, "gu");
        find("sentence").value = find("sentence").value.replace(whole, known);
        find("sentence").focus();
        start();
      });
      return button;
    });
    const suggestions = buttons.length ? [" Perhaps ", ...buttons.flatMap((button, i) => (i ? [" ", button] : [button])), "?"] : [];
    return element("p", {}, visible(word), " is not in the toy language.", ...suggestions);
  }

  // ---- The steps of the translation ---------------------------------------------------------------------------------

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
    const pair = MODEL.pairs.find(([english]) => english === shown.text.trim());
    const said = words.decode(shown.output.slice(0, position));
    const verdict = !pair || !complete ? "" : pair[1] === said ? " The corpus says the same." : ` The corpus says: ${pair[1]}`;
    find("verdict").replaceChildren(element("strong", { lang: "de", id: "live-translation" }, said), verdict);
  }

  function drawCandidates() {
    const { probabilities, token: chosen } = shown.positions[position - 1];
    const best = Transformer.bestTokens(probabilities, 5);
    if (!best.includes(chosen)) best.push(chosen); // a beam may choose what was not likely at first
    find("candidates").replaceChildren(...best.map((id) => {
      const bar = element("span", { className: "live-bar" });
      bar.style.width = `${100 * probabilities[id]}%`;
      const row = element("tr", { className: id === chosen ? "live-chosen" : "" },
        element("th", { scope: "row" }, token(words.table[id])), element("td", {}, percent(probabilities[id])), element("td", {}, bar));
      return row;
    }));
    const said = `Token ${position} of ${shown.output.length}: `;
    const after = position > 1 ? `after “${shown.fed.slice(1, position).join(" ")}”` : "the first";
    find("step").replaceChildren(said, token(shown.written[position - 1]), `, ${after}`);
    const slider = find("position");
    slider.max = shown.output.length;
    slider.value = position;
    slider.setAttribute("aria-valuetext", `${position} of ${shown.output.length}: ${shown.written[position - 1]}`);
    for (const id of ["next", "whole"]) find(id).setAttribute("aria-disabled", position === shown.output.length);
    find("again").setAttribute("aria-disabled", position === 1);
  }

  // ---- Attention ----------------------------------------------------------------------------------------------------

  const choice = () => ({
    kind: find("kind").value, layer: find("layer").value - 1, head: find("head").value - 1, // counted from 0; head -1: the mean
  });

  /** One head's row of weights, or the mean of all heads. */
  function mean(heads, head) {
    return head >= 0 ? heads[head] : heads[0].map((_, j) => heads.reduce((sum, row) => sum + row[j], 0) / heads.length);
  }

  /** One matrix: {rows: weights of each query, queries, keys}. Of a translation only what has been written is drawn. */
  function matrix(kind, layer, head, of = shown, until = position) {
    if (kind === "encoder") {
      return { rows: of.encoder[layer].map((heads) => mean(heads, head)), queries: of.read, keys: of.read };
    }
    const written = of.positions.slice(0, until);
    const rows = written.map((step) => mean((kind === "cross" ? step.cross : step.self)[layer], head));
    return { rows, queries: of.written.slice(0, until), keys: kind === "cross" ? of.read : of.fed };
  }

  /** The matrices of all heads of a block: {matrices, queries, keys}. */
  function matricesOf(of, kind, layer, until = Infinity) {
    const all = Array.from({ length: h }, (_, head) => matrix(kind, layer, head, of, until));
    return { matrices: all.map(({ rows }) => rows), queries: all[0].queries, keys: all[0].keys };
  }

  /** Everything of a sentence in one go, without a word to the visitor: for searches. */
  function quietly(text) {
    const source = [...words.encode(text).ids, END];
    const output = Transformer.greedy(model, source);
    const { encoder, asked, positions } = Transformer.follow(model, source, output);
    return { encoder, asked, positions, read: words.pieces(source), written: words.pieces(output), fed: words.pieces([BEGIN, ...output.slice(0, -1)]) };
  }

  function drawApart() {
    const { kind, layer, head } = choice();
    const name = `${find("kind").selectedOptions[0].text.split(":")[0]}, layer ${layer + 1}`;
    Apart.draw({
      shown, kind, layer, head, h, name, ...matricesOf(shown, kind, layer, position), matricesOf, quietly,
      pairs: MODEL.pairs.filter(([english]) => english !== shown.text.trim()),
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
    const name = `${find("kind").selectedOptions[0].text.split(":")[0]}, layer ${layer + 1}, ${head < 0 ? "mean of the heads" : `head ${head + 1}`}`;
    const [cell, letter] = [28, 7.4]; // pixels
    const longest = (labels) => Math.max(...labels.map((label) => label.length)) * letter;
    const [left, top] = [longest(queries) + 14, longest(keys) * 0.75 + 18];
    const width = left + keys.length * cell + longest(keys.slice(-4)) * 0.7;
    const height = top + queries.length * cell + 4;
    const current = kind === "encoder" ? -1 : position - 1;
    const cells = rows.flatMap((row, i) => Array.from(row, (weight, j) => drawing("rect", {
      x: left + j * cell, y: top + i * cell, width: cell - 1, height: cell - 1, class: "live-weight", "fill-opacity": weight.toFixed(3),
    }, drawing("title", {}, `${queries[i]} reads ${keys[j]}: ${number(weight)}`))));
    const label = (text, attributes) => drawing("text", { class: /^<.*>$/.test(text) ? "live-special" : "", ...attributes }, text);
    const columns = keys.map((key, j) => label(key, { transform: `translate(${left + (j + 0.6) * cell} ${top - 7}) rotate(-48)` }));
    const lines = rows.map((_, i) => label(queries[i], {
      x: left - 8, y: top + (i + 0.5) * cell, "text-anchor": "end", "dominant-baseline": "central", "font-weight": i === current ? 700 : 400,
    }));
    const frame = drawing("rect", { x: left - 1, y: top + current * cell - 1, width: keys.length * cell + 1, height: cell + 1, class: "live-frame" });
    const ground = drawing("rect", { x: left, y: top, width: keys.length * cell - 1, height: queries.length * cell - 1, class: "live-ground" });
    const svg = drawing("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Heat map of ${name}; a table of its numbers is below.` },
      ground, ...cells, ...columns, ...lines, ...(current < 0 ? [] : [frame]));
    svg.style.width = `${width}px`;
    svg.style.minWidth = `${Math.min(0.8 * width, 900)}px`;
    svg.querySelectorAll(".live-weight").forEach((cell, place) => cell.addEventListener("click", () => {
      const row = rows.findIndex((_, i) => place < rows.slice(0, i + 1).reduce((sum, one) => sum + one.length, 0));
      Apart.choose(row, place - rows.slice(0, row).reduce((sum, one) => sum + one.length, 0));
      drawApart();
    }));
    find("heatmap").replaceChildren(svg);
    find("attention-caption").textContent = {
      cross: `${name}. A row is a token of the translation while it is written, a column a token of the source.`,
      encoder: `${name}. Rows and columns are the tokens of the source.`,
      decoder: `${name}. A row is a token while it is written, a column a token written before it; the rest is the future, and masked.`,
    }[kind];
    drawTable(name, rows, queries, keys);
  }

  function drawTable(name, rows, queries, keys) {
    const head = element("tr", {}, element("td"), ...keys.map((key) => element("th", { scope: "col" }, token(key))));
    const body = rows.map((row, i) => element("tr", {}, element("th", { scope: "row" }, token(queries[i])),
      ...Array.from(keys, (_, j) => element("td", {}, j < row.length ? number(row[j], 2) : "–"))));
    find("weights").replaceChildren(element("table", {}, element("caption", {}, name), element("thead", {}, head), element("tbody", {}, ...body)));
  }

  /** Small pictures of every layer and head: a pixel for each weight, enlarged by the style sheet. */
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

  // ---- The beam -----------------------------------------------------------------------------------------------------

  function drawBeam() {
    if (!find("beam")) return; // the front page shows less
    const { steps, output } = shown.search;
    const last = position === shown.output.length || position > steps.length;
    const step = last ? steps.length : position; // a search may go on after its best has ended, until nothing can overtake it
    find("beam").replaceChildren(...steps[step - 1].map(({ tokens, logP, score, ended }, rank) => {
      const wins = tokens.every((id, i) => id === output[i]);
      const pieces = words.pieces(tokens);
      const text = element("td", { lang: "de" }, wins ? element("span", { className: "live-star", title: "becomes the result" }, "★ ") : "",
        ...pieces.flatMap((piece, i) => [i ? " " : "", i === pieces.length - 1 && !ended ? element("strong", {}, token(piece)) : token(piece)]));
      return element("tr", { className: wins ? "live-chosen" : "" }, element("th", { scope: "row" }, `${rank + 1}`), text,
        element("td", {}, number(logP)), element("td", {}, `${tokens.length}`), element("td", {}, number(score)));
    }));
    find("beam-caption").textContent = last
      ? `After step ${step}, the last: nothing that is open could still overtake the best.`
      : `After step ${step}: the four best beginnings.`;
    const [greedy, beam] = [words.decode(shown.outputs.greedy), words.decode(shown.outputs.beam)];
    const line = (text) => element("em", { lang: "de" }, text);
    find("compare").replaceChildren(...(greedy === beam
      ? ["Greedy decoding and the beam end in the same translation: ", line(greedy)]
      : ["Greedy decoding says: ", line(greedy), " The beam says: ", line(beam)]));
  }

  // ---- Events -------------------------------------------------------------------------------------------------------

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
    pause();
    const found = translate(find("sentence").value);
    if (!found) return;
    shown = found;
    find("sentence").removeAttribute("aria-invalid");
    for (const part of document.querySelectorAll("[data-result]")) part.hidden = false;
    message.replaceChildren(...(played ? summary() : []));
    if (played) play();
    else goTo(Infinity);
  }

  /** What a screen reader hears first, and a hint where the sentence is unlike those that the model knows. */
  function summary() {
    const lines = [element("p", { className: "live-hidden" }, `In German: ${words.decode(shown.output)}`)];
    const { text, source } = shown;
    if (source.length - 1 > MODEL.longest) {
      lines.push(element("p", {}, `The model was trained on sentences of at most ${MODEL.longest} tokens; this one has ${source.length - 1}.`));
    } else if (!/^\s*\p{Lu}.*[.?]\s*$/su.test(text)) {
      lines.push(element("p", {}, "The model has only seen sentences that begin with a capital letter and end with . or ?"));
    }
    return lines;
  }

  function fillControls() {
    find("examples").append(element("option", { value: "" }, "choose one …"), ...MODEL.examples.map(([name, sentence]) => element("option", { value: sentence }, `${name}: ${sentence}`)));
    find("layer").append(...Array.from({ length: N }, (_, i) => element("option", { value: i + 1, selected: i === N - 1 }, `${i + 1}`)));
    find("head").append(...Array.from({ length: h }, (_, i) => element("option", { value: i + 1 }, `${i + 1}`)),
      element("option", { value: 0, selected: true }, "mean"));
    for (let layer = 0; layer < N; layer++) {
      for (let head = 0; head < h; head++) {
        const button = element("button", { type: "button" }, element("canvas", { ariaHidden: "true" }),
          element("span", {}, `layer ${layer + 1}, head ${head + 1}`));
        Object.assign(button.dataset, { layer, head });
        find("overview").append(button);
      }
    }
    const known = [...words.ids.keys()].filter((word) => /\p{L}/u.test(word)).sort((a, b) => a.localeCompare(b, "en"));
    find("words").querySelector("p").textContent = known.join(" ");
    if (find("facts")) find("facts").textContent = `The model has ${MODEL.parameters.toLocaleString("en")} parameters: N = ${N}, d_model = ${MODEL.config.d_model}, `
      + `d_ff = ${MODEL.config.d_ff}, h = ${h}, ${MODEL.config.vocab_size} words for both languages. Its weights are kept in half precision.`;
  }

  function listen() {
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
      [find("sentence").value] = MODEL.pairs[Math.floor(Math.random() * MODEL.pairs.length)];
      find("examples").value = "";
      start();
    });
    for (const radio of document.querySelectorAll("input[name=live-decoding]")) radio.addEventListener("change", () => start());
    find("again").addEventListener("click", () => goTo(1));
    find("next").addEventListener("click", () => goTo(position + 1));
    find("whole").addEventListener("click", () => goTo(Infinity));
    find("position").addEventListener("input", (event) => goTo(Number(event.target.value)));
    for (const id of ["kind", "layer", "head"]) find(id).addEventListener("change", draw);
    find("overview").addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (!button) return;
      find("layer").value = Number(button.dataset.layer) + 1;
      find("head").value = Number(button.dataset.head) + 1;
      draw();
    });
    new MutationObserver(() => shown && drawOverview()).observe(document.documentElement, { attributeFilter: ["data-theme"] });
  }

  fillControls();
  listen();
  for (const part of [find("form"), find("words")]) part.hidden = false;
  [, find("sentence").value] = MODEL.examples[0];
  find("examples").value = find("sentence").value;
  start({ played: false });
})();
