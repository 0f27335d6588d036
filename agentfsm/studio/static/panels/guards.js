// Decisions of guards on calls, with the rule and the sources of the labels that it is about.
import { fill, h } from "../dom.js";
import { t } from "../i18n.js";
import { table } from "../parts.js";

export const guards = {
  id: "guards",
  title: "Guards",
  shows: (run) => listDecisions(run).length > 0,
  mount(host, run) {
    return () => fill(host, table(t("Guards"), [t("Call"), t("Verdict"), t("Rule"), t("Reason"), t("Version")],
      listDecisions(run).map((each) => drawDecision(each, run))));
  },
};

function listDecisions(run) {
  return run.journal.events.slice(0, run.view.version)
    .map((event, index) => ({ event, version: index + 1 }))
    .filter(({ event }) => event.is === "Guarded");
}

function drawDecision({ event, version }, run) {
  const call = run.view.calls.get(event.call_id);
  return h("tr", { "data-decision": event.call_id },
    h("td", {}, `${call?.name ?? ""} (${event.call_id})`), h("td", {}, event.verdict), h("td", {}, event.rule || "–"),
    h("td", { class: "text" }, event.reason || "–"),
    h("td", {}, h("button", { type: "button", class: "quiet", onclick: () => run.goTo(version) }, `v${version}`)));
}
