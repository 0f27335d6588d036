// Roll-outs: weights, targets and results of the arms, the log, and the way back.
import { api } from "../api.js";
import { every, fill, h } from "../dom.js";
import { count, date, duration, money } from "../format.js";
import { t } from "../i18n.js";
import { bar, card, empty, failure, table } from "../parts.js";

const REFRESH_MS = 10000;

export const rollouts = {
  path: "rollouts",
  title: "Roll-outs",
  needs: { scope: "admin", allTenants: true },
  mount(main) {
    const content = h("div", {});
    const problem = h("div", {});
    fill(main, h("header", { class: "page" }, h("h1", {}, t("Roll-outs"))), problem, content);
    async function load() {
      if (content.querySelector("form:focus-within")) return; // somebody writes a reason
      try {
        const found = (await api.rollouts()).rollouts;
        fill(content, found.length
          ? found.map((each) => draw(each, goBack))
          : empty(t("No roll-outs"), t("`agentfsm rollout start` begins one.")));
      } catch (error) {
        fill(content, failure(error));
      }
    }
    async function goBack(name, body) {
      try {
        await api.back(name, body);
        fill(problem);
      } catch (error) {
        fill(problem, failure(error));
      }
      if (document.activeElement instanceof HTMLElement) document.activeElement.blur();
      await load();
    }
    load();
    every(REFRESH_MS, content, load);
  },
};

function draw({ name, log, arms }, goBack) {
  const now = log.at(-1);
  return h("div", { "data-rollout": name }, card(`${name} · ${now.agent || t("experiment")}`,
    h("p", {}, describe(now)),
    drawArms(arms, now),
    now.targets.length > 0 && h("p", { "data-targets": "" }, t("Targets"), ": ", now.targets.map((each) => [h("code", {}, each), " "])),
    now.rules.length > 0 && h("p", { class: "soft" }, t("Rolls back if"), " ", now.rules.join(" · ")),
    now.action !== "kill" && drawForm(name, now, goBack),
    h("details", {}, h("summary", {}, t("Log")), h("ol", {}, log.map((each) => h("li", { value: each.number }, describe(each)))))));
}

function describe(change) {
  const weights = Object.entries(change.weights).map(([arm, weight]) => `${arm} ${weight} %`).join(", ");
  return t("{action} by {by}, {at}: {weights}. {reason}", { action: change.action, by: change.by, at: date(change.at), weights, reason: change.reason });
}

function drawArms(arms, now) {
  const heads = [t("Arm"), t("Release"), [t("Weight")], t("Share"), [t("Open")], [t("Ended")], [t("Failed")], [t("Cost a run")], [t("Time a run")], [t("Rating")]];
  return table(t("Arms"), heads, arms.map((each) => h("tr", { "data-arm": each.arm },
    h("th", { scope: "row" }, each.arm, each.arm === now.base && h("small", {}, ` ${t("base")}`)),
    h("td", {}, each.release || "–"),
    h("td", { class: "number" }, `${each.weight} %`),
    h("td", {}, bar(each.weight / 100)),
    h("td", { class: "number" }, count(each.open), each.stalled > 0 && h("small", {}, ` ${t("{n} stalled", { n: count(each.stalled) })}`)),
    h("td", { class: "number" }, count(each.runs)),
    h("td", { class: "number" }, each.failure_interval ? `${count(each.failed)} (${each.failure_interval.map((share) => Math.round(share * 100)).join("–")} %)` : "–"),
    h("td", { class: "number" }, each.usd === null ? "–" : money(each.usd)),
    h("td", { class: "number" }, each.seconds === null ? "–" : duration(each.seconds)),
    h("td", { class: "number" }, each.rating === null ? "–" : `${each.rating.toFixed(1)} (${count(each.ratings)})`))));
}

function drawForm(name, now, goBack) {
  const arm = h("select", { "aria-label": t("What goes back") },
    h("option", { value: "" }, t("to the plan before")),
    Object.keys(now.weights).filter((each) => each !== now.base).map((each) => h("option", { value: each }, t("arm {arm} to the base", { arm: each }))));
  const reason = h("input", { required: true, maxlength: 1000, placeholder: t("Reason, for the log"), "aria-label": t("Reason, for the log") });
  const send = (event) => {
    event.preventDefault();
    goBack(name, { reason: reason.value, number: now.number, ...(arm.value && { arm: arm.value }) });
  };
  return h("form", { class: "toolbar", onsubmit: send }, arm, reason, h("button", { type: "submit" }, t("Roll back")));
}
