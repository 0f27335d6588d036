// Single keys, the same on all pages: search, move through rows, approve, help. None of them works while a text is written.
import { h } from "./dom.js";
import { t } from "./i18n.js";
import { openDialog } from "./parts.js";

const OFF = "agentfsm.keys";
const ROWS = "main tbody tr, main .decision, main .firing, main [data-schedule], main .virtual";
const FIELDS = "textarea, select, [contenteditable], input:not([type=checkbox], [type=radio], [type=range])";

/** The keys in the order of the help, with what they do. */
export const KEYS = new Map([
  ["/", "Go to the search box"],
  ["j", "Next row, or next event in their list"],
  ["k", "Row before"],
  ["Enter", "Open the row"],
  ["a", "Approve the chosen call, after a question"],
  ["Esc", "Leave a field, or close a dialog"],
  ["?", "Show these keys"],
]);

/**
 * Return what a key does: a key of `KEYS`, or null where it belongs to a field, a dialog, or another shortcut.
 *
 * @param {Pick<KeyboardEvent, "key" | "ctrlKey" | "metaKey" | "altKey" | "isComposing" | "defaultPrevented" | "target">} event
 */
export function readKey({ key, ctrlKey, metaKey, altKey, isComposing, defaultPrevented, target }) {
  if (ctrlKey || metaKey || altKey || isComposing || defaultPrevented) return null;
  const element = /** @type {Element | null} */ (target);
  if (element?.closest("dialog")) return null;
  const isField = element?.matches(FIELDS) ?? false;
  if (key === "Escape") return isField ? "Esc" : null;
  if (isField || !KEYS.has(key)) return null;
  return key === "Enter" && !element?.matches(ROWS) ? null : key; // of a link or a button, Enter is its own
}

/**
 * Return the row a step away from the one that has the focus: the first or the last one if none has it, and null at an end.
 *
 * @template {Element} T
 * @param {T[]} rows
 * @param {Element | null} focused
 * @param {1 | -1} step
 * @returns {T | null}
 */
export function nextRow(rows, focused, step) {
  const at = rows.findIndex((row) => row === focused || row.contains(focused));
  if (at === -1) return rows.at(step === 1 ? 0 : -1) ?? null;
  return rows[at + step] ?? null;
}

/** Let the keys work on all pages. */
export function useKeys() {
  document.addEventListener("keydown", (event) => {
    const key = readKey(event);
    if (key === null || (key !== "Esc" && localStorage.getItem(OFF)) || document.querySelector("dialog[open]")) return;
    if (act(key)) event.preventDefault();
  });
}

/**
 * Do what a key does. Return whether there was something to do.
 *
 * @param {string} key
 */
function act(key) {
  const focused = document.activeElement;
  if (key === "?") return showKeys();
  if (key === "/") return focus(document.querySelector("main input[type=search]"));
  if (key === "a") return approve(focused);
  if (key === "Enter") return open(focused);
  if (key === "Esc") return focused instanceof HTMLElement && (focused.blur(), true);
  const rows = /** @type {HTMLElement[]} */ ([...document.querySelectorAll(ROWS)]).filter((row) => row.checkVisibility());
  return choose(nextRow(rows, focused, key === "j" ? 1 : -1));
}

/** @param {HTMLElement | null} element */
function focus(element) {
  element?.focus();
  return element !== null;
}

/**
 * Give a row the focus: its link if it has one, which a redrawn row keeps.
 *
 * @param {HTMLElement | null} row
 */
function choose(row) {
  const link = row?.matches("tr") ? row.querySelector("a") : null;
  if (row && !link && !row.hasAttribute("tabindex")) row.tabIndex = -1;
  return focus(link ?? row);
}

/** @param {Element | null} row */
function open(row) {
  const link = row?.querySelector("a") ?? row?.closest("[data-run]")?.querySelector("a");
  link?.click();
  return Boolean(link);
}

/**
 * Ask for the approval of the card that has the focus, or of the only one; else go to the first.
 *
 * @param {Element | null} focused
 */
function approve(focused) {
  const cards = /** @type {HTMLElement[]} */ ([...document.querySelectorAll("main .decision:has(.approves)")]);
  const chosen = cards.find((card) => card.contains(focused)) ?? (cards.length === 1 ? cards[0] : null);
  if (!chosen) return choose(cards[0] ?? null);
  return chosen.querySelector(".approves")?.dispatchEvent(new Event("approve")) ?? false;
}

/** Show the keys, with a switch: who dictates, or has keys of their own, turns them off. */
export function showKeys() {
  const isOn = h("input", { type: "checkbox", checked: !localStorage.getItem(OFF), onchange: () => {
    if (isOn.checked) localStorage.removeItem(OFF);
    else localStorage.setItem(OFF, "off");
  } });
  openDialog(t("Keyboard"), h("div", {},
    h("dl", { class: "keys" }, [...KEYS].map(([key, text]) => h("div", {}, h("dt", {}, h("kbd", {}, key)), h("dd", {}, t(text))))),
    h("label", { class: "check" }, isOn, t("Single keys are on"))));
  return true;
}
