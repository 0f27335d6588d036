// The trace of a run: its steps as spans within each other, the rows that are open, and the axis on which they stand.
import { t } from "./i18n.js";

/**
 * @typedef {object} Wait
 * @property {string} kind
 * @property {number} from
 * @property {number | null} to
 *
 * @typedef {object} Span
 * @property {string} key
 * @property {"turn" | "attempt" | "request" | "plan" | "call" | "pause" | "end"} kind
 * @property {string} runId
 * @property {string} name
 * @property {string} status
 * @property {number} from seconds since 1970
 * @property {number | null} to null: it is open
 * @property {number} version of the event that it is about
 * @property {Wait[]} waits times in which nothing was done for it
 * @property {number[]} crashes
 * @property {string} childRun id of the run that it began; empty if there is none
 * @property {Span[]} children
 * @property {any} [event]
 * @property {any} [call]
 *
 * @typedef {object} Row
 * @property {Span} span
 * @property {number} level from 1
 * @property {boolean} isParent
 * @property {boolean} isOpen
 *
 * @typedef {object} Axis
 * @property {number} from
 * @property {number} to
 * @property {(at: number) => number} place a time as a share of the width
 * @property {{from: number, to: number}[]} folds
 */

// Model requests beside the turns, and searches.
const REQUESTS = { Compacted: "compacted", ToolsOffered: "tools offered", Recalled: "memory", Judged: "verdict", PlanDropped: "plan" };
const ENDS = { LimitReached: "limit", Failed: "stopped" };
// A gap is folded if it is longer than this, and would have a larger share of the width than a fold has.
const FOLDED_S = 2;
const FOLD = 0.06;
const ALL_FOLDS = 0.4;

/**
 * Return the spans of a run at the version of its view. Of a run that is working, the turn of the model is open.
 *
 * @param {string} runId
 * @param {{events: any[]}} journal
 * @param {any} view
 * @param {boolean} isWorking
 * @returns {Span[]}
 */
export function buildSpans(runId, { events }, view, isWorking) {
  /** @type {Span[]} */
  const spans = [];
  /** @type {Span[]} */
  let attempts = [];
  /** @type {Span[]} */
  const pauses = [];
  /** @type {Span | null} */
  let plan = null;
  let turns = 0;

  /** @returns {Span} */
  const build = (version, kind, name, more = {}) => {
    const event = events[version - 1];
    const { at, took_s: took = 0 } = event;
    return { key: `${runId} ${version}`, kind, runId, name, status: kind, from: at - took, to: at, version, waits: [], crashes: [], childRun: "", children: [], event, ...more };
  };
  const buildCall = (call, name) => build(call.version, "call", name, { key: `${runId} ${call.id}`, status: statusOf(call), call, childRun: findChildRun(runId, call), crashes: call.crashes, ...timesOf(call) });
  const add = (span) => {
    span.children.unshift(...attempts);
    attempts = [];
    spans.push(span);
    return span;
  };
  const readers = {
    AttemptFailed: (version) => void attempts.push(build(version, "attempt", t("attempt {n} failed", { n: attempts.length + 1 }), { status: "failed" })),
    Planned(version, event) {
      const call = view.calls.get(event.call.id);
      const { number } = view.plans.find((each) => each.version === version);
      const name = [t("Plan {n}", { n: number }), event.maker].filter(Boolean).join(" · ");
      plan = add({ ...buildCall(call, name), kind: "plan", from: event.at - (event.took_s ?? 0) });
    },
    StepsReady: (_version, event) => void plan?.children.push(...event.calls.map((call) => buildCall(view.calls.get(call.id), nameStep(call, plan)))),
    Paused(version, event) {
      const isCrash = event.kind === "crash";
      pauses.push(add(build(version, "pause", isCrash ? t("Paused after crashes") : t("paused"), { from: event.at, to: null, crashes: isCrash ? [event.at] : [] })));
    },
    Continued(version, event) {
      if (event.asks) pauses.push(add(build(version, "pause", t("question"), { from: event.at, to: null })));
    },
  };
  for (let version = 1; version <= view.version; version++) {
    const event = events[version - 1];
    const pause = pauses.at(-1);
    if (pause?.to === null) pause.to = event.at;
    if (view.turns[turns]?.version === version) {
      const { number, calls } = view.turns[turns++];
      const status = event.is === "ModelFaltered" ? "failed" : "turn";
      add(build(version, "turn", nameTurn(number, event), { status, children: calls.map((call) => buildCall(call, call.name)) }));
    } else if (event.is in REQUESTS) add(build(version, "request", t(REQUESTS[event.is])));
    else if (event.is in ENDS) add(build(version, "end", t(ENDS[event.is]), { from: event.at, status: "failed" }));
    else readers[event.is]?.(version, event);
  }
  if (isWorking && view.state === "think" && view.version) {
    add(build(view.version, "turn", t("turn {n}", { n: turns + 1 }), { key: `${runId} next`, status: "running", from: view.updatedAt, to: null }));
  }
  spans.push(...attempts);
  for (const span of pauses) span.waits.push({ kind: "paused", from: span.from, to: span.to });
  return spans;
}

