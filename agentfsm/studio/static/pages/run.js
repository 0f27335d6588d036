// A run: its facts, the machine, its panels, what waits, and travel over its versions.
import { keepAddress } from "../address.js";
import { api, once } from "../api.js";
import { every, fill, h } from "../dom.js";
import { openFork } from "../fork.js";
import { clock, compact, costOf, count, date, duration, money } from "../format.js";
import { t } from "../i18n.js";
import { tokensOf, undoneOf } from "../journal.js";
import { drawMachine } from "../machine.js";
import { markdown } from "../markdown.js";
import { PANELS } from "../panels/index.js";
import { summarise } from "../panels/events.js";
import { actionButton, chip, failure, facts, runLink } from "../parts.js";
import { OVER, RunModel } from "../run_model.js";
import { waitsBox } from "../waits.js";

// Milliseconds between two readings of the status, which changes without an event when a process dies.
const STATUS_MS = 4000;
const STATUS = { done: "done", error: "failed" };

export const run = {
  async mount(main, parameters, id) {
    const machine = await api.machine();
    const parts = {};
    const model = new RunModel(id, machine, () => draw(model, parts));
    build(main, model, parts, parameters);
    every(STATUS_MS, parts.machine, () => model.details && !OVER.includes(model.details.status) && model.readDetails());
    await model.open();
    return () => model.close();
  },
};

function build(main, model, parts, parameters) {
  parts.main = main;
  parts.wanted = parameters.get("v") === null ? null : Number(parameters.get("v"));
  parts.header = h("header", { class: "page run" }, h("h1", {}, model.id), h("p", { class: "soft", role: "status" }, t("Loading…")));
  parts.facts = h("div", {});
  parts.machine = h("div", {});
  parts.travel = buildTravel(model);
  parts.panels = buildPanels(model, parts, parameters.get("panel"));
  parts.waits = waitsBox(model);
  parts.outcome = h("div", {});
  parts.latest = h("ol", { class: "latest" });
  parts.actions = buildActions(model);
  fill(main, h("div", { class: "run-page" },
    h("div", { class: "run-main" },
      parts.header, parts.facts,
      h("section", { class: "card" }, h("h2", {}, t("Machine")), parts.machine),
      parts.panels.element,
      parts.travel.element),
    h("aside", { class: "run-side", "aria-label": t("Decisions and controls") },
      parts.waits.element, parts.outcome, parts.actions.element, h("h2", {}, t("Latest events")), parts.latest)));
}

function draw(model, parts) {
  if (model.error) return void fill(parts.main, failure(model.error, h("a", { href: "#/runs" }, t("To the runs"))));
  if (parts.wanted !== null && model.journal.version >= parts.wanted) {
    const { wanted } = parts;
    parts.wanted = null;
    return model.goTo(wanted);
  }
  keepView(model, parts);
  drawHeader(model, parts);
  drawFacts(model, parts);
  fill(parts.machine, drawMachine(model.machine.table, model.view));
  parts.waits.update();
  drawOutcome(model, parts);
  drawLatest(model, parts);
  parts.actions.update();
  parts.travel.update();
  parts.panels.update();
}

/** Keep the version and the panel in the address. */
function keepView(model, parts) {
  keepAddress(`runs/${encodeURIComponent(model.id)}`, { v: model.isLive ? "" : String(model.view.version), panel: parts.panels.chosen() });
}

function statusOf(model) {
  if (model.isLive && model.details) return model.details.status;
  return STATUS[model.view.state] ?? "running";
}

