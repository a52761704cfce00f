"use strict";
// What scrolls sideways inside the page can be reached by keyboard.
const boxes = ".highlight pre, .output pre, div.math, .pst-scrollable-table-container, .chart-view, mjx-container";
function markScrollable() {
  for (const box of document.querySelectorAll(boxes)) {
    if (box.scrollWidth > box.clientWidth + 1) box.tabIndex = 0;
    else if (box.localName !== "mjx-container") box.removeAttribute("tabindex");
  }
}
window.addEventListener("load", markScrollable);
window.addEventListener("resize", markScrollable);

// Nothing is folded away on paper, except listings of tests and tables of data.
let opened = [];
window.addEventListener("beforeprint", () => {
  opened = [...document.querySelectorAll("details:not([open]):not(.listing):not(.chart-data)")];
  for (const details of opened) details.open = true;
});
window.addEventListener("afterprint", () => {
  for (const details of opened) details.open = false;
});
