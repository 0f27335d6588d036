// Sessions: conversations of several runs.
import { api } from "../api.js";
import { fill, h } from "../dom.js";
import { count } from "../format.js";
import { t } from "../i18n.js";
import { chip, empty, failure, runLink, table, time } from "../parts.js";

export const sessions = {
  path: "sessions",
  title: "Sessions",
  async mount(main) {
    try {
      const found = await api.sessions();
      fill(main,
        h("header", { class: "page" }, h("h1", {}, t("Sessions")), !found.is_whole && h("p", { class: "soft" }, t("the newest ones"))),
        draw(found.sessions));
    } catch (error) {
      fill(main, failure(error));
    }
  },
};

function draw(found) {
  if (!found.length) return empty(t("No sessions"), t("Runs with one session continue each other's conversation."));
  const heads = [t("Session"), t("Newest run"), t("Agent"), t("User"), [t("Runs")], t("Status"), t("Updated")];
  return table(t("Sessions"), heads, found.map(({ session, user, last, runs }) => h("tr", { "data-session": session },
    h("td", { class: "nowrap" }, h("a", { href: `#/runs?session=${encodeURIComponent(session)}` }, session)),
    h("td", { class: "task" }, runLink(last.id, last.prompt || last.id)),
    h("td", {}, last.agent),
    h("td", {}, user ?? ""),
    h("td", { class: "number" }, count(runs)),
    h("td", {}, chip(last.status)),
    h("td", { class: "nowrap" }, time(last.updated_at)))));
}
