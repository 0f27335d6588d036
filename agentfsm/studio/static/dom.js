// Build elements. Text from outside only becomes text nodes, in which hidden characters are visible.

// Controls, zero-width and bidirectional characters, fillers, tags: as in agentfsm/core/text_safety.py.
const HIDDEN = /[\0-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff\u{1bca0}-\u{1bca3}\u{1d173}-\u{1d17a}\u{e0000}-\u{e0fff}]/u;
// Hidden characters that are part of a visible one: joined and coloured emoji, joiners of Arabic and Indian letters, CR LF.
const LEGITIMATE = /\r(?=\n)|(?<=\p{Emoji}|\ufe0f)\u200d(?=\p{Emoji})|(?<=\p{Emoji})[\ufe0e\ufe0f]|(?<=[\u0600-\u0dff])[\u200c\u200d](?=[\u0600-\u0dff])/gu;

/**
 * @param {string} text
 * @returns {{text: string, isHidden?: boolean}[]}
 */
function hiddenParts(text) {
  if (!HIDDEN.test(text)) return [{ text }];
  const kept = new Set(Array.from(text.matchAll(LEGITIMATE), (found) => found.index));
  /** @type {{text: string, isHidden?: boolean}[]} */
  const parts = [];
  let index = 0;
  for (const char of text) {
    const isHidden = HIDDEN.test(char) && !kept.has(index);
    index += char.length;
    const last = parts.at(-1);
    if (isHidden) parts.push({ text: `U+${Number(char.codePointAt(0)).toString(16).toUpperCase().padStart(4, "0")}`, isHidden });
    else if (last && !last.isHidden) last.text += char;
    else parts.push({ text: char });
  }
  return parts;
}

/**
 * Return a text with each hidden character as ⟨U+202E⟩, for places that take no elements.
 *
 * @param {any} text
 */
export function escapeHidden(text) {
  return hiddenParts(String(text)).map((part) => (part.isHidden ? `⟨${part.text}⟩` : part.text)).join("");
}

/**
 * Add content to an element: texts, elements, and lists of both.
 *
 * @template {Element} T
 * @param {T} element
 * @param {any[]} children
 * @returns {T}
 */
export function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    if (child instanceof Node) element.append(child);
    else if (element instanceof SVGElement) element.append(escapeHidden(child));
    else {
      for (const part of hiddenParts(String(child))) {
        element.append(part.isHidden ? h("span", { class: "hidden-char", title: part.text }, part.text) : part.text);
      }
    }
  }
  return element;
}

/**
 * @param {any} element
 * @param {Record<string, any> | null | undefined} attributes
 */
function setAll(element, attributes) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) element.style.setProperty(name, value);
    else if (name === "value" || name === "checked" || name === "indeterminate") element[name] = value;
    else element.setAttribute(name, value === true ? "" : escapeHidden(value));
  }
  return element;
}

/**
 * Build an HTML element: `h("a", { href, onclick }, "text", child)`. False and null children are left out.
 *
 * @template {keyof HTMLElementTagNameMap} T
 * @param {T} tag
 * @param {Record<string, any> | null} [attributes]
 * @param {...any} children
 * @returns {HTMLElementTagNameMap[T]}
 */
export function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  append(element, children); // before the value of a select
  return setAll(element, attributes);
}

/**
 * Build an SVG element.
 *
 * @param {string} tag
 * @param {Record<string, any> | null} [attributes]
 * @param {...any} children
 * @returns {SVGElement}
 */
export function s(tag, attributes, ...children) {
  return append(setAll(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes), children);
}

/**
 * Replace the content of an element. A link that has the focus keeps it, if the new content has the same one.
 *
 * @template {Element} T
 * @param {T} element
 * @param {...any} children
 * @returns {T}
 */
export function fill(element, ...children) {
  const focused = document.activeElement;
  const address = focused && element.contains(focused) && focused.getAttribute("href");
  element.replaceChildren();
  append(element, children);
  if (address) [...element.querySelectorAll("a")].find((link) => link.getAttribute("href") === address)?.focus({ preventScroll: true });
  return element;
}

/**
 * Return a function that calls `act` at most once in `ms`, the last time after the last call.
 *
 * @param {() => unknown} act
 * @param {number} ms
 */
export function throttle(act, ms) {
  /** @type {ReturnType<typeof setTimeout> | null} */
  let timer = null;
  let last = 0;
  const call = () => {
    timer = null;
    last = performance.now();
    act();
  };
  return () => {
    if (timer === null) timer = setTimeout(call, Math.max(0, ms - (performance.now() - last)));
  };
}

/**
 * Call `act` every `ms` while the page is visible and `element` is in it.
 *
 * @param {number} ms
 * @param {Element} element
 * @param {() => unknown} act
 */
export function every(ms, element, act) {
  const tick = async () => {
    if (!element.isConnected) return;
    if (!document.hidden) await act();
    setTimeout(tick, ms);
  };
  setTimeout(tick, ms);
}
