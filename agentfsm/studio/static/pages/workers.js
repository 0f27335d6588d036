// Workers and leases: which runs are executed, which wait for a worker, and what is stuck and why.
import { api } from "../api.js";
import { every, fill, h } from "../dom.js";
import { count, date, duration } from "../format.js";
import { t } from "../i18n.js";
import { card, empty, failure, runLink, table } from "../parts.js";

const REFRESH_MS = 2000;

export const workers = {
  path: "workers",
  title: "Workers",
  needs: { scope: "approve" },
  mount(main) {
    const content = h("div", {});
    fill(main, h("header", { class: "page" }, h("h1", {}, t("Workers and leases"))), content);
    async function load() {
      try {
        fill(content, draw(await api.workers()));
      } catch (error) {
        fill(content, failure(error));
      }
    }
    load();
    every(REFRESH_MS, content, load);
  },
};

function draw(found) {
  const isIdle = !found.workers.length && !found.queue.length && !found.sleepers.length;
  return [
    isIdle && empty(t("All is done"), t("No run is executed, and none waits for a worker.")),
    found.workers.map((worker) => card(t("Worker {name}", { name: worker.name }), drawRuns(worker.runs))),
    found.queue.length > 0 && card(t("Runs without a worker"), drawRuns(found.queue)),
    found.sleepers.length > 0 && card(t("Runs that wait for a time"), drawSleepers(found.sleepers)),
    found.followers?.length > 0 && card(t("Followers"), drawFollowers(found.followers)),
  ];
}

function drawRuns(runs) {
  const heads = [t("Run"), t("Agent"), t("State"), [t("Ready for")], [t("No event for")], [t("Crashes")], t("Why")];
  const span = (seconds) => (seconds === null ? "–" : duration(seconds));
  return table(t("Runs"), heads, runs.map((each) => h("tr", { "data-run": each.id, class: each.crashes ? "stuck" : "" },
    h("td", { class: "task" }, runLink(each.id, each.prompt || each.id)),
    h("td", {}, each.agent),
    h("td", {}, each.state.toUpperCase()),
    h("td", { class: "number" }, span(each.ready_s)),
    h("td", { class: "number" }, span(each.silent_s)),
    h("td", { class: "number" }, each.crashes),
    h("td", {}, each.reason))));
}

function drawSleepers(runs) {
  return table(t("Runs that wait for a time"), [t("Run"), t("Agent"), t("State"), t("Wakes")], runs.map((each) => h("tr", { "data-run": each.id },
    h("td", { class: "task" }, runLink(each.id, each.prompt || each.id)),
    h("td", {}, each.agent),
    h("td", {}, each.state.toUpperCase()),
    h("td", { class: "nowrap" }, date(each.ready_at)))));
}

function drawFollowers(followers) {
  const heads = [t("Follower"), [t("Unread runs")], t("Works now")];
  return table(t("Followers"), heads, followers.map((each) => h("tr", {},
    h("td", {}, each.name), h("td", { class: "number" }, count(each.lag)), h("td", {}, each.held ? t("yes") : t("no")))));
}
