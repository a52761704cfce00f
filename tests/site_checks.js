// What tests/test_site.py asks of a page of the built site, and what it does to it.
"use strict";
const all = selector => [...document.querySelectorAll(selector)];
const overflows = (box, ...kinds) => kinds.includes(getComputedStyle(box).overflowX);

window.checks = {
  unfold() {
    all("details:not(.listing)").forEach(details => { details.open = true; });
  },

  // What fades or moves arrives at once, so that colours are looked at as they stay.
  finish() {
    document.getAnimations().forEach(animation => animation.finish());
  },

  handlers() {
    return all("*").flatMap(
      element => element.getAttributeNames().filter(name => name.startsWith("on")));
  },

  // What scrolls, and no key reaches it. The page's scripts mark such boxes when it is loaded,
  // resized or changed. This asks what they did when it was loaded; axe looks when the test has
  // changed the page, which they may have answered.
  unreached() {
    const rolls = overflow => ["auto", "scroll"].includes(overflow);
    const scrolls = box => {
      const style = getComputedStyle(box);
      return box.scrollWidth - box.clientWidth > 13 && rolls(style.overflowX)
        || box.scrollHeight - box.clientHeight > 13 && rolls(style.overflowY);
    };
    const keys = 'a[href], button, input, select, textarea, summary, [tabindex="0"]';
    return all("body *").filter(
      box => box.tabIndex < 0 && scrolls(box) && !box.querySelector(keys)
    ).map(box => box.outerHTML.slice(0, 200));
  },

  // What is wider than its column, by more than rounding.
  wide() {
    return all(".cell_input pre, .cell_output pre, .pst-scrollable-table-container, div.math")
      .filter(box => box.scrollWidth > box.clientWidth + 1).map(box => box.innerText.slice(0, 100));
  },

  // What is cut off: wider than a box around it that does not scroll, or than the window, and in
  // no box that scrolls.
  cut() {
    return all("article :is(pre, table, img, svg, mjx-container, figure)").filter(box => {
      const right = box.getBoundingClientRect().right;
      for (let around = box.parentElement; around; around = around.parentElement) {
        if (overflows(around, "auto", "scroll")) return false;
        if (overflows(around, "hidden", "clip")
            && right > around.getBoundingClientRect().right + 1) return true;
      }
      return right > innerWidth + 1;
    }).map(box => box.outerHTML.slice(0, 150));
  },

  sideways() {
    return Math.max(document.documentElement.scrollWidth, document.body.scrollWidth) > innerWidth;
  },

  // While axe looks, what repeats itself is thinned out, which saves minutes: of the many spans of
  // highlighted code one of each class stays, of a table's rows that hold nothing but text one of
  // each look, and of the formulas the first two. Copies are thinned, and stand in for the rest.
  thin() {
    const formulas = all("mjx-container").slice(2).filter(own => !own.closest("tbody"));
    const repeated = [...all(".highlight pre, tbody"), ...formulas];
    window.thinned = repeated.map(own => [own, own.cloneNode(own.localName !== "mjx-container")]);
    const spans = new Set();
    for (const [own, copy] of window.thinned) {
      for (const span of own.localName === "pre" ? copy.querySelectorAll("span") : []) {
        if (spans.has(span.className)) span.replaceWith(...span.childNodes);
        spans.add(span.className);
      }
      const looks = new Set();
      [...copy.rows ?? []].forEach((row, i) => {
        const parts = [row, ...row.cells].map(
          part => [part.localName, part.className, part.style.cssText]);
        const look = JSON.stringify([i % 2, ...parts]);
        if (looks.has(look) && [...row.cells].every(cell => !cell.childElementCount)) row.remove();
        looks.add(look);
      });
      own.replaceWith(copy);
    }
  },

  restore() {
    window.thinned.forEach(([own, copy]) => copy.replaceWith(own));
  },

  // A chart says which theme it is drawn for when it stands; asked again, once it is drawn anew.
  askCharts() {
    all("figure.chart").forEach(figure => { delete figure.dataset.theme; });
  },

  drawn(theme) {
    return all("figure.chart").every(figure => figure.dataset.theme === theme);
  },

  // What axe finds; with rules by these only; what is in `beside` is left out.
  async axe([beside, rules]) {
    const options = { resultTypes: ["violations"], ...(rules.length ? { runOnly: rules } : {}) };
    const { violations } = await axe.run({ exclude: beside }, options);
    return violations.map(({ id, help, nodes }) =>
      `${id}: ${help}; ${nodes.length} places, such as ${nodes[0].html.slice(0, 200)}`);
  },
};
