// A chart of stacked bars, one for each hour or day, as wide as its place.
import { h, s } from "./dom.js";

// Units of the drawing: a bar's share of its step, and the height of the highest one.
const STEP = 100;
const BAR = 76;
const HEIGHT = 1000;
// Labels below the bars, at most.
const LABELS = 8;

/**
 * Draw bars; null if they are all empty.
 *
 * @param {string} label what they show, in a sentence
 * @param {{name: string, title: string, parts: {kind: string, value: number}[]}[]} bars
 * @param {(value: number) => string} format writes the highest value
 */
export function drawBars(label, bars, format) {
  const most = Math.max(0, ...bars.map((bar) => bar.parts.reduce((total, part) => total + part.value, 0)));
  if (most === 0) return null;
  const every = Math.ceil(bars.length / LABELS);
  const drawn = bars.map((bar, index) => {
    let top = HEIGHT;
    return s("g", {}, s("title", {}, bar.title), bar.parts.filter((part) => part.value > 0).map(({ kind, value }) => {
      const height = (value / most) * HEIGHT;
      top -= height;
      return s("rect", { class: kind, x: index * STEP + (STEP - BAR) / 2, y: top, width: BAR, height: Math.max(height, HEIGHT / 100) });
    }));
  });
  return h("div", { class: "bars" },
    h("small", { class: "soft" }, format(most)),
    s("svg", { class: "bars", viewBox: `0 0 ${bars.length * STEP} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label }, drawn),
    h("div", { class: "axis", "aria-hidden": "true" }, bars.map((bar, index) => index % every === 0 && h("span", { "--at": String((index + 0.5) / bars.length) }, bar.name))));
}