function drawHeader(model, parts) {
  const { details, view } = model;
  if (!details) return;
  const status = statusOf(model);
  const reason = view.stop && status === "failed" ? t(`stop ${view.stop.reason}`) : null;
  const title = details.prompt.replace(/\s+/g, " ");
  const key = JSON.stringify([status, reason, model.status, model.isLive, title]);
  if (parts.headerKey === key) return;
  parts.headerKey = key;
  document.title = `${title.slice(0, 60)} · agentfsm studio`;
  const live = { live: status === "running" && model.isLive ? t("live") : "", reconnecting: t("reconnecting…"), complete: "" }[model.status] ?? model.status;
  fill(parts.header,
    h("h1", {}, title.length > 160 ? `${title.slice(0, 160)}…` : title || model.id),
    h("div", { class: "line" },
      chip(status),
      reason && h("span", { class: "soft" }, reason),
      !model.isLive && chip("past", t("past version")),
      live && h("span", { class: `connection ${model.status}`, role: "status" }, live),
      h("span", { class: "soft" }, [details.agent, details.agent_version].filter(Boolean).join(" ")),
      details.user && h("span", { class: "soft" }, details.user),
      details.session && h("a", { href: `#/runs?session=${encodeURIComponent(details.session)}` }, details.session),
      details.parent && h("span", {}, `${t("called by")} `, runLink(details.parent)),
      details.caller && h("span", {}, `${t("started by")} `, runLink(details.caller.replace(/\/[^/]*$/, ""))),
      details.answered_from && h("span", {}, `${t("answer of")} `, runLink(details.answered_from.run_id)),
      details.forked_from && h("span", {}, `${t("forked from")} `, runLink(details.forked_from, null, details.forked_at), ` v${details.forked_at}`),
      details.withhold && chip("past", t("calls withheld")),
      h("span", { class: "id" }, model.id),
      h("span", { class: "soft" }, date(details.created_at))));
}

function drawFacts(model, parts) {
  const { view, details } = model;
  const limits = details?.limits ?? {};
  const waited = view.waited + (isWaiting(model) ? Math.max(0, Date.now() / 1000 - view.updatedAt) : 0);
  const of = (value) => (value === null || value === undefined ? null : t("of {limit}", { limit: value }));
  fill(parts.facts, facts([
    [t("turns"), count(view.turns.length), of(limits.turns)],
    [t("tokens"), count(tokensOf(view.usage)), of(limits.tokens && compact(limits.tokens))],
    [t("cost"), costOf(view.usage), of(limits.usd && money(limits.usd))],
    [t("active"), duration(view.seconds), of(limits.seconds && duration(limits.seconds))],
    [t("waiting"), waited > 0.5 ? duration(waited) : "–"],
    [t("version"), `v${view.version}`, model.isLive ? null : of(model.journal.version)],
  ]));
}

const isWaiting = (model) => model.isLive && ["waiting", "paused"].includes(model.details?.status);

function drawOutcome(model, parts) {
  const { stop, turns } = model.view;
  const key = JSON.stringify(stop);
  if (parts.outcomeKey === key) return;
  parts.outcomeKey = key;
  if (!stop) return void fill(parts.outcome);
  const isDone = stop.reason === "completed";
  const undone = turns.length > 0 && undoneOf(turns.at(-1).event);
  const text = isDone ? turns.at(-1)?.event.message?.text : stop.message;
  fill(parts.outcome, h("section", { class: `result-card ${isDone ? "done" : "failed"}` },
    h("h2", {}, isDone ? t("Answer") : t(`stop ${stop.reason}`)), isDone ? markdown(text ?? "") : h("p", { class: "text" }, text),
    undone && h("p", { class: "text undone" }, h("strong", {}, t("It says what was not done")), `\n${undone}`)));
}

function drawLatest(model, parts) {
  const { version } = model.view;
  if (parts.latestVersion === version) return;
  parts.latestVersion = version;
  const rows = [];
  for (let each = version; each > Math.max(0, version - 8); each--) {
    const event = model.journal.events[each - 1];
    rows.push(h("li", {}, h("button", { type: "button", class: "event-line", onclick: () => model.goTo(each) },
      h("span", { class: "number" }, each), h("b", {}, event.is), h("span", { class: "soft" }, summarise(event)), h("span", { class: "soft" }, clock(event.at)))));
  }
  fill(parts.latest, rows);
}

