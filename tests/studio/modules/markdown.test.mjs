// Answers as elements: no HTML of the text, links of the allowed kinds only, no picture by itself.
import assert from "node:assert/strict";
import { test } from "node:test";

import { load } from "./page.mjs";

const { markdown } = await load("markdown.js");

const html = (text) => markdown(text).innerHTML;
const links = (text) => [...markdown(text).querySelectorAll("a")].map((each) => [each.textContent, each.getAttribute("href")]);

test("blocks and marks", () => {
  assert.equal(html("# A *b*"), '<p class="heading h1">A <em>b</em></p>');
  assert.equal(html("- one\n- `two`"), "<ul><li>one</li><li><code>two</code></li></ul>");
  assert.equal(html("3. c"), '<ol start="3"><li>c</li></ol>');
  assert.match(html("|a|b|\n|-|-:|\n|1|2|"), /<table>.*<td class="right">2<\/td>/);
  assert.equal(html("```py\n<b>\n```"), "<pre>&lt;b&gt;\n</pre>");
});

test("HTML is text", () => {
  for (const text of ["<script>alert(1)</script>", "a <img src=x onerror=alert(1)> b", "<a href='https://x.example'>y</a>"]) {
    const shown = markdown(text);
    assert.equal(shown.querySelectorAll("script, img, a[href*=alert]").length, 0);
    assert.equal(shown.textContent.trim(), text);
  }
});

test("links open beside the studio, and only of the allowed kinds", () => {
  assert.deepEqual(links("[a](https://a.example) <mailto:b@c.example>"), [["a", "https://a.example/"], ["mailto:b@c.example", "mailto:b@c.example"]]);
  const link = markdown("[a](https://a.example)").querySelector("a");
  assert.deepEqual([link.rel, link.getAttribute("target")], ["noopener noreferrer", "_blank"]);
  for (const text of ["[a](javascript:alert(1))", "[a](//b.example)", "[a](https:b.example)", "[a](data:text/html,b)", "[a](#/runs)"]) {
    assert.deepEqual(links(text), [], text);
  }
});

test("a link says where it leads, unless its text does", () => {
  const said = (text) => markdown(text).textContent;
  assert.equal(said("[https://bank.example](https://evil.example/?q=1)"), "https://bank.example (evil.example)");
  assert.equal(said("https://p\u0430ypal.example"), "https://p\u0430ypal.example (xn--pypal-4ve.example)");
  assert.equal(said("https://bank.example@evil.example"), "https://bank.example@evil.example (evil.example)");
  assert.equal(said("[https://bank.example.org](https://bank.example)"), "https://bank.example.org (bank.example)");
  assert.equal(said("[write](mailto:a@evil.example?body=x)"), "write (a@evil.example)");
  assert.equal(said("![p](https://evil.example/p.png)"), "Picture: p (evil.example)");
  for (const text of ["https://a.example/b?c", "https://a.example"]) assert.equal(said(text), text);
});

test("a bare address ends before the sentence does", () => {
  assert.deepEqual(links("See (https://a.example/b_(c)), or https://d.example."), [
    ["https://a.example/b_(c)", "https://a.example/b_(c)"], ["https://d.example", "https://d.example/"],
  ]);
});

test("no picture is loaded", () => {
  assert.deepEqual(links("![x](https://a.example/x.png)"), [["Picture: x", "https://a.example/x.png"]]);
  assert.match(html("![x](data:image/png;base64,AAAA)"), /<button[^>]*>Picture: x<\/button>/);
  assert.equal(markdown("![x](data:image/svg+xml;base64,AAAA)").querySelectorAll("img, button, a").length, 0);
});

test("a text of very many brackets is shown as it is", () => {
  assert.equal(markdown("[".repeat(20_000)).querySelectorAll("p.text").length, 1);
});
