// A plan as a picture: steps from left to right, each behind those that it waits for, with their status.
import { s } from "./dom.js";
import { t } from "./i18n.js";

const STEP = { width: 148, height: 40, across: 44, down: 14, chars: 19 };
// With more steps, the list below says more.
const MAX_STEPS = 60;

/** Draw steps `{id, name, after, join, status}`; return null if there is nothing to see. */
export function drawPlanGraph(steps) {
  if (steps.length < 2 || steps.length > MAX_STEPS || !steps.some((step) => step.after.length)) return null;
  const places = placeSteps(steps);
  const columns = Math.max(...[...places.values()].map((place) => place.column)) + 1;
  const rows = Math.max(...[...places.values()].map((place) => place.row)) + 1;
  const width = columns * (STEP.width + STEP.across) - STEP.across + 4;
  const height = rows * (STEP.height + STEP.down) - STEP.down + 4;
  const arrows = steps.flatMap((step) =>
    step.after.filter((id) => places.has(id)).map((id) => drawArrow(places.get(id), places.get(step.id), step)));
  const label = t("The steps of the plan, and what each waits for.");
  return s("svg", { class: "plan-graph", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label },
    s("defs", {},
      s("marker", { id: "plan-head", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" },
        s("path", { d: "M0 .5L8 4L0 7.5z" }))),
    arrows, steps.map((step) => drawStep(places.get(step.id), step)));
}

/** A step stands one column behind the last of those that it waits for. */
function placeSteps(steps) {
  const places = new Map();
  const taken = [];
  for (const step of steps) {
    const before = step.after.map((id) => places.get(id)?.column ?? -1);
    const column = Math.max(-1, ...before) + 1;
    const row = taken[column] ?? 0;
    taken[column] = row + 1;
    places.set(step.id, { column, row, x: 2 + column * (STEP.width + STEP.across), y: 2 + row * (STEP.height + STEP.down) });
  }
  return places;
}

function drawArrow(from, to, step) {
  const [x1, y1] = [from.x + STEP.width, from.y + STEP.height / 2];
  const [x2, y2] = [to.x - 2, to.y + STEP.height / 2];
  const half = STEP.across / 2;
  return s("path", { class: `arrow ${step.join ?? ""}`, d: `M${x1} ${y1}C${x1 + half} ${y1} ${x2 - half} ${y2} ${x2} ${y2}`, "marker-end": "url(#plan-head)" });
}

function drawStep(place, step) {
  const short = step.name.length > STEP.chars ? `${step.name.slice(0, STEP.chars - 1)}…` : step.name;
  return s("g", { class: `step ${step.status}`, "data-step": step.id },
    s("title", {}, step.name),
    s("rect", { x: place.x, y: place.y, width: STEP.width, height: STEP.height, rx: 8 }),
    s("text", { x: place.x + STEP.width / 2, y: place.y + 17 }, short),
    s("text", { x: place.x + STEP.width / 2, y: place.y + 32, class: "status" }, t(`call ${step.status}`)));
}
