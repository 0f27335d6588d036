// The list of runs, live. The store searches, filters, sorts and counts; what is chosen stands in the address.
import { keepAddress } from "../address.js";
import { api } from "../api.js";
import { every, fill, h } from "../dom.js";
import { compact, costOf, count, duration, money } from "../format.js";
import { t } from "../i18n.js";
import { chip, empty, failure, runLink, table, time } from "../parts.js";

const REFRESH_MS = 2000;
// Milliseconds after the last key until a search is sent.
const TYPING_MS = 250;
const PURPOSES = new Map([["", t("production")], ["eval", t("evaluations")], ["what-if", t("what-if runs")]]);
const STATES = ["observe", "think", "act", "reflect", "done", "error"];
const STOP_REASONS = [
  "completed", "cancelled", "max_turns", "token_budget", "cost_budget", "tool_budget", "timeout", "too_many_errors", "loop_detected", "model_error",
  "guard", "stop_condition", "step_failed", "parked",
];
const ORDERS = new Map([["", t("newest first")], ["cost", t("dearest first")], ["duration", t("longest first")]]);
// The fields of the address; those of "More filters" last.
const CHOICES = ["text", "state", "waiting", "purpose", "order", "subagents", "agent", "user", "session"];
const MORE = ["stop_reason", "release", "since", "before", "min_cost_usd", "min_duration_s"];
// What an open run has cost and waits for is read from the run itself: at most so many at once.
const PARALLEL = 3;

// Documents of open runs by id, as long as the version stays.
const documents = new Map();

