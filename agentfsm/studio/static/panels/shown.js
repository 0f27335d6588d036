// What the model was sent in a turn: where the tokens and the money go, what has changed since the turn before, and
// each part.
import { api } from "../api.js";
import { fill, h } from "../dom.js";
import { compact, costOf, count, json, money } from "../format.js";
import { t } from "../i18n.js";
import { messageText } from "../messages.js";
import { empty, facts, failure, runLink } from "../parts.js";

export const shown = {
  id: "shown",
  title: "What the model saw",
  shows: (run) => run.view.turns.length > 0,
  mount(host, run) {
    const pick = h("select", { "aria-label": t("Turn"), onchange: () => draw() });
    const content = h("div", { class: "shown", "aria-live": "polite" });
    fill(host, h("div", { class: "toolbar" }, pick), content);
    let turns = 0;
    let drawn = 0;

    async function draw() {
      const turn = Number(pick.value);
      if (!turn || turn === drawn) return;
      drawn = turn;
      try {
        const found = await api.shown(run.id, turn);
        if (drawn === turn) fill(content, drawShown(found));
      } catch (error) {
        drawn = 0;
        fill(content, failure(error));
      }
    }

    return () => {
      if (turns === run.view.turns.length) return;
      const wasNewest = !pick.value || pick.selectedIndex === pick.options.length - 1;
      const value = pick.value;
      turns = run.view.turns.length;
      if (!turns) return void fill(content, empty(t("No turn yet"), t("The model has not been asked.")));
      fill(pick, run.view.turns.map((turn) => h("option", { value: turn.number }, t("turn {n}", { n: turn.number }))));
      pick.value = wasNewest ? String(turns) : value;
      draw();
    };
  },
};

function drawShown(found) {
  const parts = found.parts.map((part) => drawPart(part, found.turn));
  const of = (kind) => parts.filter((_, index) => found.parts[index].kind === kind);
  const messages = parts.filter((_, index) => !["tools", "instructions"].includes(found.parts[index].kind));
  return [
    drawCost(found, parts),
    found.gap && h("p", { class: "soft" }, t("Not certain"), `: ${found.gap}`),
    drawChanges(found),
    found.settings && drawSettings(found),
    section("tools", of("tools")),
    section("instructions", of("instructions")),
    section("messages", messages, found.is_compacted && t("compacted")),
    found.hash && h("p", { class: "soft id" }, found.hash),
  ];
}

function drawCost(found, parts) {
  const { usage } = found;
  const reported = usage.estimated || !usage.input_tokens ? t("Tokens sent, estimated") : t("Tokens sent, by the provider");
  const share = (each) => `${Math.round(each.share * 100)} %`;
  const largest = found.largest.map((index) => h("li", {}, h("button", { type: "button", class: "quiet", onclick: () => open(parts[index]) },
    describePart(found.parts[index]))));
  return h("section", { class: "sent-cost" },
    h("h3", {}, t("Where the cost goes")),
    h("div", { class: "sent-bar", role: "img", "aria-label": found.shares.map((each) => `${t(`sent ${each.kind}`)} ${share(each)}`).join(", ") },
      found.shares.map((each) => h("span", { class: `sent-${each.kind}`, "--share": String(each.share) }))),
    h("ul", { class: "sent-kinds" }, found.shares.map((each) => h("li", { "data-kind": each.kind },
      h("span", { class: `key sent-${each.kind}` }, t(`sent ${each.kind}`)),
      h("strong", {}, share(each)),
      h("span", { class: "soft" }, t("about {n} tokens", { n: count(each.tokens) }), each.usd !== null && ` · ${money(each.usd, { estimated: true })}`)))),
    facts([
      [reported, count(usage.input_tokens), usage.cached_tokens ? `(${t("{n} from the cache", { n: count(usage.cached_tokens) })})` : ""],
      [t("Estimate of the parts"), count(found.tokens)],
      [t("Tokens of the answer"), count(usage.output_tokens)],
      [t("Cost"), costOf(usage)],
    ]),
    h("h3", {}, t("The largest parts")),
    h("ol", { class: "sent-largest" }, largest));
}

function describePart({ kind, name, tokens, turns }) {
  const title = nameOf(kind, name);
  return turns > 1 ? t("{part}: about {n} tokens, sent in {turns} turns", { part: title, n: count(tokens), turns }) : t("{part}: about {n} tokens", { part: title, n: count(tokens) });
}

function nameOf(kind, name) {
  if (kind === "results") return t("result of {tool}", { tool: name.slice("result of ".length) });
  return kind === "tools" ? t("tool {name}", { name }) : t(name);
}

function open(part) {
  part.open = true;
  part.scrollIntoView({ block: "nearest" });
  part.querySelector("summary").focus();
}

function drawChanges(found) {
  if (found.turn === 1) return null;
  const added = found.parts.filter((part) => part.is_new);
  const { cache } = found;
  const row = (sign, part) => h("li", { class: sign === "+" ? "is-added" : "is-removed" }, `${sign} ${describePart(part)}`);
  return h("section", { class: "sent-changes" },
    h("h3", {}, t("Since the turn before")),
    h("p", {}, cache.broken_at === null
      ? t("All of the request before is the beginning of this one, so that a cache can serve it.")
      : t("The request before is no beginning of this one from here on: {part}", { part: cache.broken_at })),
    cache.lost_tokens > 0 && h("p", { class: "error" }, t("{n} tokens were read anew: {why}", { n: count(cache.lost_tokens), why: cache.reason })),
    h("ul", { class: "plain" }, found.removed.map((part) => row("−", part)), added.map((part) => row("+", part)),
      found.changed_settings.map((name) => h("li", { class: "is-changed" }, `~ ${t("setting {name}", { name })}`))));
}

function drawSettings({ settings, changed_settings: changed }) {
  return h("details", { class: "sent-part", "data-part": "settings" }, h("summary", {}, t("Settings of the request")),
    facts(Object.entries(settings).map(([name, value]) => [
      changed.includes(name) ? [name, mark()] : name,
      typeof value === "object" ? h("code", {}, json(value)) : String(value),
    ])));
}

const mark = () => h("span", { class: "mark" }, t("new"));

function section(name, parts, remark) {
  return parts.length > 0 && h("section", {}, h("h3", {}, t(`sent ${name}`), remark && ` · ${remark}`), parts);
}

function drawPart(part, turn) {
  const { kind, message } = part;
  const head = [
    h("span", { class: "who" }, nameOf(kind, part.name)), " ",
    h("span", { class: "soft" }, `≈ ${compact(part.tokens)}`, part.usd !== null && ` · ${money(part.usd, { estimated: true })}`,
      part.turns > 1 && ` · ${t("in {n} turns", { n: part.turns })}`),
    part.is_new && turn > 1 && mark(),
  ];
  const text = message ? messageText(message) : part.text;
  return h("details", { class: `sent-part ${message ? `message ${message.is}` : kind}`, "data-part": part.name, open: Boolean(message) || kind === "note" },
    h("summary", {}, head),
    text === null ? h("p", { class: "soft" }, t("Only administrators see the instructions.")) : h("pre", {}, text),
    part.schema && h("pre", { class: "schema" }, json(part.schema)),
    part.items.length > 0 && h("ul", { class: "sent-items" }, part.items.map((item) => h("li", {},
      `${item.kind} ${item.id}, ${t("score")} ${item.score.toFixed(2)}, `,
      item.source ? [t("from run"), " ", runLink(item.source)] : t("given to the memory"),
      (item.labels ?? []).map((label) => h("span", { class: "label" }, label))))));
}
