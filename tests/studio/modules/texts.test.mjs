// Numbers, durations, hidden characters and addresses.
import assert from "node:assert/strict";
import { test } from "node:test";

import { load } from "./page.mjs";

const format = await load("format.js");
const { escapeHidden, h } = await load("dom.js");
const { once } = await load("api.js");
const { t } = await load("i18n.js");
const { keepAddress, readAddress } = await load("address.js");

const each = (act, cases) => cases.forEach(([given, wanted]) => assert.equal(act(given), wanted, JSON.stringify(given)));

test("durations", () => each(format.duration, [
  [0.0994, "99 ms"], [0.0995, "0.1 s"], [9.94, "9.9 s"], [59.4, "59 s"], [60, "1 min"], [61, "1 min 1 s"],
  [3599, "59 min 59 s"], [3600, "1 h"], [90_000, "1 d 1 h"],
]));

test("amounts", () => {
  each(format.money, [[0, "$0.00"], [0.0004, "$0.0004"], [0.5, "$0.50"], [1234567.891, "$1,234,567.89"], [null, "unknown price"]]);
  assert.equal(format.money(0.5, { estimated: true, unpriced: true }), "about $0.50 and unknown prices");
  assert.equal(format.money(0, { unpriced: true }), "unknown price");
  assert.equal(format.costOf({}), "–");
  each(format.compact, [[9_999, "9,999"], [200_000, "200k"]]);
});

test("a call on one line", () => {
  assert.equal(format.callTitle({ name: "pay", arguments: { to: "ann", cents: 5 } }), 'pay(to="ann", cents=5)');
  assert.equal(format.callTitle({ name: "say", arguments: { text: "x".repeat(99) } }, 10), 'say(text="xxxx…)');
});

test("hidden characters are visible, those of a visible one stay", () => {
  each(escapeHidden, [
    ["gnp\u202eexe", "gnp⟨U+202E⟩exe"], ["a\u200bb\x1b", "a⟨U+200B⟩b⟨U+001B⟩"], ["\u{e0041}", "⟨U+E0041⟩"],
    ["a\tb\r\nc\r", "a\tb\r\nc⟨U+000D⟩"], ["👩\u200d💻 ❤\ufe0f", "👩\u200d💻 ❤\ufe0f"], ["a\u200db", "a⟨U+200D⟩b"],
    ["क\u094d\u200dष", "क\u094d\u200dष"], ["你好", "你好"],
  ]);
  assert.equal(h("p", { title: "\u202e" }, "a\u202e", null, ["b", false]).outerHTML,
    '<p title="⟨U+202E⟩">a<span title="U+202E" class="hidden-char">U+202E</span>b</p>');
  assert.equal(h("p", {}, "<b>&").innerHTML, "&lt;b&gt;&amp;");
});

test("what is chosen stands in the address of its own page", () => {
  location.hash = "#/runs?state=done";
  assert.equal(readAddress().parameters.get("state"), "done");
  keepAddress("runs", { state: "", agent: "a b" });
  assert.equal(location.hash, "#/runs?agent=a+b");
  keepAddress("costs", { by: "user" });
  assert.deepEqual([readAddress().path, location.hash], ["runs", "#/runs?agent=a+b"]);
});

test("a request without an answer is sent again with its key", async () => {
  const keys = [];
  const send = once(async (_body, key) => {
    keys.push(key);
    if (keys.length === 1 || keys.length === 3) throw new Error("lost");
  });
  for (const body of ["a", "a", "a", "b"]) await send(body).catch(() => {});
  assert.deepEqual([keys[1] === keys[0], new Set(keys).size], [true, 3]);
});

test("one thing has a text of its own", () => {
  each((n) => t("{n} runs wait", { n }), [[1, "1 run waits"], ["1", "1 run waits"], [2, "2 runs wait"]]);
  assert.equal(t("the last {n} days", { n: 1 }), "the last day");
});
