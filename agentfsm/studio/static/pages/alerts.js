// Alerts: which fire, since when, what to do about each; and the rules that are evaluated.
import { api } from "../api.js";
import { every, fill, h } from "../dom.js";
import { count, date, duration } from "../format.js";
import { t } from "../i18n.js";
import { card, chip, empty, failure, prose, table, time } from "../parts.js";

const REFRESH_MS = 60000;
const DAYS = 1;

export const alerts = {
  path: "alerts",
  title: "Alerts",
  needs: { scope: "admin", allTenants: true },
  mount(main) {
    const content = h("div", {});
    fill(main, h("header", { class: "page" }, h("h1", {}, t("Alerts"))), content);
    async function load() {
      try {
        fill(content, draw(await api.alerts({ days: DAYS })));
      } catch (error) {
        fill(content, failure(error));
      }
    }
    load();
    every(REFRESH_MS, content, load);
  },
};

function draw({ is_whole, alerts: rules, fired }) {
  const byName = new Map(rules.map((each) => [each.name, each]));
  const [now, over] = [fired.filter((each) => each.until === null), fired.filter((each) => each.until !== null)];
  return [
    !is_whole && empty(t("No totals yet"), t("The runs of the store are not all counted yet: workers and servers with agents do so. `agentfsm totals show` says how far that is.")),
    is_whole && (now.length
      ? now.map((each) => drawFiring(each, byName.get(each.alert)))
      : empty(t("No alert fires"), t("The rules below are evaluated over the totals of the store."))),
    over.length > 0 && card(t("Over, in the last day"), drawOver(over)),
    card(t("Rules"), drawRules(rules, new Set(now.map((each) => each.alert)))),
  ];
}

const nameOf = (firing) => Object.values(firing.labels).join(" · ") || t("all agents");
const number = (value) => (value > 1e15 ? "∞" : count(Number(value.toPrecision(4))));

function drawFiring(firing, rule) {
  const { agent } = firing.labels;
  return h("section", { class: "card firing", "data-firing": rule.name },
    h("h2", {}, chip("failed", t("fires")), ` ${rule.name} · ${nameOf(firing)}`),
    h("p", {}, rule.text),
    h("p", {}, t(rule.is_minimum ? "{value}, below {threshold}, since" : "{value}, above {threshold}, since", { value: number(firing.worst), threshold: number(rule.threshold) }), " ", time(firing.since)),
    h("p", {}, h("strong", {}, t("What to do")), ": ", prose(rule.action)),
    agent && h("p", {}, h("a", { href: `#/runs?agent=${encodeURIComponent(agent)}` }, t("its runs"))));
}

function drawOver(over) {
  return table(t("Over, in the last day"), [t("Rule"), t("Of"), [t("Worst")], t("From"), t("Until")], over.map((each) => h("tr", {},
    h("th", { scope: "row" }, each.alert),
    h("td", {}, nameOf(each)),
    h("td", { class: "number" }, number(each.worst)),
    h("td", { class: "nowrap" }, date(each.since)),
    h("td", { class: "nowrap" }, date(each.until)))));
}

function drawRules(rules, firing) {
  return table(t("Rules"), [t("Rule"), t("Status"), [t("Threshold")], t("Window"), [t("At least")]], rules.map((each) => h("tr", { "data-rule": each.name },
    h("th", { scope: "row", class: "rule" }, each.name, h("p", { class: "small" }, each.text, " ", h("span", { class: "soft" }, prose(each.action)))),
    h("td", {}, firing.has(each.name) ? chip("failed", t("fires")) : chip("done", t("quiet"))),
    h("td", { class: "number" }, `${each.is_minimum ? "<" : ">"} ${number(each.threshold)}${each.has_baseline ? " ×" : ""}`),
    h("td", { class: "nowrap" }, duration(each.window_s)),
    h("td", { class: "number" }, each.at_least || "–"))));
}
