"use strict";
/* What the live page's scripts share: elements made of text that stays text, numbers as words. */

const Draw = (() => {
  function element(tag, properties = {}, ...children) {
    const node = Object.assign(document.createElement(tag), properties);
    node.append(...children);
    return node;
  }

  const cell = (...content) => element("td", {}, ...content);
  const option = (value, text, selected = false) => element("option", { value, selected }, text);

  function drawing(tag, attributes = {}, ...children) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }

  /** A token as an element that keeps its writing direction to itself. */
  function token(text) {
    return element("bdi", { className: /^<.*>$/.test(text) ? "live-special" : "" }, text);
  }

  function percent(p) {
    return p > 0.9995 ? "100 %" : p < 0.001 ? "< 0.1 %" : `${(100 * p).toFixed(1)} %`;
  }

  const number = (x, digits = 3) => x.toFixed(digits).replace("-", "−");

  return { element, cell, option, drawing, token, percent, number };
})();
