"use strict";
// What scrolls sideways inside the page can be reached by keyboard.
const boxes = ".highlight pre, .output pre, div.math, .pst-scrollable-table-container, .chart-view, mjx-container";
function markScrollable() {
  for (const box of document.querySelectorAll(boxes)) {
    if (box.scrollWidth > box.clientWidth + 1) box.tabIndex = 0;
    else if (box.localName !== "mjx-container") box.removeAttribute("tabindex");
  }
}
window.addEventListener("load", () => {
  markScrollable();
  const article = document.querySelector("article");
  if (article) new ResizeObserver(markScrollable).observe(article);  // its width follows the window's late: the sidebar slides
});
window.addEventListener("resize", markScrollable);

// Paper is light, and nothing is folded away on it, except listings of tests and tables of data.
let opened = [], theme;
window.addEventListener("beforeprint", () => {
  theme = document.documentElement.dataset.theme;
  document.documentElement.dataset.theme = "light";
  opened = [...document.querySelectorAll("details:not([open]):not(.listing):not(.chart-data)")];
  for (const details of opened) details.open = true;
});
window.addEventListener("afterprint", () => {
  document.documentElement.dataset.theme = theme;
  for (const details of opened) details.open = false;
});