function nameTurn(number, { model, tier, answered_from: source }) {
  return [t("turn {n}", { n: number }), source ? `${t("answer of")} ${source.run_id}` : model, tier?.name].filter(Boolean).join(" · ");
}

/** A step has the words of its plan; one for an item of a list has the item, which is its first argument. */
function nameStep(call, plan) {
  const id = Number(call.id.split(".").at(-1));
  const step = (plan.call.arguments.steps ?? []).find((each, index) => (each.id ?? index + 1) === id);
  const [item] = plan.event.maker === "each" ? Object.values(step?.arguments ?? {}) : [];
  const words = step?.description || step?.question || step?.goal || call.name;
  return `${id}. ${item === undefined ? words : typeof item === "string" ? item : JSON.stringify(item)}`;
}

/** A call that began a background run is as that one is. */
function statusOf({ status, background }) {
  if (!background) return status;
  return background.result?.outcome ?? (background.isWaiting ? "paused" : "running");
}

function findChildRun(runId, call) {
  const found = resultOf(call)?.child?.run_id ?? call.pending?.find((item) => item.run_id !== runId)?.run_id;
  return found ?? (call.kind === "agent" ? `${runId}.${call.id}` : "");
}

/** The result of a call, or of the background run that it began. */
export const resultOf = (call) => call.background?.result ?? call.result;

/** Return when a call began, when it ended, and when nothing was done for it: before its start, and while it waited. */
function timesOf({ askedAt, starts, result, waits, endedAt, background }) {
  const began = [...starts, result?.started_at, waits[0]?.from].filter(Boolean);
  const from = began.length ? Math.min(...began) : askedAt;
  const took = result?.started_at && result.duration_s ? result.started_at + result.duration_s : null;
  const to = background ? background.endedAt : took ?? endedAt ?? null;
  return { from, to, waits: began.length ? waits : [{ kind: "intended", from: askedAt, to }] };
}

/** Seconds in which something was done for a span, and in which it waited. */
export function secondsOf(span, now) {
  const all = Math.max(0, (span.to ?? now) - span.from);
  const waited = span.waits.reduce((sum, wait) => sum + Math.max(0, (wait.to ?? now) - wait.from), 0);
  return { all, waited: Math.min(all, waited) };
}

/**
 * Return the rows of spans that are open. `isOpen(span)` says whether the spans within one are shown, `childSpans(span)`
 * returns those of the run that it began.
 *
 * @param {Span[]} spans
 * @param {(span: Span) => boolean} isOpen
 * @param {(span: Span) => Span[]} childSpans
 * @returns {Row[]}
 */
export function listRows(spans, isOpen, childSpans) {
  /** @type {Row[]} */
  const rows = [];
  const list = (some, level) => {
    for (const span of some) {
      const isParent = span.children.length > 0 || span.childRun !== "";
      const row = { span, level, isParent, isOpen: isParent && isOpen(span) };
      rows.push(row);
      if (!row.isOpen) continue;
      list(span.children, level + 1);
      if (span.childRun) list(childSpans(span), level + 1);
    }
  };
  list(spans, 1);
  return rows;
}

/**
 * Return the axis of rows. Time in which nothing was done for any of them is folded to a small share of the width.
 *
 * @param {Row[]} rows
 * @param {number} now
 * @returns {Axis}
 */
export function buildAxis(rows, now) {
  const work = [];
  let [from, to] = [Infinity, -Infinity];
  for (const { span } of rows) {
    const end = span.to ?? now;
    from = Math.min(from, span.from);
    to = Math.max(to, end);
    let at = span.from;
    for (const wait of [...span.waits, { from: end, to: end }]) {
      if (wait.from > at) work.push([at, wait.from]);
      at = Math.max(at, wait.to ?? end);
    }
  }
  work.sort((one, other) => one[0] - other[0]);
  const gaps = [];
  let last = from;
  for (const [start, end] of [...work, [to, to]]) {
    if (start - last > FOLDED_S) gaps.push({ from: last, to: start });
    last = Math.max(last, end);
  }
  const active = to - from - gaps.reduce((sum, gap) => sum + gap.to - gap.from, 0);
  const share = Math.min(FOLD, ALL_FOLDS / (gaps.length || 1));
  const folds = gaps.filter((gap) => gap.to - gap.from > (share * active) / (1 - share * gaps.length));
  const folded = folds.reduce((sum, gap) => sum + gap.to - gap.from, 0);
  const unit = (1 - share * folds.length) / (to - from - folded || 1);
  const place = (at) => {
    let x = 0;
    let seen = from;
    for (const fold of folds) {
      if (at <= fold.from) break;
      x += (fold.from - seen) * unit + share * Math.min(1, (at - fold.from) / (fold.to - fold.from));
      seen = Math.min(at, fold.to);
    }
    return Math.min(1, Math.max(0, x + (at - seen) * unit));
  };
  return { from, to, place, folds };
}
