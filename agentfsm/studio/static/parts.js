// Small parts that pages and panels share.
import { h } from "./dom.js";
import { callTitle, date, ago } from "./format.js";
import { t } from "./i18n.js";

/** @type {Record<string, string>} */
const STATUS_TEXT = {
  running: "running",
  idle: "idle",
  queued: "queued",
  waiting: "waiting",
  paused: "paused",
  done: "done",
  failed: "failed",
};

/**
 * The status of a run, or the outcome of a call, as a chip.
 *
 * @param {string} kind
 * @param {string} [text]
 */
export function chip(kind, text) {
  return h("span", { class: `chip ${kind}` }, text ?? t(STATUS_TEXT[kind] ?? kind));
}

/** @param {number} at */
export function time(at) {
  return h("time", { datetime: new Date(at * 1000).toISOString(), title: date(at) }, ago(at));
}

/**
 * @param {string} id
 * @param {any} [text]
 * @param {number} [version]
 */
export function runLink(id, text, version) {
  return h("a", { href: `#/runs/${encodeURIComponent(id)}${version ? `?v=${version}` : ""}` }, text ?? id);
}

/**
 * A text with the parts between backticks as code.
 *
 * @param {string} text
 */
export const prose = (text) => text.split("`").map((part, index) => (index % 2 ? h("code", {}, part) : part));

/**
 * @param {string} title
 * @param {...any} text
 */
export function empty(title, ...text) {
  return h("div", { class: "empty" }, h("strong", {}, title), h("p", {}, text.map((part) => (typeof part === "string" ? prose(part) : part))));
}

/**
 * @param {Error} error
 * @param {...any} more
 */
export function failure(error, ...more) {
  return h("div", { class: "failure", role: "alert" }, h("strong", {}, t("This did not work.")), h("p", {}, error.message), more);
}

/**
 * Name and value pairs, as a definition list. Pairs without a value are left out.
 *
 * @param {any[][]} pairs
 */
export function facts(pairs, name = "facts") {
  const given = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h("dl", { class: name }, given.map(([label, value, limit]) =>
    h("div", {}, h("dt", {}, label), h("dd", {}, value, limit && h("small", {}, ` ${limit}`)))));
}

/**
 * @param {any} title
 * @param {...any} content
 */
export function card(title, ...content) {
  return h("section", { class: "card" }, h("h2", {}, title), content);
}

/**
 * A table; the head of a column of numbers is given as `[text]`.
 *
 * @param {string} label
 * @param {(string | string[])[]} heads
 * @param {any} rows
 */
export function table(label, heads, rows) {
  return h("div", { class: "scroll-x", tabindex: 0, role: "group", "aria-label": label }, h("table", { "aria-label": label },
    h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col", class: Array.isArray(head) && "number" }, head)))),
    h("tbody", {}, rows)));
}

/** @param {number} share */
export function bar(share, kind = "") {
  return h("span", { class: `meter ${kind}`, "--share": String(Math.min(1, Math.max(0, share))), "aria-hidden": "true" });
}

/**
 * One call: its title, its status, how long it took, its sub-agent's run.
 *
 * @param {any} call
 * @param {string} runId
 */
export function callLine(call, runId) {
  const child = call.result?.child?.run_id ?? call.pending?.find((/** @type {any} */ item) => item.run_id !== runId)?.run_id;
  return h("div", { class: "call" },
    h("code", {}, callTitle(call)),
    chip(call.status, t(`call ${call.status}`)),
    call.proposed && h("span", { class: "soft" }, t("arguments edited")),
    call.approvedBy !== undefined && h("span", { class: "soft" }, t("approved by {name}", { name: call.approvedBy || "?" })),
    call.by && h("span", { class: "soft" }, t("decided by {name}", { name: call.by })),
    child && runLink(child, t("sub-agent's run")));
}

/**
 * What people have decided on a call.
 *
 * @param {any} call
 */
export function decisionsOf(call) {
  return [
    call.approvedBy !== undefined && t("approved by {name}", { name: call.approvedBy || "?" }),
    call.proposed && t("arguments edited"),
    call.informedBy !== undefined && t("answered by {name}", { name: call.informedBy || "?" }),
    call.by && t("decided by {name}", { name: call.by }),
  ].filter(Boolean).join(", ");
}

/**
 * A button that runs an async action: it is off while the action runs, and shows its error below.
 *
 * @param {string} text
 * @param {() => unknown} act
 * @param {Record<string, any>} [attributes]
 */
export function actionButton(text, act, attributes = {}) {
  const error = h("p", { class: "error", role: "alert", hidden: true });
  const button = h("button", {
    type: "button",
    ...attributes,
    onclick: async () => {
      button.disabled = true;
      error.hidden = true;
      try {
        await act();
      } catch (failed) {
        error.hidden = false;
        error.textContent = "";
        error.append(failed.message);
      } finally {
        button.disabled = false;
      }
    },
  }, text);
  return h("span", { class: "action" }, button, error);
}

/**
 * Open a dialog with content, and return it; it closes with Escape, and its content may call `dialog.close()`.
 *
 * @param {string} title
 * @param {Element | ((dialog: HTMLDialogElement) => Element)} content
 */
export function openDialog(title, content) {
  const dialog = h("dialog", { "aria-label": title }, h("header", {}, h("h2", {}, title),
    h("button", { type: "button", class: "quiet", "aria-label": t("Close"), onclick: () => dialog.close() }, "✕")));
  dialog.append(typeof content === "function" ? content(dialog) : content);
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}
