// Labels of what the run has read and done, each with its first source.
import { fill, h } from "../dom.js";
import { t } from "../i18n.js";
import { runLink, table } from "../parts.js";

export const labels = {
  id: "labels",
  title: "Labels",
  shows: (run) => (run.details?.labels.length ?? 0) > 0,
  mount(host, run) {
    return () => {
      const found = run.details.labels.filter((each) => each.run_id !== run.id || each.version <= run.view.version);
      fill(host, table(t("Labels"), [t("Label"), t("First source"), t("Version")], found.map((each) => drawLabel(each, run))));
    };
  },
};

function drawLabel(each, run) {
  const source = each.call_id ? `${each.name} (${each.call_id})` : t(each.name);
  const place = each.run_id === run.id
    ? h("button", { type: "button", class: "quiet", onclick: () => run.goTo(each.version) }, `v${each.version}`)
    : runLink(each.run_id, `${each.run_id} v${each.version}`, each.version);
  return h("tr", { "data-label": each.label },
    h("td", {}, h("span", { class: "label" }, each.label)), h("td", {}, source), h("td", {}, place));
}
