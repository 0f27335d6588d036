// The trace of a run: spans, rows and the axis.
import assert from "node:assert/strict";
import { test } from "node:test";

import { load } from "./page.mjs";

const { fold, Journal } = await load("journal.js");
const { buildAxis, buildSpans, listRows, secondsOf } = await load("trace.js");

// The spans follow the events, whatever the states.
const TABLE = new Proxy({}, { get: () => new Proxy({}, { get: (_row, event) => (event === "Observed" ? "think" : "act") }) });
const call = (id, name, values = {}) => ({ id, name, arguments: JSON.stringify(values), key: `key of ${id}` });
const result = (id, values) => ({ call_id: id, outcome: "done", content: "ok", ...values });

function build(events, { isWorking = false } = {}) {
  const journal = new Journal(TABLE);
  events.forEach((event, index) => journal.add(index + 1, event));
  return buildSpans("r", journal, fold(journal, events.length, ""), isWorking);
}

const places = (spans) => spans.map(({ name, status, from, to }) => [name, status, from, to]);

test("turns have their calls, and the attempts that failed before", () => {
  const spans = build([
    { is: "Observed", at: 10 },
    { is: "AttemptFailed", at: 12, took_s: 2, error: "overloaded" },
    { is: "ToolsChosen", at: 15, took_s: 3, model: "m", message: { calls: [call("t1.0", "look"), call("t1.1", "ask")] } },
    { is: "ToolFinished", at: 16, result: result("t1.0", { started_at: 14, duration_s: 1.5 }) },
    { is: "ToolStarted", at: 15, call_id: "t1.1", kind: "agent" },
    { is: "Observed", at: 20 },
  ], { isWorking: true });
  assert.deepEqual(places(spans), [["turn 1 · m", "turn", 12, 15], ["turn 2", "running", 20, null]]);
  assert.deepEqual(places(spans[0].children), [["attempt 1 failed", "failed", 10, 12], ["look", "done", 14, 15.5], ["ask", "running", 15, null]]);
  assert.deepEqual(spans[0].children.map((each) => each.childRun), ["", "", "r.t1.1"]);
});

test("steps have the words of their plan, those for the items of a list the item", () => {
  const plan = (maker, steps) => ({ is: "Planned", at: 5, took_s: 1, maker, call: call("p1", "agentfsm.plan", { steps }) });
  const accepted = { is: "ToolFinished", at: 6, result: result("p1", {}) };
  const ready = { is: "StepsReady", at: 6, calls: [call("p1.1", "load"), call("p1.2", "load")] };
  const steps = [{ id: 1, tool: "load", arguments: { row: { id: 7 } } }, { id: 2, tool: "load", arguments: { row: "eight" }, description: "The last one." }];
  const [made] = build([plan("", steps), accepted, ready]);
  assert.deepEqual([made.kind, made.name, made.from, made.to], ["plan", "Plan 1", 4, 6]);
  assert.deepEqual(made.children.map((each) => each.name), ["1. load", "2. The last one."]);
  const [items] = build([plan("each", steps), accepted, ready]);
  assert.deepEqual(items.children.map((each) => each.name), ['1. {"id":7}', "2. eight"]);
});

test("crashes and waits of a call", () => {
  const [{ children: [paid] }] = build([
    { is: "ToolsChosen", at: 1, message: { calls: [call("t1.0", "pay")] } },
    { is: "Guarded", at: 1, call_id: "t1.0", verdict: "ask", rule: "irreversible" },
    { is: "ApprovalAsked", at: 2, call_id: "t1.0" },
    { is: "ApprovalGiven", at: 12, call_id: "t1.0", by: "ann", arguments: "{}", key: "key of the edit" },
    { is: "ToolStarted", at: 12, call_id: "t1.0" },
    { is: "ToolStarted", at: 20, call_id: "t1.0" }, // its worker had died
    { is: "ToolStarted", at: 22, took_s: 2, call_id: "t1.0" }, // a retry
    { is: "ToolCutOff", at: 23, call_id: "t1.0", started_at: 20, duration_s: 3 },
    { is: "ToolStarted", at: 25, call_id: "t1.0" },
    { is: "ToolLost", at: 30, call_id: "t1.0" },
  ]);
  assert.deepEqual(paid.crashes, [20, 30]);
  assert.deepEqual(paid.waits, [{ kind: "asked", from: 2, to: 12 }, { kind: "intended", from: 23, to: 25 }, { kind: "lost", from: 30, to: null }]);
  assert.deepEqual([paid.from, paid.to, paid.call.key, paid.call.guards[0].version], [2, null, "key of the edit", 2]);
  assert.deepEqual(secondsOf(paid, 40), { all: 38, waited: 22 });
});

