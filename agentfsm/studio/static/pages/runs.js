// The list of runs, live, with search and filters.
import { keepAddress } from "../address.js";
import { api } from "../api.js";
import { every, fill, h } from "../dom.js";
import { compact, costOf, count } from "../format.js";
import { t } from "../i18n.js";
import { chip, empty, failure, runLink, table, time } from "../parts.js";

const REFRESH_MS = 2000;
const PURPOSES = new Map([["", t("production")], ["eval", t("evaluations")]]);
const STATES = ["observe", "think", "act", "reflect", "done", "error"];
// Costs and waits are read from the run itself: at most so many at once.
const PARALLEL = 3;

// Run documents by id, as long as the version stays.
const documents = new Map();

export const runs = {
  path: "runs",
  title: "Runs",
  mount(main, parameters) {
    const filters = { waiting: parameters.get("waiting") ?? "", state: parameters.get("state") ?? "", agent: parameters.get("agent") ?? "", user: parameters.get("user") ?? "", session: parameters.get("session") ?? "", purpose: parameters.get("purpose") ?? "" };
    let rows = [];
    let after = null;
    let pages = 1;
    const list = h("div", { class: "runs" });
    const summary = h("p", { class: "soft", role: "status" });
    const search = h("input", { type: "search", placeholder: t("Search prompt, id, agent, user"), "aria-label": t("Search"), oninput: draw });
    const select = (name, label, options) => {
      const element = h("select", { "aria-label": label, onchange: () => change(name, element.value) },
        options.map(([value, text]) => h("option", { value }, text)));
      element.value = filters[name];
      return element;
    };
    const children = h("input", { type: "checkbox", onchange: draw });
    const input = (name, label) => h("input", { type: "text", value: filters[name], placeholder: label, "aria-label": label, onchange: (event) => change(name, event.target.value.trim()) });
    fill(main,
      h("header", { class: "page" }, h("h1", {}, t("Runs")), summary),
      h("form", { class: "toolbar", role: "search", onsubmit: (event) => event.preventDefault() },
        search,
        select("state", t("State"), [["", t("all states")], ...STATES.map((state) => [state, state.toUpperCase()])]),
        select("waiting", t("Waiting"), [["", t("waiting or not")], ["true", t("waiting")], ["false", t("not waiting")]]),
        select("purpose", t("Purpose"), PURPOSES.has(filters.purpose) ? [...PURPOSES] : [...PURPOSES, [filters.purpose, filters.purpose]]),
        input("agent", t("Agent")), input("user", t("User")), input("session", t("Session")), h("label", { class: "check" }, children, t("sub-agents"))),
      list);

    function change(name, value) {
      filters[name] = value;
      pages = 1;
      keepAddress("runs", filters);
      load();
    }

    async function load() {
      try {
        const found = [];
        after = null;
        for (let page = 0; page < pages; page++) {
          const reply = await api.runs({ ...filters, after });
          found.push(...reply.runs);
          after = reply.after;
          if (!after) break;
        }
        rows = found;
        draw();
        loadDocuments();
      } catch (error) {
        fill(list, failure(error));
      }
    }

    function draw() {
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      const texts = (row) => [row.prompt, row.id, row.agent, row.user, row.session].join(" ").toLowerCase();
      const shown = rows.filter((row) => (children.checked || !row.parent) && words.every((word) => texts(row).includes(word)));
      const waits = rows.filter((row) => ["waiting", "paused"].includes(row.status)).length;
      fill(summary, t("{n} runs", { n: count(rows.length) + (after ? "+" : "") }), waits > 0 && ` · ${t("{n} waiting", { n: waits })}`);
      if (!rows.length) return fill(list, emptyList(filters));
      if (!shown.length) return fill(list, empty(t("Nothing found"), t("No run on this page matches the search.")));
      const heads = [t("Status"), t("Task"), t("Agent"), t("User"), [t("Turn")], [t("Tokens")], [t("Cost")], t("Updated")];
      return fill(list, table(t("Runs"), heads, shown.map(drawRow)),
        after && h("button", { type: "button", class: "wide", onclick: () => { pages += 1; load(); } }, t("Load more")));
    }

    async function loadDocuments() {
      const missing = rows.filter((row) => documents.get(row.id)?.version !== row.version);
      const next = async () => {
        for (let row = missing.shift(); row && main.isConnected; row = missing.shift()) {
          const found = await api.run(row.id).catch(() => null);
          if (found) documents.set(row.id, found);
        }
      };
      if (!missing.length) return;
      await Promise.all(Array.from({ length: PARALLEL }, next));
      draw();
    }

    load();
    every(REFRESH_MS, list, load);
  },
};

function drawRow(row) {
  const known = documents.get(row.id);
  const waits = row.status === "waiting" ? known?.pending.map(describeWait).join(", ") : "";
  return h("tr", { "data-run": row.id },
    h("td", {}, chip(row.status), row.status === "failed" && h("span", { class: "soft small" }, ` ${t(`stop ${row.stop_reason}`)}`)),
    h("td", { class: "task" }, runLink(row.id, row.prompt || row.id),
      h("span", { class: "id" }, row.id.length > 24 ? `${row.id.slice(0, 24)}…` : row.id, row.parent && ` · ${t("sub-agent's run")}`),
      waits && h("span", { class: "waits" }, waits)),
    h("td", {}, row.agent),
    h("td", {}, row.user ?? ""),
    h("td", { class: "number" }, row.turn),
    h("td", { class: "number" }, compact(row.tokens)),
    h("td", { class: "number" }, known ? costOf(known.usage) : ""),
    h("td", { class: "nowrap" }, time(row.updated_at)));
}

function describeWait(item) {
  const kinds = { approval: "approval of {tool}", outcome: "outcome of {tool}", question: "answer for {tool}", login: "login for {tool}", input: "input", pause: "end of the pause", crash: "end of the pause" };
  return t(kinds[item.kind], { tool: item.tool });
}

function emptyList(filters) {
  if (Object.values(filters).some(Boolean)) return empty(t("Nothing found"), t("No run matches these filters."));
  return empty(t("No runs yet"), t("Start one: `agentfsm demo`, or `agentfsm run module:agent \"task\"`. It appears here at once."));
}
