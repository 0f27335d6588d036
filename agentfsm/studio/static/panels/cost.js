// Cost by purpose, and by turn.
import { fill, h, s } from "../dom.js";
import { costOf, count } from "../format.js";
import { t } from "../i18n.js";
import { tokensOf } from "../journal.js";
import { bar, table } from "../parts.js";

const HEIGHT = 90;
const TURNS = 60;

export const cost = {
  id: "cost",
  title: "Cost",
  shows: () => true,
  mount(host, run) {
    return () => {
      const { view } = run;
      const total = tokensOf(view.usage) || 1;
      const row = (name, usage, isTotal) => h("tr", { class: isTotal ? "total" : "", "data-purpose": name },
        h("th", { scope: "row" }, t(`purpose ${name}`)),
        h("td", { class: "number" }, count(usage.input_tokens)),
        h("td", { class: "number" }, count(usage.cached_tokens)),
        h("td", { class: "number" }, count(usage.output_tokens)),
        h("td", { class: "number" }, costOf(usage)),
        h("td", {}, bar(tokensOf(usage) / total)));
      const heads = [t("Purpose"), [t("Input")], [t("Cached")], [t("Output")], [t("Cost")], t("Share of tokens")];
      const rows = [...view.purposes].map(([name, usage]) => row(name, usage));
      fill(host, table(t("Cost by purpose"), heads, [...rows, row("all", view.usage, true)]), drawMisses(view.turns), drawTurns(view.turns.slice(-TURNS)));
    };
  },
};

/** List the turns of which the provider says why it could not read all from its prompt cache. */
function drawMisses(turns) {
  const missed = turns.filter((turn) => turn.event.message?.cache_report?.reason).slice(-TURNS);
  return missed.length > 0 && [
    h("h3", {}, t("Prompt cache, by the provider")),
    h("ul", {}, missed.map(({ number, event: { message: { cache_report: report } } }) => h("li", { "data-missed": number },
      `${t("turn {n}", { n: number })}: ${report.reason}${report.missed_tokens ? `, ${count(report.missed_tokens)} ${t("tokens")}` : ""}`))),
  ];
}

function drawTurns(turns) {
  if (turns.length < 2) return null;
  const most = Math.max(1, ...turns.map((turn) => tokensOf(turn.usage)));
  const width = Math.min(30, 900 / turns.length);
  const size = (tokens) => (tokens / most) * (HEIGHT - 16);
  const columns = turns.map((turn, index) => {
    const [input, output] = [size(turn.usage.input_tokens ?? 0), size(turn.usage.output_tokens ?? 0)];
    const x = index * width;
    return s("g", {},
      s("title", {}, `${t("turn {n}", { n: turn.number })}: ${count(turn.usage.input_tokens ?? 0)} + ${count(turn.usage.output_tokens ?? 0)}`),
      s("rect", { class: "input", x, y: HEIGHT - 14 - input, width: width - 3, height: input, rx: 2 }),
      s("rect", { class: "output", x, y: HEIGHT - 14 - input - output, width: width - 3, height: output, rx: 2 }),
      (turns.length < 30 || index % 5 === 0) && s("text", { class: "soft", x: x + 1, y: HEIGHT - 2 }, turn.number));
  });
  return [
    h("h3", {}, t("Tokens of each turn")),
    h("p", { class: "legend" }, h("span", { class: "key input" }, t("Input")), h("span", { class: "key output" }, t("Output"))),
    h("div", { class: "scroll-x" }, s("svg", { class: "columns", viewBox: `0 0 ${turns.length * width} ${HEIGHT}`, role: "img", "aria-label": t("Tokens of each turn") }, columns)),
  ];
}
