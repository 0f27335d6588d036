// A list of any length, of which only the visible rows are in the page. Arrow keys select, and so do j and k.
import { h } from "./dom.js";

const ROW = 28;
const SPARE = 8;

/**
 * @typedef {object} Rows
 * @property {string} [role] of the list
 * @property {string} [rowRole]
 * @property {(index: number) => Record<string, any>} [describe] returns further attributes of a row
 * @property {(first: number, end: number) => void} [onView] is told the rows in view before they are drawn
 * @property {(event: KeyboardEvent, selected: number) => boolean} [onKey] returns whether it has dealt with a key
 */

/**
 * Return `{element, update(count), select(index)}`. `drawRow(index)` returns the content of a row.
 *
 * @param {string} label
 * @param {(index: number) => any} drawRow
 * @param {(index: number) => void} onSelect
 * @param {Rows} [options]
 */
export function virtualList(label, drawRow, onSelect, { role = "listbox", rowRole = "option", describe = () => ({}), onView, onKey = () => false } = {}) {
  const space = h("div", { class: "space" });
  const element = h("div", { class: "virtual", role, tabindex: 0, "aria-label": label }, space);
  const id = `list-${Math.random().toString(36).slice(2)}`;
  let count = 0;
  let selected = -1;

  function draw() {
    const [top, bottom] = [element.scrollTop / ROW, (element.scrollTop + element.clientHeight) / ROW];
    const first = Math.max(0, Math.floor(top) - SPARE);
    const last = Math.min(count, Math.ceil(bottom) + SPARE);
    onView?.(Math.round(top), Math.min(count, Math.round(bottom)));
    space.style.height = `${count * ROW}px`;
    const rows = [];
    for (let index = first; index < last; index++) {
      rows.push(h("div", {
        class: "row",
        role: rowRole,
        id: `${id}-${index}`,
        "aria-selected": String(index === selected),
        "aria-setsize": count,
        "aria-posinset": index + 1,
        "--row": `${index * ROW}px`,
        onclick: () => select(index),
        ...describe(index),
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
    const isKnown = event.key in steps;
    if (event.ctrlKey || event.metaKey || event.altKey || (!isKnown && !onKey(event, selected))) return;
    event.preventDefault();
    if (isKnown) select(selected + steps[event.key]);
  });
  new ResizeObserver(draw).observe(element);
  return {
    element,
    select,
    /**
     * Draw a number of rows. The selected row is the same one, unless another is named; new rows at the end are
     * scrolled to where the end was in view.
     *
     * @param {number} length
     * @param {{chosen?: number, follows?: boolean}} [options]
     */
    update(length, { chosen = selected, follows = true } = {}) {
      const wasAtEnd = element.scrollTop + element.clientHeight >= count * ROW - ROW;
      const grew = length > count && count > 0;
      count = length;
      selected = chosen < count ? chosen : -1;
      draw();
      if (follows && grew && wasAtEnd) element.scrollTop = count * ROW;
    },
  };
}
