// Costs: sums over runs by agent, model, purpose, user, day or tenant; spending limits; a forecast of the month.
import { keepAddress } from "../address.js";
import { api } from "../api.js";
import { fill, h } from "../dom.js";
import { compact, count, date, money } from "../format.js";
import { t } from "../i18n.js";
import { bar, card, empty, failure, table } from "../parts.js";

const GROUPS = ["agent", "model", "purpose", "user", "day", "tenant"];
const DAYS = ["7", "1", "30", "all"];
const DAY_S = 86400;

export const costs = {
  path: "costs",
  title: "Costs",
  needs: { scope: "approve" },
  mount(main, parameters) {
    const chosen = { by: parameters.get("by") ?? "agent", days: parameters.get("days") ?? "7" };
    const content = h("div", {});
    const select = (name, label, options) => {
      const element = h("select", { "aria-label": label, onchange: () => change(name, element.value) },
        options.map(([value, text]) => h("option", { value }, text)));
      element.value = chosen[name];
      if (element.selectedIndex < 0) element.value = chosen[name] = options[0][0];
      return element;
    };
    fill(main,
      h("header", { class: "page" }, h("h1", {}, t("Costs"))),
      h("form", { class: "toolbar", onsubmit: (event) => event.preventDefault() },
        select("by", t("Rows"), GROUPS.map((each) => [each, t(`by ${each}`)])),
        select("days", t("Time"), DAYS.map((each) => [each, each === "all" ? t("all") : t("the last {n} days", { n: each })]))),
      content);

    function change(name, value) {
      chosen[name] = value;
      keepAddress("costs", chosen);
      load();
    }

    async function load() {
      const since = chosen.days !== "all" ? Math.floor(Date.now() / 1000) - Number(chosen.days) * DAY_S : undefined;
      try {
        fill(content, draw(await api.costs({ by: chosen.by, since })));
      } catch (error) {
        fill(content, failure(error));
      }
    }
    load();
  },
};

function draw(found) {
  const { total, forecast } = found;
  const rate = forecast && t("{usd} in {days} days = {rate} a day; {n} days at this rate: {month}", {
    usd: money(total.usd, total), days: forecast.days.toFixed(1), rate: money(forecast.usd_per_day, total), n: forecast.month_days, month: money(forecast.month_usd, total),
  });
  return [
    found.rows.length
      ? card(t(`by ${found.by}`), drawRows(found), !found.is_whole && h("p", { class: "soft", "data-partial": "" }, t("only the newest runs: the totals of the store are not complete")), found.uncounted > 0 && h("p", { class: "soft", "data-uncounted": "" }, t("{n} runs were released since they were counted", { n: count(found.uncounted) })), found.unreadable > 0 && h("p", { class: "soft", "data-unreadable": "" }, t("{n} journals could not be read: their costs are missing", { n: count(found.unreadable) })), found.pruned_before > found.since && h("p", { class: "soft", "data-pruned": "" }, t("runs from before {at} were removed; their costs are in the totals only", { at: date(found.pruned_before) })), found.lost_tokens > 0 && h("p", { class: "soft", "data-lost": "" }, t("{n} tokens of input were read anew that the provider had had in its prompt cache", { n: count(found.lost_tokens) }), Object.entries(found.lost_as_reported).map(([reason, tokens]) => ` · ${reason} ${count(tokens)}`)))
      : empty(t("No costs"), t("No run of this time has used a model or a tool that costs money.")),
    found.rows.length > 0 && card(t("This month"), h("p", { "data-forecast": "" }, rate || t("No forecast: {why}", { why: t(found.forecast_gap) }))),
    found.windows.length > 0 && card(t("Spending limits"), drawWindows(found.windows)),
  ];
}

function drawRows(found) {
  const most = Math.max(...found.rows.map((row) => row.usd)) || 1;
  const heads = [t(`group ${found.by}`), [t("Cost")], t("Compared"), [t("Runs")], [t("Input")], [t("Cached")], [t("Output")]];
  const row = (name, each, isTotal) => h("tr", { "data-row": name, class: isTotal ? "total" : "" },
    h("th", { scope: "row" }, name),
    h("td", { class: "number" }, money(each.usd, each)),
    h("td", {}, !isTotal && bar(each.usd / most)),
    h("td", { class: "number" }, count(each.runs)),
    h("td", { class: "number" }, compact(each.input_tokens)),
    h("td", { class: "number" }, compact(each.cached_tokens)),
    h("td", { class: "number" }, compact(each.output_tokens)));
  return table(t("Costs"), heads, [...found.rows.map((each) => row(each.name, each)), row(t("all"), found.total, true)]);
}

function drawWindows(windows) {
  const heads = [t("Window"), [t("Spent")], t("Share"), [t("Reserved")], [t("Limit")], [t("Remains")], [t("Refused")], t("Resets")];
  return table(t("Spending limits"), heads, windows.map((each) => {
    const limit = each.limits_usd[0] ?? 0;
    const share = limit ? each.spent_usd / limit : 0;
    return h("tr", { "data-window": each.name },
      h("th", { scope: "row" }, each.name),
      h("td", { class: "number" }, money(each.spent_usd)),
      h("td", {}, bar(share, share >= 1 ? "stopped" : "")),
      h("td", { class: "number" }, money(each.reserved_usd)),
      h("td", { class: "number" }, each.limits_usd.map((usd) => money(usd)).join(", ")),
      h("td", { class: "number" }, limit ? money(Math.max(0, limit - each.spent_usd - each.reserved_usd)) : "–"),
      h("td", { class: "number" }, count(each.refused)),
      h("td", {}, date(each.window.ends_at)));
  }));
}