export const runs = {
  path: "runs",
  title: "Runs",
  mount(main, parameters) {
    const filters = Object.fromEntries([...CHOICES, ...MORE].map((name) => [name, parameters.get(name) ?? ""]));
    let rows = [];
    let after = null;
    let total = null;
    let pages = 1;
    let asked = 0;
    let typing = 0;
    const list = h("div", { class: "runs" });
    const summary = h("p", { class: "soft", role: "status" });
    const search = h("input", {
      type: "search", value: filters.text, placeholder: t("Search prompts, answers, ids"), "aria-label": t("Search"),
      oninput: () => { clearTimeout(typing); typing = window.setTimeout(() => change("text", search.value.trim()), TYPING_MS); },
    });
    const select = (name, label, options) => {
      const element = h("select", { "aria-label": label, onchange: () => change(name, element.value) },
        options.map(([value, text]) => h("option", { value }, text)));
      element.value = filters[name];
      return element;
    };
    const children = h("input", { type: "checkbox", checked: filters.subagents === "true", onchange: () => change("subagents", children.checked ? "true" : "") });
    const input = (name, label) => h("input", { type: "text", value: filters[name], placeholder: label, "aria-label": label, onchange: (event) => change(name, event.target.value.trim()) });
    const amount = (name, label) => h("label", { class: "check" }, label,
      h("input", { type: "number", min: 0, step: "any", value: filters[name], onchange: (event) => change(name, event.target.value) }));
    const moment = (name, label) => h("label", { class: "check" }, label,
      h("input", { type: "datetime-local", value: filters[name], onchange: (event) => change(name, event.target.value) }));
    fill(main,
      h("header", { class: "page" }, h("h1", {}, t("Runs")), summary),
      h("form", { role: "search", onsubmit: (event) => event.preventDefault() },
        h("div", { class: "toolbar" },
          search,
          select("state", t("State"), [["", t("all states")], ...STATES.map((state) => [state, state.toUpperCase()])]),
          select("waiting", t("Waiting"), [["", t("waiting or not")], ["true", t("waiting")], ["false", t("not waiting")]]),
          select("purpose", t("Purpose"), PURPOSES.has(filters.purpose) ? [...PURPOSES] : [...PURPOSES, [filters.purpose, filters.purpose]]),
          select("order", t("Order"), [...ORDERS]),
          input("agent", t("Agent")), input("user", t("User")), input("session", t("Session")), h("label", { class: "check" }, children, t("sub-agents"))),
        h("details", { class: "more-filters", open: MORE.some((name) => filters[name]) }, h("summary", {}, t("More filters")),
          h("div", { class: "toolbar" },
            select("stop_reason", t("Reason of the end"), [["", t("any reason of the end")], ...STOP_REASONS.map((reason) => [reason, t(`stop ${reason}`)])]),
            input("release", t("Release")), moment("since", t("from")), moment("before", t("until")),
            amount("min_cost_usd", t("cost from $")), amount("min_duration_s", t("seconds from"))))),
      list);

    function change(name, value) {
      if (filters[name] === value) return;
      filters[name] = value;
      pages = 1;
      keepAddress("runs", filters);
      list.setAttribute("aria-busy", "true"); // these rows are those of the search before
      load();
    }

    async function load() {
      const question = ++asked;
      try {
        const found = [];
        let next = null;
        let counted = null;
        for (let page = 0; page < pages; page++) {
          const reply = await api.runs({ ...buildQuery(filters), total: page ? "" : "true", after: next });
          if (!page) counted = reply.total;
          found.push(...reply.runs);
          next = reply.after;
          if (!next) break;
        }
        if (question !== asked) return; // another search was begun meanwhile
        [rows, after, total] = [found, next, counted];
        list.removeAttribute("aria-busy");
        draw();
        loadDocuments();
      } catch (error) {
        if (question !== asked) return;
        list.removeAttribute("aria-busy");
        fill(list, failure(error));
      }
    }

    function draw() {
      const waits = rows.filter((row) => ["waiting", "paused"].includes(row.status)).length;
      const number = total === null ? count(rows.length) + (after ? "+" : "") : count(total);
      fill(summary, t("{n} runs", { n: number }), waits > 0 && ` · ${t("{n} of those shown wait", { n: waits })}`,
        filters.order && ` · ${t("only runs that are over, and of which it is known")}`);
      if (!rows.length) return fill(list, emptyList(filters));
      const heads = [t("Status"), t("Task"), t("Agent"), t("User"), [t("Turn")], [t("Tokens")], [t("Cost")], [t("Duration")], t("Updated")];
      return fill(list, table(t("Runs"), heads, rows.map(drawRow)),
        after && h("button", { type: "button", class: "wide", onclick: () => { pages += 1; load(); } }, t("Load more")));
    }

    async function loadDocuments() {
      const missing = rows.filter((row) => !isOver(row) && documents.get(row.id)?.version !== row.version);
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

const isOver = (row) => row.stop_reason !== null;

function buildQuery(filters) {
  const seconds = (text) => (text ? new Date(text).getTime() / 1000 : "");
  return { ...filters, since: seconds(filters.since), before: seconds(filters.before), subagents: filters.subagents || "false" };
}

function drawRow(row) {
  const known = isOver(row) ? undefined : documents.get(row.id);
  const waits = row.status === "waiting" ? known?.pending.map(describeWait).join(", ") : "";
  const cost = isOver(row) ? (row.cost_usd === null ? "–" : money(row.cost_usd)) : known && costOf(known.usage);
  return h("tr", { "data-run": row.id },
    h("td", {}, chip(row.status), row.status === "failed" && h("span", { class: "soft small" }, ` ${t(`stop ${row.stop_reason}`)}`)),
    h("td", { class: "task" }, runLink(row.id, row.prompt || row.id),
      h("span", { class: "id" }, row.id.length > 24 ? `${row.id.slice(0, 24)}…` : row.id, row.parent && ` · ${t("sub-agent's run")}`),
      waits && h("span", { class: "waits" }, waits)),
    h("td", {}, row.agent),
    h("td", {}, row.user ?? ""),
    h("td", { class: "number" }, row.turn),
    h("td", { class: "number" }, compact(row.tokens)),
    h("td", { class: "number" }, cost ?? ""),
    h("td", { class: "number nowrap" }, row.duration_s === null ? "" : duration(row.duration_s)),
    h("td", { class: "nowrap" }, time(row.updated_at)));
}

function describeWait(item) {
  const kinds = { approval: "approval of {tool}", outcome: "outcome of {tool}", question: "answer for {tool}", login: "login for {tool}", task: "task of {tool}", input: "input", pause: "end of the pause", crash: "end of the pause" };
  return t(kinds[item.kind], { tool: item.tool });
}

function emptyList(filters) {
  if (Object.values(filters).some(Boolean)) return empty(t("Nothing found"), t("No run matches these filters."));
  return empty(t("No runs yet"), t("Start one: `agentfsm demo`, or `agentfsm run module:agent \"task\"`. It appears here at once."), " ", h("a", { href: "#/talk" }, t("Talk")));
}
