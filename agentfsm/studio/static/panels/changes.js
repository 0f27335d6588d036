// Compare two versions or two runs, replay the run against the current agent, list its forks.
import { api } from "../api.js";
import { fill, h } from "../dom.js";
import { t } from "../i18n.js";
import { messageText } from "../messages.js";
import { actionButton, empty, runLink } from "../parts.js";
import { RunModel } from "../run_model.js";
import { traceView } from "../trace_view.js";

export const changes = {
  id: "changes",
  title: "Compare and replay",
  shows: (run) => run.view.version > 0,
  mount(host, run) {
    const number = (label) => h("input", { type: "number", min: 0, placeholder: t("Newest"), "aria-label": label });
    const from = number(t("First version"));
    const to = number(t("Second version"));
    const other = h("input", { type: "text", placeholder: t("the same run"), "aria-label": t("Other run"), oninput: () => {
      from.value = to.value = ""; // the versions of two runs have nothing to do with each other
      if (!other.value) suggest();
    } });
    const compared = h("div", { "aria-live": "polite" });
    const traces = h("div", {});
    const replayed = h("div", { "aria-live": "polite" });
    let updateTrace = () => {};
    function suggest() {
      from.value ||= String(Math.max(0, run.view.version - 1));
      to.value ||= String(run.view.version);
    }

    async function compare() {
      const id = other.value.trim();
      const found = await api.diff(run.id, { at: from.value, to: to.value, other: id });
      fill(compared, drawDiff(found));
      fill(traces);
      if (id && id !== run.id) await showTraces(id);
    }
    async function showTraces(id) {
      const second = new RunModel(id, run.machine, () => views[1].update());
      const views = [run, second].map(traceView);
      await second.read();
      fill(traces, h("div", { class: "side-by-side" }, [run, second].map((each, index) =>
        h("section", { "aria-label": each.id }, h("p", { class: "soft" }, runLink(each.id, each.details.prompt || each.id)), views[index].element))));
      updateTrace = views[0].update;
      views.forEach((view) => view.update());
    }
    async function replay() {
      fill(replayed, drawReplay(await api.replay(run.id), run));
    }
    fill(host,
      h("h3", {}, t("Compare")),
      h("form", { class: "toolbar", onsubmit: (event) => event.preventDefault() },
        t("version"), from, t("with version"), to, t("of"), other,
        actionButton(t("Compare"), compare)),
      compared,
      traces,
      h("h3", {}, t("Replay")),
      h("p", { class: "soft" }, t("Checks which requests the current agent would send differently. No model and no tool is called.")),
      actionButton(t("Replay"), replay),
      replayed);
    return () => {
      if (!other.value) suggest();
      updateTrace();
    };
  },
};

function drawDiff(found) {
  const changed = Object.entries(found.changed).map(([name, [before, after]]) => `  ${name}: ${JSON.stringify(before)} → ${JSON.stringify(after)}`);
  const calls = Object.entries(found.calls).map(([id, [before, after]]) => `  ${id}: ${before ?? "–"} → ${after ?? "–"}`);
  const agent = found.agent.map((words) => `  ${words}`);
  const messages = [...found.removed.map((each) => `- ${messageText(each)}`), ...found.added.map((each) => `+ ${messageText(each)}`)];
  const lines = [...agent, ...changed, ...calls, ...messages];
  if (!lines.length) return empty(t("No difference"), t("The two are the same."));
  return [
    h("p", { class: "soft" }, `${found.before.id} v${found.before.version} → ${found.after.id} v${found.after.version} · ${t("{n} messages in common", { n: found.shared })}`),
    h("pre", { class: "diff", tabindex: 0 }, lines.map((line) => h("span", { class: { "+": "added", "-": "removed" }[line[0]] ?? "" }, line))),
  ];
}

function drawReplay(found, run) {
  const summary = t("{n} requests compared, {m} would differ.", { n: found.checked, m: found.divergences.length });
  return [
    h("p", { class: found.divergences.length ? "error" : "sent", role: "status" }, summary),
    h("ul", {}, found.divergences.map((each) =>
      h("li", {}, runLink(run.id, t("turn {n}", { n: each.turn }), each.version), `: ${each.what.join("; ")}`))),
  ];
}
