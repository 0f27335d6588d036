// The inbox: everything that waits for a person.
import { api } from "../api.js";
import { every, fill, h } from "../dom.js";
import { t } from "../i18n.js";
import { continueCard, standstillKey } from "../continue.js";
import { decisionCards, itemKey } from "../decide.js";
import { empty, failure, runLink, time } from "../parts.js";
import { countWaiting } from "../waits.js";

const REFRESH_MS = 3000;
// Runs that are shown at once, the newest.
const PAGE = 50;

export const waiting = {
  path: "waiting",
  title: "Waiting",
  async count() {
    const found = await api.open();
    return found.is_whole ? countWaiting(found) : `${countWaiting(found)}+`;
  },
  mount(main) {
    const list = h("div", { class: "inbox" });
    const summary = h("p", { class: "soft", role: "status" });
    fill(main, h("header", { class: "page" }, h("h1", {}, t("Waiting for a person")), summary), list);
    const shown = new Map(); // sections by run and items, so that text that is being written stays
    const known = new Map(); // details by run, as long as the version stays

    async function load() {
      try {
        const [{ runs, after }, number] = await Promise.all([api.runs({ waiting: "true", limit: PAGE }), waiting.count()]);
        const found = [];
        for (const row of runs.filter((each) => !each.parent)) {
          const seen = known.get(row.id);
          if (seen?.version !== row.version || seen.status !== row.status) known.set(row.id, await api.details(row.id));
          found.push(known.get(row.id));
        }
        draw(found.filter((run) => run.pending.length));
        fill(summary, t("{n} runs wait", { n: number }), after !== null && [" · ", t("the newest {n} are here", { n: PAGE })]);
      } catch (error) {
        fill(list, failure(error));
        shown.clear();
      }
    }

    function draw(found) {
      const keys = new Set();
      const sections = found.map((run) => {
        const key = [run.id, standstillKey(run), ...run.pending.map(itemKey)].join("\n");
        keys.add(key);
        if (!shown.has(key)) shown.set(key, drawRun(run, load));
        return shown.get(key);
      });
      for (const key of shown.keys()) if (!keys.has(key)) shown.delete(key);
      if (!sections.length) return fill(list, empty(t("Nothing waits"), t("Approvals, questions and unknown outcomes appear here.")));
      const unchanged = sections.length === list.children.length && sections.every((section, index) => list.children[index] === section);
      return unchanged ? list : fill(list, sections);
    }

    load();
    every(REFRESH_MS, list, load);
  },
};

function drawRun(run, load) {
  return h("section", { class: "card waiting-run", "data-run": run.id },
    h("header", {}, h("h2", {}, runLink(run.id, run.prompt || run.id)),
      h("span", { class: "soft" }, [run.agent, run.user].filter(Boolean).join(" · "), " · ", time(run.updated_at))),
    continueCard(run, load),
    decisionCards(run.id, run.pending, {
      done: load,
      asker: run,
      posted: (item) => run.posted.find((each) => each.call_id === item.call_id && each.run_id === item.run_id),
    }));
}
