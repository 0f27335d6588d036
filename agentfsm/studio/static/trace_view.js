// The trace of a run as rows with bars, and what the chosen row is about: a call with its arguments, result, key and cost.
import { api } from "./api.js";
import { permits, readCaller } from "./caller.js";
import { argumentList } from "./decide.js";
import { every, fill, h } from "./dom.js";
import { callTitle, clock, costOf, count, duration } from "./format.js";
import { t } from "./i18n.js";
import { fold, sumUsage } from "./journal.js";
import { summarise } from "./panels/events.js";
import { chip, decisionsOf, facts, runLink } from "./parts.js";
import { buildAxis, buildSpans, listRows, resultOf, secondsOf } from "./trace.js";
import { virtualList } from "./virtual_list.js";

// Milliseconds between two drawings of what is running.
const TICK_MS = 700;

/** Return the element of a run's trace, and a function that brings it up to date. */
export function traceView(run) {
  /** @type {import("./trace.js").Row[]} */
  let rows = [];
  let axis = buildAxis([], 0);
  let now = 0;
  let chosen = ""; // key of the chosen span
  let shown = ""; // what the details are of
  const toggled = new Set();
  const scale = h("div", { class: "trace-scale", "aria-hidden": "true" });
  const details = h("div", { class: "record", role: "region", tabindex: 0, "aria-label": `${t("Details of the step")} · ${run.id}` });
  const list = virtualList(t("Trace"), (index) => drawRow(rows[index]), choose, {
    role: "tree",
    rowRole: "treeitem",
    describe: (index) => describe(rows[index]),
    onView: drawScale,
    onKey,
  });
  const element = h("div", { class: "trace" }, h("div", {}, scale, list.element), details);
  every(TICK_MS, element, () => run.isWorking && update());

  /** What is within a turn or a plan is shown at first, the run that a call began is not. */
  const isOpen = (span) => (span.kind === "call") === toggled.has(span.key);

  function childSpans({ childRun }) {
    const child = run.child(childRun);
    const { events, version: newest } = child.journal;
    const version = run.isLive ? newest : events.findLastIndex((event) => event.at <= run.view.updatedAt) + 1;
    const state = [version, run.isWorking].join();
    if (child.state !== state) {
      child.spans = buildSpans(childRun, child.journal, fold(child.journal, version, ""), run.isWorking);
      child.state = state;
    }
    return child.spans;
  }

  function update(follows = true) {
    now = run.isWorking || (run.isLive && !run.isOver) ? Date.now() / 1000 : (run.view.updatedAt ?? 0);
    rows = listRows(buildSpans(run.id, run.journal, run.view, run.isWorking), isOpen, childSpans);
    const index = rows.findIndex((row) => row.span.key === chosen);
    list.update(rows.length, { chosen: index, follows });
    if (index >= 0) showDetails(rows[index].span);
    else if (!details.firstChild) fill(details, h("p", { class: "soft" }, t("Choose a step: Enter goes to its details, the arrow keys move, open and close.")));
  }

  function choose(index) {
    chosen = rows[index].span.key;
    showDetails(rows[index].span);
  }

  function toggle({ span }) {
    if (!toggled.delete(span.key)) toggled.add(span.key);
    if (span.childRun && isOpen(span)) run.openChild(span.childRun);
    update(false);
  }

  function onKey({ key }, index) {
    const row = rows[index];
    if (!row) return false;
    if (key === "Enter") details.focus();
    else if (key === "ArrowRight" && row.isParent && !row.isOpen) toggle(row);
    else if (key === "ArrowLeft" && row.isOpen) toggle(row);
    else if (key === "ArrowLeft" && row.level > 1) list.select(rows.findLastIndex((each, place) => place < index && each.level < row.level));
    else return false;
    return true;
  }

  function drawScale(first, end) {
    axis = buildAxis(rows.slice(first, end), now);
    fill(scale, h("span", {}), h("span", { class: "trace-lane" }, rows.length > 0 && [
      h("span", {}, clock(axis.from)),
      axis.folds.map((each) => h("span", { class: "trace-fold", "--from": axis.place(each.from), "--to": axis.place(each.to), title: duration(each.to - each.from) })),
    ]), h("span", { class: "number" }, rows.length > 0 && duration(axis.to - axis.from)));
  }

  function describe({ span, level, isParent, isOpen: isShown }) {
    const { all, waited } = secondsOf(span, now);
    const words = [span.name, span.call && t(`call ${span.status}`), duration(all), waited > 0 && t("waited {time}", { time: duration(waited) })];
    return {
      "aria-label": words.filter(Boolean).join(", "),
      "aria-level": level,
      "aria-expanded": isParent ? String(isShown) : null,
      "data-kind": span.kind,
    };
  }

  function drawRow(row) {
    const { span, level, isParent } = row;
    const attempts = span.call ? attemptsOf(span.call) : 1;
    const place = (from, to) => ({ "--from": axis.place(from), "--to": axis.place(to ?? now) });
    const isEarly = span.kind === "call" && span.from < span.call.askedAt - 1e-4;
    return [
      h("span", { class: "trace-name", "--level": level - 1 },
        h("span", { class: "twisty", onclick: isParent && (() => toggle(row)) }, isParent && (row.isOpen ? "▾" : "▸")),
        h("span", { class: "summary" }, span.name),
        attempts > 1 && h("span", { class: "soft" }, `×${attempts}`)),
      h("span", { class: "trace-lane" },
        h("span", { class: `trace-bar ${span.status}`, ...place(span.from, span.to) }),
        isEarly && h("span", { class: "trace-early", title: t("started while the model streamed"), ...place(span.from, Math.min(span.call.askedAt, span.to ?? now)) }),
        span.waits.map((wait) => h("span", { class: "trace-wait", title: t(`call ${wait.kind}`), ...place(wait.from, wait.to) })),
        span.crashes.map((at) => h("span", { class: "trace-crash", title: t("A worker died."), ...place(at, at) }, "✕"))),
      h("span", { class: "number" }, duration(secondsOf(span, now).all)),
    ];
  }

  function showDetails(span) {
    const state = [span.key, span.status, span.to, run.view.version].join();
    if (shown === state) return;
    shown = state;
    const worker = h("span", {}, "…");
    if (span.to === null && run.isWorking) nameWorker(run, span).then((name) => fill(worker, name));
    fill(details,
      h("header", {}, h("strong", {}, span.name), span.call && chip(span.status, t(`call ${span.status}`)),
        span.runId === run.id
          ? h("button", { type: "button", class: "quiet", onclick: () => run.goTo(span.version) }, t("Go to this version"))
          : runLink(span.runId, t("Go to this version"), span.version),
        span.childRun && runLink(span.childRun, t("sub-agent's run"))),
      facts([...factsOf(span, now), [t("Worker now"), span.to === null && run.isWorking ? worker : null]], "facts grid"),
      span.call ? drawCall(span.call) : drawEvent(span));
  }

  return { element, update: () => update() };
}

