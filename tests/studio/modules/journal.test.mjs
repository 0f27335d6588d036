// A run at any version of its journal.
import assert from "node:assert/strict";
import { test } from "node:test";

import { load } from "./page.mjs";

const { emptyUsage, fold, Journal, tokensOf } = await load("journal.js");

const TABLE = {
  observe: { Observed: "think" },
  think: { ToolsChosen: "act", AnswerGiven: "done" },
  act: { ApprovalAsked: "act", ApprovalGiven: "act", ToolStarted: "act", ToolFinished: "act", ToolsReturned: "reflect", Failed: "error" },
  reflect: { Continued: "observe" },
};
const usage = { input_tokens: 100, output_tokens: 20, cost_usd: 0.5 };
const small = { input_tokens: 60, output_tokens: 2, cost_usd: 0.1 };
const call = { id: "t1.0", name: "pay", arguments: '{"cents": 5}' };
const EVENTS = [
  { is: "Observed", at: 10, inputs: [{ parts: [{ text: "more" }], by: "ann" }] },
  { is: "ToolsChosen", at: 12, took_s: 2, message: { text: "I pay.", calls: [call] }, usage, tier: { spent: [{ purpose: "routing", usage: small }] } },
  { is: "ApprovalAsked", at: 12, call_id: "t1.0", digest: "d" },
  { is: "ApprovalGiven", at: 20, call_id: "t1.0", by: "bob", arguments: '{"cents": 4}' },
  { is: "ToolStarted", at: 20, call_id: "t1.0" },
  { is: "ToolFinished", at: 21, took_s: 1, result: { call_id: "t1.0", outcome: "done", content: "paid", spent: [{ purpose: "tool", usage: small }] } },
  { is: "ToolsReturned", at: 21 },
  { is: "Continued", at: 21, note: "go on" },
  { is: "Observed", at: 21 },
  { is: "AnswerGiven", at: 22, took_s: 1, message: { text: "Paid." }, usage },
];

function read(events = EVENTS) {
  const journal = new Journal(TABLE);
  events.forEach((event, index) => journal.add(index + 1, event));
  return journal;
}

test("an event that is there, or comes too early, is not added", () => {
  const journal = read();
  journal.add(3, { is: "Observed" });
  journal.add(99, { is: "Observed" });
  assert.equal(journal.version, EVENTS.length);
  assert.deepEqual(journal.states, ["observe", "think", "act", "act", "act", "act", "act", "reflect", "observe", "think", "done"]);
});

test("the end of a run", () => {
  const view = fold(read(), EVENTS.length, "Pay");
  assert.equal(view.stop.reason, "completed");
  assert.deepEqual(view.entries.map((each) => each.kind), ["prompt", "input", "reply", "note", "reply"]);
  assert.equal(view.path.get("observe>think"), 2);
  assert.equal(view.seconds, 4);
  assert.equal(view.waited, 8);
});

test("a call with its edit, its wait and its result", () => {
  const found = fold(read(), EVENTS.length, "Pay").calls.get("t1.0");
  assert.deepEqual([found.status, found.approvedBy, found.arguments, found.proposed], ["done", "bob", { cents: 4 }, { cents: 5 }]);
  assert.deepEqual(found.waits, [{ kind: "asked", from: 12, to: 20 }]);
});

test("a call that had not started goes on as the tool that replaces its own", () => {
  const resumed = { is: "Resumed", at: 13, changes: ["tool pay is gone"], renamed: { pay: "pay_v2" } };
  const early = fold(read([...EVENTS.slice(0, 3), resumed]), 4, "Pay");
  assert.equal(early.calls.get("t1.0").name, "pay_v2");
  assert.equal(early.entries.at(-1).text, "tool pay is gone; pay → pay_v2");
  const late = fold(read([...EVENTS.slice(0, 5), resumed]), 6, "Pay");
  assert.equal(late.calls.get("t1.0").name, "pay");
});

test("a version is the run as it was then", () => {
  const view = fold(read(), 3, "Pay");
  assert.deepEqual([view.state, view.stop, view.calls.get("t1.0").status], ["act", null, "asked"]);
  assert.equal(view.calls.get("t1.0").waits[0].to, null);
});

test("usage is split by purpose, and adds up", () => {
  const view = fold(read(), EVENTS.length, "Pay");
  const tokens = Object.fromEntries([...view.purposes].map(([purpose, each]) => [purpose, tokensOf(each)]));
  assert.deepEqual(tokens, { routing: 62, turn: 178, tool: 62 });
  assert.equal(tokensOf(view.usage), 302);
  assert.equal(view.usage.cost_usd.toFixed(2), "1.10");
  assert.equal(tokensOf(emptyUsage()), 0);
});

test("a failure closes open calls; arguments that are no JSON stay", () => {
  const broken = { ...EVENTS[1], message: { calls: [{ ...call, arguments: "{" }] } };
  const view = fold(read([EVENTS[0], broken, { is: "Failed", at: 13, reason: "timeout", message: "late" }]), 3, "Pay");
  const found = view.calls.get("t1.0");
  assert.deepEqual([view.stop.reason, found.status, found.arguments], ["timeout", "closed", { "": "{" }]);
});
