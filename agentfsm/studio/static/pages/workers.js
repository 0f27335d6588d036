// Workers and leases: which runs are executed, which are ready, and what is stuck.
import { api } from "../api.js";
import { every, fill, h } from "../dom.js";
import { t } from "../i18n.js";
import { empty, failure, runLink, table, time } from "../parts.js";

const REFRESH_MS = 2000;

export const workers = {
  path: "workers",
  title: "Workers",
  mount(main) {
    const content = h("div", {});
    fill(main, h("header", { class: "page" }, h("h1", {}, t("Workers and leases"))), content);
    async function load() {
      try {
        const { runs } = await api.leases();
        fill(content, draw(runs));
      } catch (error) {
        fill(content, failure(error));
      }
    }
    load();
    every(REFRESH_MS, content, load);
  },
};

function draw(found) {
  if (!found.length) return empty(t("All is done"), t("No run is executed, and none waits for a worker."));
  const heads = [t("Run"), t("Agent"), t("Lease"), t("Ready since"), t("Updated"), t("What holds it up")];
  return table(t("Workers and leases"), heads, found.map((each) => h("tr", {},
    h("td", { class: "task" }, runLink(each.id, each.prompt || each.id)),
    h("td", {}, each.agent),
    h("td", {}, each.driven ? t("held") : "–"),
    h("td", {}, each.ready_at ? time(each.ready_at) : "–"),
    h("td", {}, time(each.updated_at)),
    h("td", {}, each.reason))));
}
