// Schedules: when each starts its next run, how the last one ended, what is overdue; pause and resume.
import { api } from "../api.js";
import { permits, readCaller } from "../caller.js";
import { every, fill, h } from "../dom.js";
import { count, date } from "../format.js";
import { t } from "../i18n.js";
import { actionButton, card, chip, empty, facts, failure, runLink } from "../parts.js";

const REFRESH_MS = 10000;

export const schedules = {
  path: "schedules",
  title: "Schedules",
  needs: { scope: "approve" },
  async mount(main) {
    const mayChange = permits(await readCaller(), { scope: "admin" });
    const content = h("div", {});
    fill(main, h("header", { class: "page" }, h("h1", {}, t("Schedules"))), content);
    async function load() {
      if (content.querySelector(".action button:disabled")) return; // a change is under way
      try {
        const { schedules: found, unreadable } = await api.schedules();
        fill(content,
          unreadable.map((each) => h("div", { class: "failure", role: "alert" }, h("strong", {}, each.name), h("p", {}, each.error))),
          found.length ? found.map((each) => draw(each, mayChange && load)) : empty(t("No schedules"), t("`agentfsm schedule add` adds one.")));
      } catch (error) {
        fill(content, failure(error));
      }
    }
    await load();
    every(REFRESH_MS, content, load);
  },
};

function draw(found, load) {
  const { last } = found;
  const time = (/** @type {number} */ at) => date(at, found.tz);
  const verb = found.paused ? "resume" : "pause";
  const change = load && actionButton(found.paused ? t("Resume") : t("Pause"), async () => {
    await api.steer(found.name, verb);
    setTimeout(load); // after the button is on again
  });
  return h("div", { "data-schedule": found.name }, card([found.name, " ", found.paused && chip("paused")],
    facts([
      [t("Agent"), found.agent],
      [t("Times"), h("code", {}, found.cron), found.tz],
      [t("User"), found.user],
      [t("Missed times"), t(`missed ${found.missed}`)],
      [t("Last run"), last?.run && [runLink(last.run.id, time(last.at)), " ", chip(last.run.status)]],
    ], "facts"),
    h("p", { class: "text" }, found.prompt),
    found.error && h("p", { class: "error" }, found.error),
    !found.paused && found.next.length > 0 && h("p", { "data-next": "" }, t("Next"), ": ", found.next.map(time).join(" · ")),
    found.paused && h("p", { class: "soft" }, t("It starts no runs until it is resumed.")),
    found.overdue.length > 0 && h("p", { class: "error", "data-overdue": "" }, t("{n} times are overdue, since {at}: no worker of the agent has looked.", { n: count(found.overdue.length), at: time(found.overdue[0]) })),
    found.skipped.length > 0 && h("p", { class: "soft", "data-skipped": "" }, t("Times without a run, of the last ones"), ": ", found.skipped.map(time).join(" · ")),
    found.due.length > 0 && h("p", { class: "soft" }, t("{n} runs of before are still to be started.", { n: count(found.due.length) })),
    found.conflicts > 0 && h("p", { class: "error" }, t("{n} times got no run, because another run had its id; the newest is", { n: count(found.conflicts) }), " ", runLink(found.last_conflict)),
    change && h("div", { class: "buttons" }, change)));
}
