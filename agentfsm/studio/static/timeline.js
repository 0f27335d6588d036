// The timeline of a run: active time to the right, the model and its calls in lanes, waits folded to a fixed width.
import { h, s } from "./dom.js";
import { duration } from "./format.js";
import { t } from "./i18n.js";

const LEFT = 58;
const ROW = 22;
const BAR = 15;
const TOP = 30;
const FOLD = 46;
// Shorter waits are drawn to scale.
const FOLDED_S = 2;
// Turns that are shown at once.
export const PAGE = 12;
const CHAR = 6.3;

/** Map wall-clock times to places: the active part of each interval between two events is at its end. */
class Scale {
  constructor(events, from, to, now, width) {
    const points = events.slice(from, to).map((event) => ({ at: event.at, took: event.took_s ?? 0 }));
    if (now) points.push({ at: now, took: 0, isOpen: true });
    let previous = events[from - 1]?.at ?? points[0]?.at ?? 0;
    this.parts = points.map(({ at, took, isOpen }) => {
      const gap = Math.max(0, at - previous);
      const idle = Math.max(0, gap - took);
      const isFolded = idle > FOLDED_S && !isOpen;
      const part = { start: previous, end: at, idle: isFolded ? idle : 0, active: isFolded ? Math.min(took, gap) : gap };
      if (isOpen && idle > FOLDED_S) Object.assign(part, { idle, active: 0 });
      previous = at;
      return part;
    });
    const folds = this.parts.filter((part) => part.idle).length;
    const active = this.parts.reduce((sum, part) => sum + part.active, 0);
    this.unit = Math.max(40, width - LEFT - 12 - folds * FOLD) / (active || 1);
    let x = LEFT;
    for (const part of this.parts) {
      part.x = x;
      part.fold = part.idle ? FOLD : 0;
      x += part.fold + part.active * this.unit;
      part.right = x;
    }
    this.width = Math.max(width, x + 12);
  }

  place(at) {
    const part = this.parts.find((each) => at <= each.end) ?? this.parts.at(-1);
    if (!part) return LEFT;
    const back = Math.min(part.active, Math.max(0, part.end - at)) * this.unit;
    return at <= part.start ? part.x : part.right - back;
  }
}

function assignLanes(bars) {
  const ends = [];
  for (const bar of [...bars].sort((one, other) => one.x - other.x)) {
    let lane = ends.findIndex((end) => end <= bar.x + 0.5);
    if (lane < 0) lane = ends.length;
    ends[lane] = Math.max(bar.right, bar.x + 4);
    bar.lane = lane;
  }
  return ends.length;
}

function callBar(call, scale, end) {
  const result = call.result;
  const startedAt = [call.starts[0], result?.started_at].filter(Boolean).sort((a, b) => a - b)[0];
  const isOpen = call.status === "running";
  if (!startedAt) return null;
  const endedAt = result?.started_at ? result.started_at + (result.duration_s ?? 0) : (call.endedAt ?? call.cutOffAt ?? end);
  const x = scale.place(startedAt);
  const attempts = Math.max(call.attempts, result?.attempts ?? 1);
  const notes = [call.name, call.id, call.status, duration(Math.max(0, endedAt - startedAt))];
  const isEarly = startedAt < call.askedAt - 1e-4;
  if (attempts > 1) notes.push(t("{n} attempts", { n: attempts }));
  if (isEarly) notes.push(t("started while the model streamed"));
  return {
    x,
    right: Math.max(x + 4, scale.place(Math.max(endedAt, startedAt))),
    label: attempts > 1 ? `${call.name} ×${attempts}` : call.name,
    title: notes.join(" · "),
    kind: isOpen ? "running" : call.status,
    isEarly,
    asked: isEarly ? scale.place(call.askedAt) : null,
    version: call.version,
  };
}

function drawBar(bar, y, room, select) {
  const width = bar.right - bar.x;
  const fits = bar.label.length * CHAR < width - 8;
  const beside = !fits && bar.label.length * CHAR < room - 6;
  return s("g", { class: `bar ${bar.kind}`, "data-version": bar.version, onclick: () => select(bar.version) },
    s("title", {}, bar.title),
    s("rect", { x: bar.x, y, width, height: BAR, rx: 4 }),
    bar.isEarly && s("rect", { class: "early", x: bar.x - 2, y: y - 2, width: Math.max(4, bar.asked - bar.x + 2), height: BAR + 4, rx: 5 }),
    (fits || beside) && s("text", { x: fits ? bar.x + 6 : bar.right + 4, y: y + 11.5, class: fits ? "inside" : "beside" }, bar.label));
}

