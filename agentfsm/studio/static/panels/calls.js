// Calls: who asked for them, who decided, how they ended.
import { fill, h } from "../dom.js";
import { callTitle, duration } from "../format.js";
import { t } from "../i18n.js";
import { chip, decisionsOf, empty, table } from "../parts.js";

const PAGE = 200;

export const calls = {
  id: "calls",
  title: "Calls",
  shows: (run) => run.view.calls.size > 0,
  mount(host, run) {
    return () => {
      const all = [...run.view.calls.values()];
      if (!all.length) return fill(host, empty(t("No calls"), t("The model has not called a tool.")));
      const rows = all.slice(-PAGE).map((call) => h("tr", { "data-call": call.id },
        h("td", { class: "number" }, call.id),
        h("td", {}, h("code", {}, callTitle(call, 80))),
        h("td", {}, chip(call.status, t(`call ${call.status}`))),
        h("td", { class: "number" }, call.result ? duration(call.result.duration_s ?? 0) : "–"),
        h("td", { class: "number" }, Math.max(call.attempts, call.result ? (call.result.attempts ?? 1) : 0)),
        h("td", {}, decisionsOf(call))));
      return fill(host,
        all.length > PAGE && h("p", { class: "soft" }, t("The last {n} of {all} calls.", { n: PAGE, all: all.length })),
        table(t("Calls"), [t("Call"), t("Tool and arguments"), t("Status"), [t("Time")], [t("Attempts")], t("Decisions")], rows));
    };
  },
};
