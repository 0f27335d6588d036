// Searches of the memory: what was looked for, the profile of the user, and the items that the model read.
import { fill, h } from "../dom.js";
import { date } from "../format.js";
import { t } from "../i18n.js";
import { runLink, table } from "../parts.js";

export const memory = {
  id: "memory",
  title: "Memory",
  shows: (run) => listSearches(run).length > 0,
  mount(host, run) {
    return () => fill(host, listSearches(run).map((each) => drawSearch(each, run)));
  },
};

function listSearches(run) {
  return run.journal.events.slice(0, run.view.version)
    .map((event, index) => ({ event, version: index + 1 }))
    .filter(({ event }) => event.is === "Recalled");
}

function drawSearch({ event, version }, run) {
  const items = event.items ?? [], profile = event.profile ?? [];
  const draw = (title, each) => table(title, [t("Item"), t("Kind"), t("Score"), t("Valid from"), t("Source"), t("Labels")], each.map(drawItem));
  return h("section", { "data-search": version },
    h("h3", {}, h("button", { type: "button", class: "quiet", onclick: () => run.goTo(version) }, `v${version}`), ` ${event.query}`),
    event.fault && h("p", { class: "error" }, event.fault),
    profile.length > 0 && draw(t("Profile"), profile),
    items.length
      ? draw(t("Memory"), items)
      : h("p", { class: "soft" }, t("Nothing found")));
}

function drawItem(each) {
  return h("tr", { "data-item": each.id },
    h("td", { class: "text" }, each.text), h("td", {}, each.kind), h("td", {}, each.score.toFixed(2)),
    h("td", {}, date(each.valid_from)), h("td", {}, each.source ? runLink(each.source) : "–"),
    h("td", {}, (each.labels ?? []).map((label) => h("span", { class: "label" }, label))));
}
