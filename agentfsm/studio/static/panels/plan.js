// Plans: their steps, what each waits for, and how far they are.
import { fill, h } from "../dom.js";
import { t } from "../i18n.js";
import { chip } from "../parts.js";

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
  const steps = call?.arguments.steps ?? [];
  return h("section", { class: "plan" },
    h("h3", {}, t("Plan {n}", { n: each.number }), " ", call && chip(call.status, t(`call ${call.status}`))),
    each.reason && h("p", { class: "soft" }, each.reason),
    call?.arguments.analysis && h("p", { class: "text" }, call.arguments.analysis),
    h("ol", {}, steps.map((step, index) => drawStep(step, index, each, view))));
}

function drawStep(step, index, each, view) {
  const id = step.id ?? index + 1;
  const call = view.calls.get(`p${each.number}.${id}`) ?? view.calls.get(`${each.call}.${id}`);
  const after = step.after?.length && t("after {steps}", { steps: step.after.join(", ") });
  return h("li", { value: id },
    h("code", {}, step.question || `${step.tool}(${JSON.stringify(step.arguments ?? {})})`),
    " ", chip(call?.status ?? "intended", t(`call ${call?.status ?? "intended"}`)),
    after && h("span", { class: "soft" }, ` ${after}`),
    step.description && h("p", { class: "soft" }, step.description));
}
