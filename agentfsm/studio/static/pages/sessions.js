// Sessions: conversations of several runs.
import { api } from "../api.js";
import { fill, h } from "../dom.js";
import { count } from "../format.js";
import { t } from "../i18n.js";
import { chip, empty, failure, table, time } from "../parts.js";

export const sessions = {
  path: "sessions",
  title: "Sessions",
  async mount(main) {
    try {
      const { sessions: found } = await api.sessions();
      fill(main, h("header", { class: "page" }, h("h1", {}, t("Sessions"))), draw(found));
    } catch (error) {
      fill(main, failure(error));
    }
  },
};

function draw(found) {
  if (!found.length) return empty(t("No sessions"), t("Runs with one session continue each other's conversation."));
  const heads = [t("Session"), t("Agent"), t("User"), t("Runs"), t("Tokens"), t("Status"), t("Updated")];
  return table(t("Sessions"), heads, found.map((each) => h("tr", {},
    h("td", {}, h("a", { href: `#/runs?session=${encodeURIComponent(each.session)}` }, each.session)),
    h("td", {}, each.agent),
    h("td", {}, each.user ?? ""),
    h("td", { class: "number" }, count(each.runs)),
    h("td", { class: "number" }, count(each.tokens)),
    h("td", {}, chip(each.status)),
    h("td", { class: "nowrap" }, time(each.updated_at)))));
}