function buildPanels(model, parts, wanted) {
  const tabs = h("div", { class: "tabs", role: "tablist", "aria-label": t("Panels") });
  const host = h("div", { class: "panel", role: "tabpanel", tabindex: 0, id: "panel" });
  const element = h("section", { class: "card" }, tabs, host);
  let chosen = PANELS.find((panel) => panel.id === wanted) ?? PANELS[0];
  let mounted = null;
  let updatePanel = null;

  function choose(panel) {
    chosen = panel;
    update();
    keepView(model, parts);
  }
  function move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const all = [...tabs.querySelectorAll("button")];
    const next = all[(all.findIndex((each) => each === document.activeElement) + step + all.length) % all.length];
    next.click();
    next.focus();
  }
  tabs.addEventListener("keydown", move);

  function update() {
    const shown = PANELS.filter((panel) => panel.shows(model));
    if (!shown.includes(chosen) && model.journal.version) [chosen] = shown;
    const ids = shown.map((panel) => panel.id).join();
    if (tabs.dataset.ids !== ids) {
      tabs.dataset.ids = ids;
      fill(tabs, shown.map((panel) => h("button", { type: "button", role: "tab", id: `tab-${panel.id}`, "aria-controls": "panel", onclick: () => choose(panel) }, t(panel.title))));
    }
    for (const tab of tabs.querySelectorAll("button")) {
      const isChosen = tab.id === `tab-${chosen.id}`;
      tab.setAttribute("aria-selected", String(isChosen));
      tab.tabIndex = isChosen ? 0 : -1;
    }
    if (mounted !== chosen) {
      mounted = chosen;
      host.replaceChildren();
      host.setAttribute("aria-labelledby", `tab-${chosen.id}`);
      host.dataset.panel = chosen.id;
      updatePanel = chosen.mount(host, model);
    }
    updatePanel();
  }
  return { element, update, chosen: () => chosen.id };
}

function buildTravel(model) {
  const slider = h("input", { type: "range", min: 0, max: 0, value: 0, "aria-label": t("Version"), oninput: () => model.goTo(Number(slider.value)) });
  const text = h("span", { class: "where", role: "status" });
  const step = (by) => () => model.goTo(Math.max(0, model.view.version + by));
  const back = h("button", { type: "button", "aria-label": t("Previous version"), onclick: step(-1) }, "‹");
  const next = h("button", { type: "button", "aria-label": t("Next version"), onclick: step(1) }, "›");
  const newest = h("button", { type: "button", onclick: () => model.goTo(null) }, t("Newest"));
  const forkButton = h("button", { type: "button", onclick: () => openFork(model) }, t("Fork here"));
  const element = h("footer", { class: "travel", "aria-label": t("Time travel") }, back, slider, next, text, newest, forkButton);
  return {
    element,
    update() {
      const { version } = model.view;
      slider.max = model.journal.version;
      slider.value = version;
      slider.setAttribute("aria-valuetext", t("version {n} of {all}", { n: version, all: model.journal.version }));
      const event = model.journal.events[version - 1];
      text.textContent = `${t("version {n} of {all}", { n: version, all: model.journal.version })}${event ? ` · ${event.is}` : ""}`;
      newest.disabled = model.isLive;
      back.disabled = version === 0;
      next.disabled = model.isLive;
    },
  };
}

function buildActions(model) {
  const text = h("input", { type: "text", "aria-label": t("Text for the model"), placeholder: t("Write to the run…") });
  const act = (verb, body) => async () => {
    await api.act(model.id, verb, body());
    model.loadDetails();
  };
  const post = once((body, key) => act("input", () => ({ ...body, key }))());
  const send = actionButton(t("Send"), async () => {
    if (!text.value.trim()) return;
    await post({ text: text.value });
    text.value = "";
  });
  const open = h("div", { class: "controls" },
    h("form", { class: "send", onsubmit: (event) => { event.preventDefault(); send.querySelector("button")?.click(); } }, text, send),
    h("div", { class: "buttons" },
      actionButton(t("Pause"), act("pause", () => ({}))),
      actionButton(t("Cancel the run"), act("cancel", () => ({})), { class: "danger" })));
  const rated = h("span", { class: "soft", role: "status" });
  const rate = (rating) => actionButton(rating > 3 ? t("Good") : t("Bad"), async () => {
    await api.act(model.id, "feedback", { rating });
    rated.textContent = t("Thank you.");
  });
  const over = h("div", { class: "controls" }, h("div", { class: "buttons" }, h("span", { class: "soft" }, t("Rate this run")), rate(5), rate(1), rated));
  const element = h("section", { "aria-label": t("Controls") }, open, over);
  return {
    element,
    update() {
      const isOver = OVER.includes(model.details?.status);
      open.hidden = isOver;
      over.hidden = !isOver;
    },
  };
}
