// Plans: their steps, what each waits for, and how far they are.
import { fill, h } from "../dom.js";
import { t } from "../i18n.js";
import { chip } from "../parts.js";
import { drawPlanGraph } from "../plan_graph.js";

export const plan = {
  id: "plan",
  title: "Plan",
  shows: (run) => run.view.plans.length > 0,
  mount(host, run) {
    return () => fill(host, run.view.plans.toReversed().map((each) => drawPlan(each, run.view)));
  },
};

function drawPlan(each, view) {
  const call = view.calls.get(each.call);
  const steps = (call?.arguments.steps ?? []).map((step, index) => ({ after: [], ...step, id: step.id ?? index + 1 }));
  const graph = drawPlanGraph(steps.map((step) => ({
    ...step,
    name: step.tool || step.question || step.goal,
    status: findCall(step, each, view)?.status ?? "intended",
  })));
  return h("section", { class: "plan" },
    h("h3", {}, t("Plan {n}", { n: each.number }), " ", call && chip(call.status, t(`call ${call.status}`))),
    each.reason && h("p", { class: "soft" }, each.reason),
    call?.arguments.analysis && h("p", { class: "text" }, call.arguments.analysis),
    graph && h("div", { class: "scroll-x" }, graph),
    h("ol", {}, steps.map((step) => drawStep(step, findCall(step, each, view)))));
}

function findCall(step, each, view) {
  return view.calls.get(`p${each.number}.${step.id}`) ?? view.calls.get(`${each.call}.${step.id}`);
}

function drawStep(step, call) {
  const after = step.after.length > 0 && t("after {steps}", { steps: step.after.join(", ") });
  return h("li", { value: step.id },
    h("code", {}, step.question || `${step.tool}(${JSON.stringify(step.arguments ?? {})})`),
    " ", chip(call?.status ?? "intended", t(`call ${call?.status ?? "intended"}`)),
    after && h("span", { class: "soft" }, ` ${after}`),
    step.description && h("p", { class: "soft" }, step.description));
}
