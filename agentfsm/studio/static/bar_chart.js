// A chart of stacked bars, one for each hour or day.
import { s } from "./dom.js";

const SIZE = { width: 720, height: 150, top: 14, bottom: 20, left: 4, right: 4 };
// Labels below the bars, at most.
const LABELS = 8;

/** Draw bars `{name, title, parts: [{kind, value}]}`; `label` says in a sentence what they show, `format` writes the most. */
export function drawBars(label, bars, format) {
  const sum = (bar) => bar.parts.reduce((total, part) => total + part.value, 0);
  const most = Math.max(...bars.map(sum));
  const room = SIZE.height - SIZE.top - SIZE.bottom;
  const step = (SIZE.width - SIZE.left - SIZE.right) / bars.length;
  const every = Math.ceil(bars.length / LABELS);
  const drawBar = (bar, index) => {
    let top = SIZE.top + room;
    const x = SIZE.left + index * step;
    const stack = bar.parts.filter((part) => part.value > 0).map(({ kind, value }) => {
      const height = (value / most) * room;
      top -= height;
      return s("rect", { class: kind, x: x + step * 0.12, y: top, width: step * 0.76, height: Math.max(height, 1) });
    });
    return s("g", {}, s("title", {}, bar.title), stack,
      index % every === 0 && s("text", { x: x + step * 0.12, y: SIZE.height - 5 }, bar.name));
  };
  return s("svg", { class: "bars", viewBox: `0 0 ${SIZE.width} ${SIZE.height}`, role: "img", "aria-label": label },
    s("line", { x1: SIZE.left, x2: SIZE.width - SIZE.right, y1: SIZE.top + room, y2: SIZE.top + room }),
    most > 0 && s("text", { x: SIZE.left, y: 10 }, format(most)),
    most > 0 && bars.map(drawBar));
}
