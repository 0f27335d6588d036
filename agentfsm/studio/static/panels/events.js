// Every event of the journal with its record.
import { fill, h } from "../dom.js";
import { openFork } from "../fork.js";
import { clock, duration, json } from "../format.js";
import { t } from "../i18n.js";
import { virtualList } from "../virtual_list.js";

/** Say in some words what an event holds. */
export function summarise(event) {
  const usage = event.usage && `${(event.usage.input_tokens ?? 0) + (event.usage.output_tokens ?? 0)} ${t("tokens")}`;
  const calls = event.message?.calls?.map((call) => call.name).join(", ") ?? event.calls?.map((call) => call.name).join(", ");
  const result = event.result && `${event.result.tool} ${event.result.outcome} ${duration(event.result.duration_s ?? 0)}`;
  const parts = [calls, result, event.result ? null : event.call_id, event.by, event.error ?? event.why ?? event.message?.text ?? (typeof event.message === "string" ? event.message : event.note), usage];
  return parts.filter(Boolean).join(" · ").slice(0, 200);
}

export const events = {
  id: "events",
  title: "Events",
  shows: () => true,
  mount(host, run) {
    let kind = "";
    let found = [];
    let isChosen = false; // until then the newest event is shown
    const record = h("div", { class: "record", role: "region", tabindex: 0, "aria-label": t("Record of the event") });
    const list = virtualList(t("Events"), (index) => {
      const version = found[index];
      const event = run.journal.events[version - 1];
      return [
        h("span", { class: "number" }, version),
        h("b", { class: `event ${run.journal.states[version]}` }, event.is),
        h("span", { class: "soft summary" }, summarise(event)),
        h("span", { class: "soft" }, clock(event.at)),
      ];
    }, (index) => {
      isChosen = true;
      show(found[index]);
    });
    const filter = h("select", { "aria-label": t("Kind of event"), onchange: () => {
      kind = filter.value;
      isChosen = false;
      shownTo = -1;
      update();
    } });
    const counted = h("span", { class: "soft", role: "status" });
    fill(host, h("div", { class: "toolbar" }, filter, counted), h("div", { class: "events" }, list.element, record));

    function show(version) {
      const event = run.journal.events[version - 1];
      const state = `${run.journal.states[version - 1].toUpperCase()} → ${run.journal.states[version].toUpperCase()}`;
      fill(record,
        h("header", {}, h("strong", {}, `${version} · ${event.is}`), h("span", { class: "soft" }, state),
          h("button", { type: "button", class: "quiet", onclick: () => run.goTo(version) }, t("Go to this version")),
          h("button", { type: "button", class: "quiet", onclick: () => openFork(run, version) }, t("Edit in a fork"))),
        h("pre", {}, json(event)));
    }

    function drawKinds(all) {
      const kinds = [...new Set(all.map((event) => event.is))].sort();
      if (filter.dataset.kinds === kinds.join()) return;
      filter.dataset.kinds = kinds.join();
      fill(filter, h("option", { value: "" }, t("all events")), kinds.map((each) => h("option", { value: each }, each)));
      filter.value = kinds.includes(kind) ? kind : "";
    }

    let shownTo = -1;
    function update() {
      const all = run.journal.events.slice(0, run.view.version);
      if (shownTo === all.length) return;
      shownTo = all.length;
      drawKinds(all);
      found = all.flatMap((event, index) => (!kind || event.is === kind ? [index + 1] : []));
      counted.textContent = t("{n} of {all}", { n: found.length, all: all.length });
      list.update(found.length);
      if (isChosen || !found.length) return;
      list.select(found.length - 1, true);
      show(found.at(-1));
    }
    return update;
  },
};
