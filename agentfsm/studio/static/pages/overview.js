// Overview: open runs by status, and what the agents did by hour or day: tasks, stop reasons, tokens, cost.
import { keepAddress } from "../address.js";
import { api } from "../api.js";
import { drawBars } from "../bar_chart.js";
import { permits, readCaller } from "../caller.js";
import { every, fill, h } from "../dom.js";
import { compact, count, date, day, duration, hour, money } from "../format.js";
import { t } from "../i18n.js";
import { bar, card, empty, facts, failure, table } from "../parts.js";
import { countWaiting } from "../waits.js";

const REFRESH_MS = 15000;
const DAYS = ["7", "1", "30", "365"];
const DAY_S = 86400;
const TOTALS = { scope: "admin", allTenants: true };

export const overview = {
  path: "overview",
  title: "Overview",
  needs: { scope: "approve" },
  async mount(main, parameters) {
    const caller = await readCaller();
    const content = h("div", {});
    const days = h("select", { "aria-label": t("Time"), onchange: () => { keepAddress("overview", { days: days.value }); load(); } },
      DAYS.map((each) => h("option", { value: each }, t("the last {n} days", { n: each }))));
    days.value = parameters.get("days") ?? "7";
    if (days.selectedIndex < 0) days.value = DAYS[0];
    fill(main, h("header", { class: "page" }, h("h1", {}, t("Overview"))), h("form", { class: "toolbar", onsubmit: (event) => event.preventDefault() }, days), content);

    async function load() {
      const chosen = days.value;
      try {
        const [now, report] = await Promise.all([api.open(), permits(caller, TOTALS) ? api.metrics({ days: chosen }) : readDays(Number(chosen))]);
        if (chosen === days.value) fill(content, drawOpen(now), report.summary === undefined ? drawCosts(report) : drawMetrics(report));
      } catch (error) {
        fill(content, failure(error));
      }
    }
    await load();
    every(REFRESH_MS, content, load);
  },
};

/** Read the costs of a tenant by day: its key does not see the totals of all tenants. */
const readDays = (days) => api.costs({ by: "day", since: Math.floor(Date.now() / 1000) - days * DAY_S });

function drawOpen(found) {
  const { running, queued, idle } = found.open;
  const more = found.is_whole ? "" : "+";
  const link = (page, number) => h("a", { href: `#/${page}` }, count(number) + more);
  return card(t("Open runs"), facts([
    [t("running"), link("workers", running)],
    [t("queued"), link("workers", queued)],
    [t("idle"), link("workers", idle)],
    [t("wait for a person"), link("waiting", countWaiting(found))],
  ]));
}

function drawMetrics({ is_whole, summary, steps, step_s }) {
  if (!is_whole) return empty(t("No totals yet"), t("The runs of the store are not all counted yet: workers and servers with agents do so. `agentfsm totals show` says how far that is."));
  const share = (value) => (value === null ? "–" : `${(100 * value).toFixed(1)} %`);
  const name = (at) => (step_s < DAY_S ? hour(at) : day(at));
  const sum = (field) => steps.reduce((total, each) => total + each[field], 0);
  const [done, failed, cancelled, usd] = ["done", "failed", "cancelled", "usd"].map(sum);
  const cost = money(usd, { unpriced: steps.some((each) => each.unpriced) });
  const tasks = t("Tasks by end: {done} completed, {failed} failed, {cancelled} cancelled.", { done: count(done), failed: count(failed), cancelled: count(cancelled) });
  return [
    h("div", { class: "cards" }, card(t("Tasks of production"), facts([
      [t("Ended"), count(done + failed + cancelled)],
      [t("Success"), share(summary.task_success_rate)],
      [t("Errors"), share(summary.error_rate)],
      [t("Time a run"), summary.latency_s && duration(summary.latency_s.mean), summary.latency_s && `P95 ${duration(summary.latency_s.p95)}`],
      [t("Turns a run"), summary.avg_rounds_per_task?.toFixed(1)],
      [t("Tokens"), compact(summary.input_tokens + summary.output_tokens)],
      [t("Rating"), summary.user_satisfaction?.toFixed(1), `(${count(summary.ratings)})`],
    ]),
    drawBars(tasks, steps.map((each) => ({ name: name(each.at), title: `${date(each.at)}: ${each.done} / ${each.failed} / ${each.cancelled}`, parts: [{ kind: "good", value: each.done }, { kind: "bad", value: each.failed }, { kind: "soft", value: each.cancelled }] })), count),
    h("p", { class: "soft small" }, tasks)),
    card(t("Cost"), drawBars(t("Cost: {usd}.", { usd: cost }), steps.map((each) => ({ name: name(each.at), title: `${date(each.at)}: ${money(each.usd, each)}`, parts: [{ kind: "cost", value: each.usd }] })), money),
      h("p", { class: "soft small" }, t("Cost: {usd}.", { usd: cost })),
      h("details", {}, h("summary", {}, t("Figures")), drawSteps(steps, name)))),
    h("div", { class: "cards" },
      done + failed + cancelled > 0 && card(t("Stop reasons"), drawOutcomes(summary.outcomes)),
      summary.tools.length > 0 && card(t("Tools"), drawTools(summary.tools))),
  ];
}

function drawSteps(steps, name) {
  return table(t("Figures"), [t("Time"), [t("completed")], [t("failed")], [t("cancelled")], [t("Tokens")], [t("Cost")]], steps.filter((each) => each.done + each.failed + each.cancelled + each.tokens + each.usd > 0).reverse().map((each) => h("tr", {},
    h("th", { scope: "row", title: date(each.at) }, name(each.at)),
    [each.done, each.failed, each.cancelled].map((number) => h("td", { class: "number" }, count(number))),
    h("td", { class: "number" }, compact(each.tokens)),
    h("td", { class: "number" }, money(each.usd, each)))));
}

function drawOutcomes(outcomes) {
  const rows = Object.entries(outcomes).sort(([, one], [, other]) => other - one);
  const all = rows.reduce((total, [, number]) => total + number, 0);
  return table(t("Stop reasons"), [t("Stop reason"), [t("Runs")], t("Share")], rows.map(([reason, number]) => h("tr", { "data-outcome": reason },
    h("th", { scope: "row" }, t(`stop ${reason}`)),
    h("td", { class: "number" }, count(number)),
    h("td", {}, bar(number / all, reason === "completed" ? "" : "stopped")))));
}

function drawTools(tools) {
  return table(t("Tools"), [t("Tool"), [t("Calls")], [t("Errors")], [t("Time")]], tools.map((each) => h("tr", {},
    h("th", { scope: "row" }, each.tool),
    h("td", { class: "number" }, count(each.calls)),
    h("td", { class: "number" }, each.tool_error_rate === null ? "–" : `${(100 * each.tool_error_rate).toFixed(1)} %`),
    h("td", { class: "number" }, each.duration_s ? duration(each.duration_s.mean) : "–"))));
}

function drawCosts({ rows, total }) {
  if (!rows.length) return empty(t("No costs"), t("No run of this time has used a model or a tool that costs money."));
  return card(t("Cost"),
    drawBars(t("Cost: {usd}.", { usd: money(total.usd, total) }), rows.map((each) => ({ name: each.name.slice(5), title: `${each.name}: ${money(each.usd, each)}`, parts: [{ kind: "cost", value: each.usd }] })), money),
    h("p", { class: "soft small" }, t("Outcomes and alerts are about all tenants: they need a key without one, with the scope `admin`.")));
}
