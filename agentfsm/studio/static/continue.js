// The card of a run that stands still: why, and how it continues. Nothing is executed before the reader asks for it.
import { api } from "./api.js";
import { h } from "./dom.js";
import { t } from "./i18n.js";
import { actionButton, prose } from "./parts.js";

const STILL = ["idle", "queued", "paused"];

/** Return what the card depends on; empty if the run does not stand still. */
export const standstillKey = ({ status, standstill, failure }) => (STILL.includes(status) ? [status, standstill, failure].join(" ") : "");

/** Return the card; null if the run does not stand still. */
export function continueCard(details, done) {
  const { continuation: how, status, standstill, failure } = details;
  if (!standstillKey(details) || (!how && !standstill)) return null;
  const begin = async () => {
    await api.act(details.id, "continue", {});
    done?.();
  };
  return h("section", { class: "decision standstill", "aria-label": t("This run stands still") },
    h("header", {}, h("strong", {}, t(status === "paused" ? "This run is paused" : "This run stands still"))),
    failure && [h("p", {}, t("Its last execution has failed:")), h("pre", {}, failure)],
    !how && (failure
      ? h("p", { class: "soft" }, t("The server tries again by itself, each time after a longer rest. A changed program needs a new start of the server."))
      : h("p", { class: "reason" }, prose(standstill))),
    how && h("div", { class: "body" },
      h("p", {}, t(status === "paused" ? "It continues when it is resumed." : "No process executes it, and the studio does so only if you ask.")),
      how.target && h("p", {}, t("This executes the run until it ends or waits, with the effects of its tools, in the store {store}.", { store: how.store })),
      how.target && h("div", { class: "buttons" },
        actionButton(t("Continue here with {target}", { target: how.target }), begin, { class: "primary" })),
      h("p", { class: "soft" }, how.target ? t("Or in a terminal:") : t("The run does not name its agent. In a terminal:")),
      h("pre", { class: "command" }, how.command)));
}
