// A list of any length, of which only the visible rows are in the page. Arrow keys select, and so do j and k.
import { h } from "./dom.js";

const ROW = 28;
const SPARE = 8;

/**
 * Return `{element, update(count), select(index)}`. `drawRow(index)` returns the content of a row.
 *
 * @param {string} label
 * @param {(index: number) => any} drawRow
 * @param {(index: number) => void} onSelect
 */
export function virtualList(label, drawRow, onSelect) {
  const space = h("div", { class: "space" });
  const element = h("div", { class: "virtual", role: "listbox", tabindex: 0, "aria-label": label }, space);
  const id = `list-${Math.random().toString(36).slice(2)}`;
  let count = 0;
  let selected = -1;

  function draw() {
    const first = Math.max(0, Math.floor(element.scrollTop / ROW) - SPARE);
    const last = Math.min(count, Math.ceil((element.scrollTop + element.clientHeight) / ROW) + SPARE);
    space.style.height = `${count * ROW}px`;
    const rows = [];
    for (let index = first; index < last; index++) {
      rows.push(h("div", {
        class: "row",
        role: "option",
        id: `${id}-${index}`,
        "aria-selected": String(index === selected),
        "aria-setsize": count,
        "aria-posinset": index + 1,
        "--row": `${index * ROW}px`,
        onclick: () => select(index),
      }, drawRow(index)));
    }
    space.replaceChildren(...rows);
    if (selected >= first && selected < last) element.setAttribute("aria-activedescendant", `${id}-${selected}`);
    else element.removeAttribute("aria-activedescendant");
  }

  /** @param {number} index */
  function select(index, isQuiet = false) {
    if (!count) return;
    selected = Math.min(count - 1, Math.max(0, index));
    const top = selected * ROW;
    if (top < element.scrollTop) element.scrollTop = top;
    if (top + ROW > element.scrollTop + element.clientHeight) element.scrollTop = top + ROW - element.clientHeight;
    draw();
    if (!isQuiet) onSelect(selected);
  }

  element.addEventListener("scroll", draw, { passive: true });
  element.addEventListener("keydown", (event) => {
    const page = Math.floor(element.clientHeight / ROW);
    /** @type {Record<string, number>} */
    const steps = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1, PageDown: page, PageUp: -page, Home: -count, End: count };
    if (!(event.key in steps) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    select(selected + steps[event.key]);
  });
  new ResizeObserver(draw).observe(element);
  return {
    element,
    select,
    update(/** @type {number} */ length) {
      const wasAtEnd = element.scrollTop + element.clientHeight >= count * ROW - ROW;
      const grew = length > count && count > 0;
      count = length;
      if (selected >= count) selected = -1;
      draw();
      if (grew && wasAtEnd) element.scrollTop = count * ROW;
    },
  };
}
