// The dialog that forks a run, with another first message or with an edited event. A fork that can act is confirmed.
import { api, once } from "./api.js";
import { h } from "./dom.js";
import { json } from "./format.js";
import { t } from "./i18n.js";
import { actionButton, openDialog } from "./parts.js";

/** Open the dialog; `edited` is the version of the event to edit, if any. */
export function openFork(model, edited = null) {
  const { version, stop } = model.view;
  const at = h("input", { type: "number", min: 0, max: model.journal.version, value: stop ? version - 1 : version });
  const prompt = h("textarea", { rows: 4, value: model.details.prompt });
  const place = h("select", { onchange: () => load(Number(place.value)) },
    h("option", { value: "" }, t("none")),
    model.journal.events.slice(Math.max(0, version - 400), version).map((event, index) => {
      const each = Math.max(0, version - 400) + index + 1;
      return h("option", { value: each }, `${each} · ${event.is}`);
    }));
  const record = h("textarea", { rows: 8, spellcheck: "false", hidden: true, "aria-label": t("Record of the event") });
  let before = "";

  function load(number) {
    before = number ? json(model.journal.events[number - 1]) : "";
    record.value = before;
    record.hidden = !number;
  }
  if (edited) {
    place.value = String(edited);
    load(edited);
  }

  function read() {
    const body = { at: Number(at.value) };
    if (prompt.value !== model.details.prompt) body.prompt = prompt.value;
    if (place.value && record.value !== before) {
      try {
        body.edit = { [place.value]: JSON.parse(record.value) };
      } catch (error) {
        throw new Error(t("This is not valid JSON: {error}", { error: error.message }));
      }
    }
    return body;
  }
  const fork = once((body, key) => api.fork(model.id, body, key));
  openDialog(t("Fork this run"), (dialog) => {
    const make = async (withhold) => {
      const made = await fork({ ...read(), withhold });
      dialog.close();
      location.hash = `#/runs/${encodeURIComponent(made.id)}`;
    };
    const act = async () => {
      if (!model.details.may_act) return make(false);
      read();
      buttons.hidden = true;
      question.hidden = false;
      question.querySelector("button")?.focus();
    };
    const buttons = h("div", { class: "buttons" }, actionButton(t("Fork"), act, { class: "primary" }));
    const question = h("div", { role: "group", "aria-label": t("This fork can act"), hidden: true },
      h("p", {}, h("strong", {}, t("This fork can act")), " ",
        t("It is a run like any other: its tools are called with their effects. Or withhold the calls of tools that are not read-only, and see what it would do.")),
      model.details.continuation?.target && h("p", {}, t("The fork is made with {target} in the store {store}. It executes nothing until you continue it.", model.details.continuation)),
      h("div", { class: "buttons" },
        actionButton(t("Withhold the calls"), () => make(true), { class: "primary" }),
        actionButton(t("Fork and act"), () => make(false))));
    const field = (label, input) => h("label", { class: "field" }, h("span", {}, label), input);
    return h("div", { class: "body" },
      h("p", { class: "soft" }, t("A new run begins with the first events of this one. Its calls keep their idempotency keys.")),
      field(t("Number of events"), at),
      field(t("First message"), prompt),
      field(t("Edit an event"), place),
      record,
      buttons,
      question);
  });
}