function drawLane(bars, y, scale, select) {
  const stops = [...bars.map((bar) => bar.x), ...scale.parts.filter((part) => part.fold).map((part) => part.x), scale.width];
  const roomAfter = (bar) => Math.min(...stops.filter((stop) => stop > bar.x + 0.5)) - bar.right;
  return bars.map((bar) => drawBar(bar, y, roomAfter(bar), select));
}

/** Draw some turns of a run. `select(version)` is called when a bar is clicked. */
export function drawTimeline(view, journal, { first, select, now, isWorking, width }) {
  const shown = view.turns.slice(first, first + PAGE);
  if (!shown.length && !isWorking) return h("p", { class: "empty" }, t("No turn is complete yet."));
  const from = first ? view.turns[first - 1].version : 0;
  const next = view.turns[first + PAGE];
  const to = next ? next.version - 1 : view.version;
  const events = journal.events.slice(0, to);
  const end = next || !now ? (events[to - 1]?.at ?? 0) : now;
  const scale = new Scale(events, from, to, next ? null : now, Math.max(640, width));
  const calls = [...view.calls.values()].filter((call) => call.version > from && call.version <= to);
  const bars = calls.map((call) => callBar(call, scale, end)).filter((each) => each !== null);
  const lanes = assignLanes(bars);
  const models = shown.map((turn) => {
    const before = journal.events[turn.version - 1];
    const right = scale.place(before.at);
    const x = scale.place(before.at - (before.took_s ?? 0));
    const { model, tier, answered_from: source } = turn.event;
    const name = source ? `${t("answer of")} ${source.run_id}` : [model || t("model"), tier?.name].filter(Boolean).join(" · ");
    const failed = turn.event.is === "ModelFaltered";
    return {
      x: Math.min(x, right - 4),
      right,
      label: name,
      title: [t("turn {n}", { n: turn.number }), name, duration(before.took_s ?? 0), failed && turn.event.error].filter(Boolean).join(" · "),
      kind: failed ? "failed" : "model",
      version: turn.version,
    };
  });
  if (isWorking && !next && view.state === "think") {
    models.push({ x: scale.place(events.at(-1)?.at ?? 0), right: scale.place(now), label: t("model"), title: t("the model is working"), kind: "running", version: view.version });
  }
  const folds = scale.parts.filter((part) => part.fold);
  const bottom = TOP + (1 + Math.max(1, lanes)) * ROW + 4;
  const height = bottom + (folds.length ? 22 : 4);
  const label = (y, text) => s("text", { x: 4, y: y + 11.5, class: "soft" }, text);
  const grid = shown.map((turn, index) => {
    const boundary = index ? scale.place(journal.events[turnStart(journal, turn)]?.at ?? 0) : LEFT;
    return s("g", { class: "turn" },
      s("path", { d: `M${boundary} 8V${bottom}` }),
      (models[index + 1]?.x ?? scale.width) - models[index].x > 40 || index === 0
        ? s("text", { x: boundary + 4, y: 16, class: "soft" }, t("turn {n}", { n: turn.number })) : null);
  });
  const calledIn = (part) => calls.find((call) => call.waits.some((wait) => wait.from < part.end && (wait.to ?? end) > part.start));
  const waits = folds.map((part) => {
    const call = calledIn(part);
    const text = duration(part.idle);
    return s("g", { class: "fold" },
      s("title", {}, [call?.name, t("waited {time}", { time: text })].filter(Boolean).join(" · ")),
      s("rect", { x: part.x + 3, y: TOP - 6, width: FOLD - 6, height: bottom - TOP + 4, rx: 6 }),
      s("text", { x: part.x + FOLD / 2, y: bottom + 14, class: "soft", "text-anchor": "middle" }, text));
  });
  return h("div", { class: "scroll-x" },
    s("svg", { class: "timeline", viewBox: `0 0 ${scale.width} ${height}`, role: "img", "aria-label": describe(view, shown, calls) },
      waits, grid, label(TOP, t("model")), drawLane(models, TOP, scale, select),
      Array.from({ length: Math.max(1, lanes) }, (_, lane) => [
        label(TOP + (lane + 1) * ROW, t("lane {n}", { n: lane + 1 })),
        drawLane(bars.filter((bar) => bar.lane === lane), TOP + (lane + 1) * ROW, scale, select),
      ])));
}

/** Return the index of the event that began a turn: the last one before its reply that led to OBSERVE, or the first. */
function turnStart(journal, turn) {
  let index = turn.version - 2;
  while (index > 0 && journal.states[index] !== "observe") index--;
  return Math.max(0, index - 1);
}

function describe(view, shown, calls) {
  return t("Turns {first} to {last} of {all}, {calls} calls.", {
    first: shown[0]?.number ?? 0,
    last: shown.at(-1)?.number ?? 0,
    all: view.turns.length,
    calls: calls.length,
  });
}