test("a call that began a background run lasts as long as that", () => {
  const events = [
    { is: "ToolsChosen", at: 1, message: { calls: [call("t1.0", "ask")] } },
    { is: "ToolStarted", at: 1, call_id: "t1.0", kind: "agent" },
    { is: "ChildReported", at: 2, call_id: "t1.0" },
    { is: "ToolFinished", at: 2, result: result("t1.0", { started_at: 1, duration_s: 1 }) },
    { is: "ChildReported", at: 5, call_id: "t1.0", pending: [{ run_id: "r.t1.0" }] },
    { is: "ChildReported", at: 9, call_id: "t1.0", result: result("t1.0", { outcome: "failed" }) },
  ];
  const after = (count) => places(build(events.slice(0, count))[0].children)[0];
  assert.deepEqual([4, 5, 6].map(after), [["ask", "running", 1, null], ["ask", "paused", 1, null], ["ask", "failed", 1, 9]]);
  assert.deepEqual(build(events)[0].children[0].waits, [{ kind: "paused", from: 5, to: 9 }]);
});

test("pauses of a run end with the next event; a limit and a failure are its end", () => {
  const spans = build([
    { is: "Paused", at: 1, kind: "crash" }, { is: "Resumed", at: 9 },
    { is: "Continued", at: 10, asks: "Which?" }, { is: "Observed", at: 14 },
    { is: "Compacted", at: 16, took_s: 2 }, { is: "Failed", at: 17, took_s: 1, reason: "cancelled" },
    { is: "Paused", at: 20 },
  ]);
  assert.deepEqual(places(spans), [
    ["Paused after crashes", "pause", 1, 9], ["question", "pause", 10, 14], ["compacted", "request", 14, 16],
    ["stopped", "failed", 17, 17], ["paused", "pause", 20, null],
  ]);
  assert.deepEqual(spans[0].crashes, [1]);
});

const span = (from, to, more = {}) => ({ key: `${from} ${to}`, kind: "call", from, to, waits: [], children: [], childRun: "", ...more });

test("rows are those of spans that are open", () => {
  const inner = span(3, 4);
  const spans = [span(0, 9, { children: [span(1, 2, { childRun: "r.t1.0" })] }), span(9, 10)];
  const list = (isOpen) => listRows(spans, isOpen, (each) => (each.childRun === "r.t1.0" ? [inner] : [])).map((row) => [row.span.key, row.level, row.isParent, row.isOpen]);
  assert.deepEqual(list(() => false), [["0 9", 1, true, false], ["9 10", 1, false, false]]);
  assert.deepEqual(list(() => true), [["0 9", 1, true, true], ["1 2", 2, true, true], ["3 4", 3, false, false], ["9 10", 1, false, false]]);
});

test("the axis folds the time in which nothing was done, and no shorter one", () => {
  const axis = (...spans) => buildAxis(spans.map((each) => ({ span: each })), 1_000);
  const even = axis(span(0, 4), span(5, 10));
  assert.deepEqual([even.folds, even.place(5), even.place(-1), even.place(99)], [[], 0.5, 0, 1]);
  const waiting = axis(span(0, 1), span(1, 903, { waits: [{ kind: "asked", from: 2, to: 902 }] }));
  assert.deepEqual(waiting.folds, [{ from: 2, to: 902 }]);
  assert.deepEqual([1, 2, 902, 903].map((at) => waiting.place(at).toFixed(3)), ["0.313", "0.627", "0.687", "1.000"]);
  const open = axis(span(0, 100), span(100, null, { waits: [{ kind: "lost", from: 100, to: null }] }));
  assert.deepEqual([open.to, open.place(100).toFixed(2)], [1_000, "0.94"]);
  assert.deepEqual(axis(span(0, 1_000), span(1_003, 2_000)).folds, []); // a fold would be wider
});