const attemptsOf = (call) => Math.max(call.attempts, call.result?.attempts ?? 1);

function factsOf(span, now) {
  const { all, waited } = secondsOf(span, now);
  const { call, event } = span;
  const result = call && resultOf(call);
  const usage = sumUsage(call ? [result?.child?.usage, ...(result?.spent ?? []).map((each) => each.usage)] : [event.usage]);
  const speed = span.kind === "turn" && all > 0 && usage.output_tokens > 0 ? t("{n} tokens a second", { n: count(Math.round(usage.output_tokens / all)) }) : null;
  return [
    [t("Began"), clock(span.from)],
    [t("Took"), duration(all), waited > 0 && t("waited {time}", { time: duration(waited) })],
    [t("Attempts"), call && attemptsOf(call) > 1 && count(attemptsOf(call))],
    [t("Crashes"), span.crashes.length > 0 && span.crashes.map(clock).join(", ")],
    [t("Input"), usage.input_tokens > 0 && count(usage.input_tokens), usage.cached_tokens > 0 && `${t("Cached")} ${count(usage.cached_tokens)}`],
    [t("Output"), usage.output_tokens > 0 && count(usage.output_tokens), speed],
    [t("Cost"), usage.count > 0 && costOf(usage)],
  ].map(([name, value, more]) => [name, value || null, more]);
}

function drawCall(call) {
  const result = resultOf(call);
  return [
    call.key && h("p", { class: "soft" }, t("Key"), " ", h("code", {}, call.key)),
    call.waits.length > 0 && h("ul", {}, call.waits.map((wait) => h("li", {}, `${t(`call ${wait.kind}`)}: ${wait.to === null ? "…" : duration(Math.max(0, wait.to - wait.from))}`))),
    h("p", { class: "soft" }, decisionsOf(call)),
    call.guards.map((each) => h("p", {}, h("strong", {}, `${t("Guards")}: ${each.verdict}`), ` ${[each.rule, each.reason].filter(Boolean).join(" · ")}`)),
    h("h3", {}, t("Arguments")),
    argumentList(call.arguments),
    result && [h("h3", {}, t("Result")), h("pre", {}, result.content || t("empty result"))],
  ];
}

function drawEvent({ event }) {
  return [
    h("p", { class: "text" }, summarise(event)),
    (event.message?.calls ?? []).map((call) => h("p", {}, h("code", {}, callTitle({ ...call, arguments: JSON.parse(call.arguments) }))))
  ];
}

/** Say who executes an open step now, if the reader may know: the journal does not name the owners of leases. */
async function nameWorker(run, span) {
  if (!permits(await readCaller(), { scope: "approve" })) return "–";
  const { workers } = await api.workers();
  const find = (id) => workers.find((worker) => worker.runs.some((each) => each.id === id))?.name;
  return find(span.runId) ?? find(run.id) ?? t("none");
}
