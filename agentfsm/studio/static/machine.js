// The machine as a picture: its six states, the present one lit, and how often each arrow was taken.
import { h, s } from "./dom.js";
import { t } from "./i18n.js";

const BOX = { width: 108, height: 36 };
const PLACES = {
  observe: [8, 46],
  think: [166, 46],
  act: [324, 46],
  reflect: [482, 46],
  done: [660, 14],
  error: [660, 78],
};
// How each arrow runs, and where its number stands. Arrows that the table gains are drawn straight.
const ROUTES = {
  "observe>think": ["M116 64H164", 140, 58],
  "think>act": ["M274 64H322", 298, 58],
  "act>reflect": ["M432 64H480", 456, 58],
  "think>reflect": ["M240 46C290 24 440 24 498 44", 366, 27],
  "think>done": ["M212 46C260 0 560 -4 658 26", 600, 12],
  "reflect>observe": ["M536 46C510 -14 96 -14 62 44", 112, 27],
  "reflect>done": ["M590 58L658 36", 616, 44],
  "reflect>error": ["M590 70L658 92", 616, 88],
  "act>think": ["M352 82C334 102 270 102 250 84", 301, 107],
  "reflect>think": ["M506 82C470 118 270 118 232 84", 376, 119],
  "act>error": ["M404 82C440 116 580 112 658 98", 560, 101],
  "think>error": ["M214 82C240 136 560 134 658 106", 470, 131],
  "observe>error": ["M60 82C110 154 590 146 690 116", 330, 145],
};

function arrowsOf(table) {
  return Object.entries(table).flatMap(([from, row]) => [...new Set(Object.values(row))].map((to) => ({ from, to })));
}

function straight(from, to) {
  const [[x1, y1], [x2, y2]] = [PLACES[from], PLACES[to]];
  return [`M${x1 + BOX.width / 2} ${y1 + BOX.height}L${x2 + BOX.width / 2} ${y2}`, (x1 + x2) / 2 + 54, (y1 + y2) / 2];
}

/**
 * Draw the table; with a view of a run, also its path and its state.
 *
 * @param {Record<string, Record<string, string>>} table
 * @param {{path: Map<string, number>, state: string} | null} [view]
 */
export function drawMachine(table, view = null) {
  const path = view?.path ?? new Map();
  const taken = (arrow) => path.get(`${arrow.from}>${arrow.to}`) ?? 0;
  const arrows = arrowsOf(table).filter((each) => each.from !== each.to);
  const label = view
    ? t("The run is in {state}.", { state: view.state.toUpperCase() })
    : t("The six states and their transitions.");
  const marker = (id) =>
    s("marker", { id, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" },
      s("path", { d: "M0 .5L8 4L0 7.5z" }));
  const drawn = [...arrows].sort((one, other) => taken(one) - taken(other)).map((each) => {
    const [d, x, y] = ROUTES[`${each.from}>${each.to}`] ?? straight(each.from, each.to);
    const times = taken(each);
    return s("g", { class: `arrow ${times ? "taken" : ""}`, "data-arrow": `${each.from}>${each.to}`, "data-times": times },
      s("path", { d, "marker-end": `url(#${times ? "head-taken" : "head"})` }),
      times > 1 && s("text", { x, y, class: "times" }, `×${times}`));
  });
  const boxes = Object.entries(PLACES).map(([state, [x, y]]) => {
    const own = path.get(`${state}>${state}`) ?? 0;
    const isVisited = state === "observe" || arrows.some((each) => each.to === state && taken(each));
    const kind = [view?.state === state && "present", view && isVisited && "visited"].filter(Boolean).join(" ");
    return s("g", { class: `state ${state} ${kind}`, "data-state": state },
      s("rect", { x, y, width: BOX.width, height: BOX.height, rx: 9 }),
      s("text", { x: x + BOX.width / 2, y: y + 22.5 }, state.toUpperCase()),
      own > 0 && s("text", { x: x + BOX.width - 7, y: y + 12, class: "own" }, `↻${own}`));
  });
  return h("div", { class: "scroll-x" },
    s("svg", { class: "machine", viewBox: "0 0 776 148", role: "img", "aria-label": label },
      s("defs", {}, marker("head"), marker("head-taken")), drawn, boxes));
}
