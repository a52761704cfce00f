"use strict";
// Draws the interactive charts of a page when they come into view, from the specification that stands in the page. Vega is fetched once,
// from beside this file, and interprets its expressions, so that the pages can forbid eval.
(() => {
  const here = document.currentScript.src;

  let library;
  function vega() {
    library ??= new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = new URL("vega.js", here);
      script.onload = resolve;
      script.onerror = () => {
        library = undefined; // to be tried again
        reject(new Error("vega.js did not load"));
      };
      document.head.append(script);
    });
    return library;
  }

  const theme = () => (document.documentElement.dataset.theme === "dark" ? "dark" : "light");
  const isObject = (value) => value !== null && typeof value === "object";

  function* inside(part) {
    if (!isObject(part)) return;
    yield part;
    for (const value of Object.values(part)) yield* inside(value);
  }

  // Whether a chart is a single view, which can shrink. What is put together scrolls in its box.
  function shrinks(spec) {
    const together = ["hconcat", "vconcat", "concat", "facet", "repeat"].some((name) => name in spec);
    return !together && !["row", "column", "facet"].some((name) => name in (spec.encoding ?? {}));
  }

  // The chart for the page's theme, and `width` wide if that is given. The book's charts follow their signal `dark`.
  function fitted(source, width) {
    const spec = structuredClone(source);
    for (const param of spec.params ?? []) if (param.name === "dark") param.value = theme() === "dark";
    spec.config = { ...spec.config, aria: false }; // the box says what the picture shows, and the table says the rest
    delete spec.$schema; // it names the Vega-Lite of the notebooks; this one is newer and reads it too
    if (width) Object.assign(spec, { width, autosize: { type: "fit-x", contains: "padding" } });
    return spec;
  }

  const controls = (spec) => [...inside(spec)].filter((part) => part.bind?.input).map((part) => part.name);

  function element(name, properties = {}, ...children) {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
  }

  function prepare(figure) {
    const source = JSON.parse(figure.querySelector("script").textContent);
    const bound = element("div", { className: "chart-controls" });
    const picture = element("div", { className: "chart-live" });
    const box = element("div", { className: "chart-view", hidden: true }, picture);
    picture.setAttribute("role", "img");
    picture.setAttribute("aria-label", figure.querySelector("img").alt);
    figure.querySelector("script").after(bound, box);

    let result, drawn, queue = Promise.resolve();
    async function draw() {
      const wanted = `${theme()} ${figure.clientWidth}`;
      if (wanted === drawn || !figure.clientWidth) return;
      await vega();
      const names = controls(source);
      const state = result ? names.map((name) => [name, result.view.signal(name)]) : [];
      const inputs = () => [...bound.querySelectorAll("select, input")];
      const focused = inputs().indexOf(document.activeElement);
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
      if (focused >= 0) inputs()[focused]?.focus({ preventScroll: true });
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
