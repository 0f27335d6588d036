// Which keys do something, and which row is next.
import assert from "node:assert/strict";
import { test } from "node:test";

import { load } from "./page.mjs";

const { h } = await load("dom.js");
const { KEYS, nextRow, readKey } = await load("keyboard.js");

const row = h("tr");
const table = h("table", {}, h("tbody", {}, row));
const main = h("main", {}, table);
const press = (key, target = main, more = {}) => readKey({ key, target, ...more });

test("the keys of the help", () => {
  document.body.append(main);
  for (const key of [..."/jka?"]) assert.equal(press(key), key);
  assert.equal([...KEYS.keys()].every((key) => ["Enter", "Esc"].includes(key) || press(key) === key), true);
  assert.deepEqual(["x", "J", "Enter", "Escape"].map((key) => press(key)), [null, null, null, null]);
  assert.equal(press("Enter", row), "Enter");
});

test("a key that is typed, or part of another shortcut, does nothing", () => {
  for (const field of [h("input"), h("input", { type: "search" }), h("textarea"), h("select"), h("div", { contenteditable: "true" })]) {
    assert.deepEqual([..."/jka?"].map((key) => press(key, field)), [null, null, null, null, null]);
    assert.equal(press("Escape", field), "Esc");
  }
  assert.equal(press("j", h("input", { type: "checkbox" })), "j");
  for (const name of ["ctrlKey", "metaKey", "altKey", "isComposing", "defaultPrevented"]) assert.equal(press("j", main, { [name]: true }), null);
  const inside = h("input");
  h("dialog", {}, inside);
  assert.deepEqual([press("Escape", inside), press("a", inside.parentElement)], [null, null]);
});

test("the next row is the one after that of the focus", () => {
  const rows = [1, 2, 3].map(() => h("tr", {}, h("td", {}, h("a", { href: "#" }))));
  const link = rows[1].querySelector("a");
  assert.deepEqual([nextRow(rows, null, 1), nextRow(rows, main, -1)], [rows[0], rows[2]]);
  assert.deepEqual([nextRow(rows, link, 1), nextRow(rows, link, -1), nextRow(rows, rows[2], 1)], [rows[2], rows[0], null]);
  assert.equal(nextRow([], null, 1), null);
});
