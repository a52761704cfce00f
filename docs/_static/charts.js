"use strict";
// Draws the interactive charts of a page when they come into view, from the data that stands in the page. Vega is fetched once, from
// beside this file, and interprets its expressions, so that the pages can forbid eval.
(() => {
  const here = document.currentScript.src;
  const ROWS_SHOWN = 100;
  // What is neutral in the light charts, and what it becomes on a dark page. Colours that mean something stay.
  const DARK = {
    "#22262e": "#e6eaf0", "#000": "#e6eaf0", "#000000": "#e6eaf0", black: "#e6eaf0", "#3a3f4b": "#c9ced6", "#e3e6ea": "#3a3f4b",
    "#fff": "#121212", "#ffffff": "#121212", white: "#121212", "#0072b2": "#56b4e9", "#332288": "#a9a2e0", "#882255": "#d98bb2",
  };
  const INK = { light: ["#22262e", "#e3e6ea"], dark: ["#e6eaf0", "#3a3f4b"] };

  let library;
  function vega() {
    library ??= new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = new URL("vega.js", here);
      script.onload = resolve;
      script.onerror = () => reject(new Error("vega.js did not load"));
      document.head.append(script);
    });
    return library;
  }

  const theme = () => (document.documentElement.dataset.theme === "dark" ? "dark" : "light");
  const isObject = (value) => value !== null && typeof value === "object";
  const isHex = (value) => typeof value === "string" && /^#[0-9a-f]{6}$/i.test(value);
  const luminance = (hex) => [1, 3, 5].reduce((sum, i, k) => sum + [0.3, 0.59, 0.11][k] * parseInt(hex.slice(i, i + 2), 16), 0);

  // Turn light colours into dark ones everywhere but in the data; shades that begin near white are run through backwards.
  function darken(part, key) {
    if (typeof part === "string") return DARK[part.toLowerCase()] ?? part;
    if (!isObject(part) || key === "data" || key === "datasets") return part;
    if (Array.isArray(part)) {
      if (part.length > 2 && part.every(isHex) && luminance(part[0]) > 210) return [...part].reverse();
      return part.map((item) => darken(item));
    }
    if (part.scheme === "blues") part = { ...part, reverse: true };
    return Object.fromEntries(Object.entries(part).map(([name, value]) => [name, darken(value, name)]));
  }

  function merge(base, over) {
    const result = { ...base };
    for (const [key, value] of Object.entries(over ?? {})) {
      result[key] = isObject(value) && isObject(base[key]) && !Array.isArray(value) ? merge(base[key], value) : value;
    }
    return result;
  }

  // Whether a chart is a single view, which can shrink. What is put together scrolls in its box.
  function shrinks(spec) {
    const together = ["hconcat", "vconcat", "concat", "facet", "repeat"].some((name) => name in spec);
    return !together && !["row", "column", "facet"].some((name) => name in (spec.encoding ?? {}));
  }

  // The chart for the page's theme, and `width` wide if that is given.
  function fitted(source, width) {
    let spec = structuredClone(source);
    if (theme() === "dark") spec = darken(spec);
    const [ink, grid] = INK[theme()];
    const words = { labelColor: ink, titleColor: ink };
    spec.config = merge({
      axis: { ...words, gridColor: grid, domainColor: ink, tickColor: ink }, legend: words, header: words,
      title: { color: ink, subtitleColor: ink }, text: { color: ink }, view: { stroke: grid },
    }, spec.config);
    spec.config.aria = false; // the box says what the picture shows, and the table says the rest
    spec.background = "transparent";
    delete spec.$schema; // it names the Vega-Lite of the notebooks; this one is newer and reads it too
    if (width) Object.assign(spec, { width, autosize: { type: "fit-x", contains: "padding" } });
    return spec;
  }

  function* inside(part) {
    if (!isObject(part)) return;
    yield part;
    for (const value of Object.values(part)) yield* inside(value);
  }

  // Rows of a CSV text (RFC 4180) as objects. Vega's own reader would compile a function, which the policy forbids.
  function readCsv(text) {
    const lines = [[]];
    for (const [, quoted, plain, end] of text.matchAll(/(?:"((?:[^"]|"")*)"|([^",\r\n]*))(,|\r?\n|$)/g)) {
      lines.at(-1).push(quoted === undefined ? plain : quoted.replaceAll('""', '"'));
      if (end !== ",") lines.push([]);
    }
    const [header, ...rows] = lines.filter((line) => line.length > 1 || line[0]);
    const numeric = header.map((_, k) => rows.every((row) => row[k] === "" || Number.isFinite(Number(row[k]))));
    const value = (cell, k) => (numeric[k] ? (cell === "" ? null : Number(cell)) : cell);
    return rows.map((row) => Object.fromEntries(header.map((name, k) => [name, value(row[k] ?? "", k)])));
  }

  // The chart as the page holds it, with its data as rows.
  function parse(text) {
    const spec = JSON.parse(text);
    for (const part of [...inside(spec)]) {
      const data = part.data;
      if (isObject(data) && typeof data.values === "string" && data.format?.type === "csv") {
        data.values = readCsv(data.values);
        delete data.format;
      }
    }
    return spec;
  }

  const controls = (spec) => [...inside(spec.params ?? []), ...inside(spec)].filter((part) => part.bind?.input).map((part) => part.name);

  // The tables that a chart is drawn from: [{name, rows}].
  function tables(spec) {
    const found = Object.entries(spec.datasets ?? {}).map(([name, rows]) => ({ name, rows }));
    for (const part of inside({ ...spec, datasets: null })) {
      const data = part.data;
      if (!isObject(data) || data.values === undefined) continue;
      found.push({ name: data.name ?? "data", rows: [data.values].flat() });
    }
    // A column such as "key" that counts places in a list of labels "keys" shows the label.
    const lists = Object.fromEntries([...inside(spec.params ?? [])].filter((p) => Array.isArray(p.value)).map((p) => [p.name, p.value]));
    const named = (row) => Object.fromEntries(Object.entries(row).map(([column, value]) => [column, lists[`${column}s`]?.[value] ?? value]));
    return found.filter((table) => table.rows.length && isObject(table.rows[0])).map((t) => ({ ...t, rows: t.rows.map(named) }));
  }

  function element(name, properties = {}, ...children) {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
  }

  const asText = (value) => (isObject(value) ? JSON.stringify(value) : String(value ?? ""));
  const csvCell = (value) => (/[",\r\n]/.test(asText(value)) ? `"${asText(value).replaceAll('"', '""')}"` : asText(value));

  function dataTable({ name, rows }, id) {
    const columns = Object.keys(rows[0]);
    const csv = [columns, ...rows.map((row) => columns.map((column) => row[column]))].map((row) => row.map(csvCell).join(",")).join("\n");
    const address = URL.createObjectURL(new Blob([csv + "\n"], { type: "text/csv" }));
    const download = element("a", { href: address, download: `${id}-${name}.csv` }, `Download all ${rows.length} rows as CSV`);
    const shown = rows.slice(0, ROWS_SHOWN);
    const count = shown.length < rows.length ? `The first ${shown.length} of ${rows.length} rows. ` : `${rows.length} rows. `;
    const head = element("tr", {}, ...columns.map((column) => element("th", { scope: "col" }, column)));
    const body = shown.map((row) => element("tr", {}, ...columns.map((column) => element("td", {}, asText(row[column])))));
    const box = element("div", { className: "chart-table", tabIndex: 0 },
      element("table", { className: "table" }, element("thead", {}, head), element("tbody", {}, ...body)));
    box.setAttribute("role", "region");
    box.setAttribute("aria-label", `Table of ${name}`);
    return [element("p", {}, count, download), box];
  }

  function prepare(figure) {
    const source = parse(figure.querySelector("script").textContent);
    const still = figure.querySelector("img");
    const bound = element("div", { className: "chart-controls" });
    const picture = element("div", { className: "chart-live" });
    const box = element("div", { className: "chart-view", hidden: true }, picture);
    picture.setAttribute("role", "img");
    picture.setAttribute("aria-label", still.alt);
    const data = element("details", { className: "chart-data" }, element("summary", {}, "Data of this chart"));
    data.addEventListener("toggle", () => {
      if (!data.open || data.children.length > 1) return;
      const found = tables(source);
      data.append(...(found.length ? found.flatMap((table) => dataTable(table, figure.id)) : ["This chart holds no table."]));
    });
    figure.append(bound, box, data);

    let result, drawn, queue = Promise.resolve();
    async function draw() {
      const wanted = `${theme()} ${figure.clientWidth}`;
      if (wanted === drawn || !figure.clientWidth) return;
      await vega();
      const names = controls(source);
      const state = result ? names.map((name) => [name, result.view.signal(name)]) : [];
      result?.finalize();
      bound.replaceChildren();
      box.hidden = false;
      const options = { actions: false, ast: true, bind: bound, mode: "vega-lite", renderer: "svg", tooltip: { theme: theme() } };
      result = await window.vegaEmbed(picture, fitted(source), options);
      if (box.scrollWidth > box.clientWidth + 1 && shrinks(source)) {
        result.finalize();
        bound.replaceChildren();
        result = await window.vegaEmbed(picture, fitted(source, box.clientWidth), options);
      }
      for (const [name, value] of state) result.view.signal(name, value);
      await result.view.runAsync();
      drawn = wanted;
      figure.classList.add("drawn");
      figure.dataset.theme = theme();
      if (box.scrollWidth > box.clientWidth + 1) box.tabIndex = 0;
      else box.removeAttribute("tabindex");
    }
    figure.redraw = () => (queue = queue.then(draw).catch((error) => console.error(`${figure.id}: ${error.message}`)));
  }

  const seen = new Set();
  const watcher = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (!isIntersecting) continue;
      seen.add(target);
      target.redraw(); // does nothing if it is drawn as the page wants it now
    }
  }, { rootMargin: "300px" });
  const redrawAll = () => seen.forEach((figure) => figure.redraw());
  let pause;
  window.addEventListener("resize", () => { clearTimeout(pause); pause = setTimeout(redrawAll, 150); });
  new MutationObserver(redrawAll).observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
  for (const figure of document.querySelectorAll("figure.chart")) {
    prepare(figure);
    watcher.observe(figure);
  }
})();
