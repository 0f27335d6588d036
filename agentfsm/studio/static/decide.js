// Cards of what waits for a person: approve, reject, answer, settle, send input, resume.
import { api, once } from "./api.js";
import { h } from "./dom.js";
import { count, json, until } from "./format.js";
import { t } from "./i18n.js";
import { actionButton, chip, openDialog, runLink } from "./parts.js";

/** Return what tells an item from others; a new digest makes a new card. */
export const itemKey = (item) => [item.kind, item.run_id, item.call_id, item.digest].join(" ");

const TITLES = {
  approval: "Approval",
  outcome: "Unknown outcome",
  question: "Question",
  login: "Login",
  task: "Task at a server",
  input: "Input",
  pause: "Paused",
  crash: "Paused after crashes",
};

/**
 * @typedef {object} Deciding
 * @property {(run: any) => void} [done] gets the run after a decision
 * @property {any} [asker] details of the run
 */

/**
 * Return the cards of what a run waits for. Calls of one tool that wait for approval together have a card for all of them
 * before their own. `posted(item)` returns the decision that is posted on an item, if there is one.
 *
 * @param {string} rootId
 * @param {any[]} items
 * @param {Deciding & {posted: (item: any) => any}} options
 */
export function decisionCards(rootId, items, { posted, ...options }) {
  const groups = Map.groupBy(items, (item) => item.kind === "approval" && !item.error && !posted(item) ? [item.run_id, item.tool].join(" ") : itemKey(item));
  return [...groups.values()].flatMap((group) => [
    group.length > 1 && togetherCard(rootId, group, options),
    ...group.map((item) => decisionCard(rootId, item, { ...options, posted: posted(item) })),
  ].filter(Boolean));
}

/**
 * @param {string} rootId
 * @param {any[]} items
 * @param {Deciding} options
 */
function togetherCard(rootId, items, { done, asker = null }) {
  const boxes = items.map((item) => h("input", { type: "checkbox", checked: true }));
  const body = h("div", { class: "body" });
  const decide = (verb) => async () => {
    const chosen = items.filter((_, index) => boxes[index].checked);
    if (!chosen.length) throw new Error(t("Choose a call first."));
    const run = await api.act(rootId, "decide", { [verb]: chosen.map(({ call_id, digest, run_id }) => ({ call_id, digest, run_id })) });
    body.replaceChildren(h("p", { class: "sent", role: "status" }, asker?.continuation ? t("Recorded.") : t("Sent. A worker applies it.")));
    done?.(run);
  };
  body.append(
    ...items.map((item, index) => h("label", { class: "choice" }, boxes[index], h("span", { class: "id" }, item.call_id), " ", h("code", {}, JSON.stringify(item.arguments)))),
    h("div", { class: "buttons" },
      approvalButton(t("Approve the chosen"), decide("approve"), () => items.filter((_, index) => boxes[index].checked).map((item) => h("p", {}, h("strong", {}, item.tool), " ", h("code", {}, JSON.stringify(item.arguments))))),
      actionButton(t("Reject the chosen"), decide("reject"), { class: "danger" })));
  const title = t("{n} calls of {tool}", { n: items.length, tool: items[0].tool });
  return h("section", { class: "decision together", "aria-label": title }, h("header", {}, h("strong", {}, title)), body);
}

/**
 * Return the card of an item. `rootId` is the run that the decision is sent to, `done(run)` gets the run after it,
 * `link` says whether the card links to the run, `asker` are the details of the run.
 *
 * @param {string} rootId
 * @param {any} item
 * @param {Deciding & {link?: boolean, posted?: any}} options
 */
export function decisionCard(rootId, item, { done, link = false, posted = null, asker = null }) {
  const build = { approval, outcome, question, login, input, task: () => [] }[item.kind] ?? pause;
  const body = h("div", { class: "body" });
  const finish = (text) => async (verb, values) => {
    const answer = await api.act(rootId, verb, values);
    body.replaceChildren(h("p", { class: "sent", role: "status" }, text));
    done?.(verb === "login" ? await api.run(rootId) : answer);
  };
  if (posted) body.append(h("p", { class: "sent" }, describePosted(posted, asker)));
  else body.append(...build(item, finish(asker?.continuation ? t("Recorded.") : t("Sent. A worker applies it.")), rootId).filter(Boolean));
  return h("section", { class: `decision ${item.kind}`, "data-key": itemKey(item), "aria-label": [t(TITLES[item.kind]), item.tool, item.call_id, item.run_id].join(" ") },
    h("header", {},
      chip(item.kind, t(TITLES[item.kind])),
      item.tool && h("strong", {}, item.tool),
      item.call_id && h("span", { class: "id" }, item.call_id),
      link && runLink(rootId, t("open the run")),
      item.run_id !== rootId && runLink(item.run_id, t("sub-agent's run"))),
    asker && item.kind === "approval" && h("p", { class: "soft asker" }, describeAsker(asker)),
    asker?.reply && item.kind === "approval" && item.run_id === rootId && h("blockquote", {}, readable(asker.reply)),
    item.description && !(item.kind === "question" && item.questions.some((/** @type {any} */ each) => each.message === item.description)) && h("p", { class: "description" }, item.description),
    item.reason && h("p", { class: "reason" }, item.reason),
    item.error && h("p", { class: "error" }, item.error),
    body,
    item.expires_at && h("p", { class: "soft expires" }, until(item.expires_at)));
}

/**
 * The button of an approval. The key for it asks first: `show()` returns what would be approved.
 *
 * @param {string} text
 * @param {() => Promise<void>} act
 * @param {() => any} show
 */
function approvalButton(text, act, show) {
  const element = actionButton(text, act, { class: "primary" });
  element.classList.add("approves");
  element.addEventListener("approve", () => openDialog(t("Approve this?"), (dialog) => h("div", {}, show(), h("div", { class: "buttons" },
    actionButton(element.firstElementChild?.textContent ?? text, async () => {
      await act();
      dialog.close();
    }, { class: "primary", autofocus: true }),
    h("button", { type: "button", onclick: () => dialog.close() }, t("Cancel"))))));
  return element;
}

function describePosted(posted, asker) {
  const values = { decision: t(`posted ${posted.decision}`), name: posted.by || "?" };
  return asker?.continuation ? t("{decision} by {name}; applied when the run continues.", values) : t("{decision} by {name}; a worker applies it.", values);
}

function describeAsker(asker) {
  const values = { agent: asker.agent, user: asker.user };
  return asker.user ? t("Agent {agent} asks, for user {user}.", values) : t("Agent {agent} asks.", values);
}

/** Lines of a text that are shown before it is folded: about a screen. */
const SCREEN_LINES = 40;
const SCREEN_CHARS = 4000;

/** A text as its writer meant it, with its lines; beyond a screen it is folded. */
export function readable(text) {
  const element = h("div", { class: "readable" }, text);
  if (text.split("\n").length <= SCREEN_LINES && text.length <= SCREEN_CHARS) return element;
  element.classList.add("folded");
  const more = h("button", { type: "button", class: "quiet", onclick: () => {
    element.classList.remove("folded");
    more.remove();
  } }, t("Show all {n} characters", { n: count(text.length) }));
  return [element, more];
}

/** The arguments of a call by their names: texts with their lines, other values as JSON. */
export function argumentList(values) {
  const names = Object.keys(values);
  if (!names.length) return h("p", { class: "soft" }, t("It has no arguments."));
  return h("dl", { class: "arguments" }, names.map((name) => {
    const value = values[name];
    return h("div", {}, h("dt", {}, name), h("dd", {}, readable(typeof value === "string" ? value : json(value))));
  }));
}

function field(label, input, hint) {
  return h("label", { class: "field" }, h("span", {}, label), input, hint && h("small", { class: "soft" }, hint));
}

function approval(item, send) {
  const before = json(item.arguments);
  const problem = h("p", { class: "error", role: "alert", hidden: true });
  const editor = h("textarea", { rows: Math.min(14, before.split("\n").length), spellcheck: "false", value: before });
  const state = h("span", { class: "soft" });
  const editing = h("div", { hidden: true }, field(t("Arguments, as JSON"), editor));
  const shown = argumentList(item.arguments);
  const edit = h("button", { type: "button", class: "quiet", onclick: () => {
    editing.hidden = false;
    shown.hidden = true;
    edit.remove();
    editor.focus();
  } }, t("Edit the arguments"));
  const read = () => {
    let value;
    try {
      value = JSON.parse(editor.value);
    } catch (error) {
      return { error: t("This is not valid JSON: {error}", { error: error.message }) };
    }
    const isObject = value !== null && typeof value === "object" && !Array.isArray(value);
    return isObject ? { value, isEdited: json(value) !== before } : { error: t("The arguments are a JSON object.") };
  };
  const approve = approvalButton(t("Approve"), async () => {
    const { error, value, isEdited } = read();
    if (error) throw new Error(error);
    const edited = isEdited ? { arguments: value } : {};
    await send("approve", { call_id: item.call_id, run_id: item.run_id, digest: item.digest, ...edited });
  }, () => {
    const { error, value } = read();
    return [h("p", {}, h("strong", {}, item.tool), " ", item.description), error ? h("p", { class: "error" }, error) : argumentList(value)];
  });
  editor.addEventListener("input", () => {
    const { error, isEdited } = read();
    problem.hidden = !error;
    problem.textContent = error ?? "";
    /** @type {Element} */ (approve.firstElementChild).textContent = isEdited ? t("Approve as edited") : t("Approve");
    state.textContent = isEdited ? t("edited") : "";
  });
  const reason = h("input", { type: "text", placeholder: t("The model reads it.") });
  const rejection = h("details", { class: "rejection" }, h("summary", {}, t("Reject…")), field(t("Reason"), reason),
    actionButton(t("Reject"), () => send("reject", { call_id: item.call_id, run_id: item.run_id, message: reason.value }), { class: "danger" }));
  return [
    shown,
    editing,
    problem,
    h("p", { class: "soft" }, item.digest && t("Bound to digest {digest}.", { digest: item.digest.slice(0, 12) }), " ", state),
    h("div", { class: "buttons" }, approve, edit, rejection),
  ];
}

function outcome(item, send) {
  const text = h("textarea", { rows: 3 });
  const settle = (values) => send("settle", { call_id: item.call_id, run_id: item.run_id, ...values });
  const needed = () => {
    if (!text.value.trim()) throw new Error(t("Write the result or the error first."));
    return text.value;
  };
  return [
    h("p", {}, t("The worker died during this call. Find out whether it took effect, then record its outcome.")),
    argumentList(item.arguments),
    field(t("Result or error"), text),
    h("div", { class: "buttons" },
      actionButton(t("It succeeded"), () => settle({ result: needed() }), { class: "primary" }),
      actionButton(t("It failed"), () => settle({ failed: needed() })),
      actionButton(t("Run it again"), () => settle({ rerun: true }))),
  ];
}

function question(item, send) {
  const forms = item.questions.map((each) => ({ ...each, ...buildForm(each) }));
  if (!forms.length) return externalResult(item, send);
  const answer = async () => {
    const answers = Object.fromEntries(forms.map((form) => [form.key, form.read()]));
    const content = forms.length === 1 ? answers[forms[0].key] : answers;
    await send("answer", { call_id: item.call_id, run_id: item.run_id, digest: item.digest || null, content });
  };
  return [
    ...forms.map((form) => h("fieldset", {}, h("legend", {}, form.message), form.url && h("p", { class: "id" }, form.url), form.fields)),
    h("div", { class: "buttons" },
      actionButton(t("Answer"), answer, { class: "primary" }),
      actionButton(t("Decline"), () => send("answer", { call_id: item.call_id, run_id: item.run_id, declined: true }))),
  ];
}

/** The page where the user of the run logs in, or the field for a key, which no journal gets. */
function login(item, send, rootId) {
  const [{ url, schema }] = item.questions;
  const decline = actionButton(t("Decline"), () => send("answer", { call_id: item.call_id, run_id: item.run_id, declined: true }));
  if (schema) {
    const key = h("input", { type: "password", autocomplete: "off" });
    const store = async () => {
      if (!key.value) throw new Error(t("Enter the key first."));
      await send("login", { call_id: item.call_id, run_id: item.run_id, key: key.value });
    };
    return [field(t("Key"), key), h("div", { class: "buttons" }, actionButton(t("Log in"), store, { class: "primary" }), decline)];
  }
  const place = h("p", {});
  const show = (link) => /^https?:/.test(link) && place.replaceChildren(h("a", { href: link, target: "_blank", rel: "noopener noreferrer" }, t("Open the page of the login")));
  show(url);
  const ask = async () => show((await api.act(rootId, "login", { call_id: item.call_id, run_id: item.run_id })).url);
  return [place, h("div", { class: "buttons" }, actionButton(url ? t("New link") : t("Get a link"), ask, { class: url ? "" : "primary" }), decline)];
}

function externalResult(item, send) {
  const [asked, ...others] = Object.values(item.arguments);
  const isText = typeof asked === "string" && !others.length;
  const text = h("textarea", { rows: 3 });
  const answer = (failed) => () => send("answer", { call_id: item.call_id, run_id: item.run_id, digest: item.digest || null, content: text.value, failed });
  return [
    isText ? h("p", { class: "description" }, asked) : asked !== undefined && argumentList(item.arguments),
    field(t("Answer"), text),
    h("div", { class: "buttons" },
      actionButton(t("Answer"), answer(false), { class: "primary" }),
      actionButton(t("There is no answer"), answer(true))),
  ];
}

/** Build the fields of a question from its JSON Schema: texts, numbers, choices and check boxes. Nothing is chosen unasked. */
function buildForm(each) {
  const inputs = Object.entries(each.schema?.properties ?? {}).map(([name, schema]) => {
    const label = schema.title ?? name;
    const isBoolean = schema.type === "boolean";
    const isRequired = (each.schema.required ?? []).includes(name);
    const choices = schema.oneOf ?? schema.enum?.map((/** @type {any} */ one) => ({ const: one }));
    const input = choices
      ? h("select", { value: schema.default ?? "" }, h("option", { value: "" }), choices.map((/** @type {any} */ one) => h("option", { value: one.const }, one.title ?? one.const)))
      : h("input", isBoolean ? { type: "checkbox", checked: schema.default ?? false }
        : { type: ["number", "integer"].includes(schema.type) ? "number" : "text", step: "any", value: schema.default ?? "" });
    const read = () => {
      if (input instanceof HTMLInputElement && isBoolean) return input.checked;
      if (input.value === "" && isRequired) throw new Error(t("Fill in {name} first.", { name: label }));
      if (input.value === "") return undefined;
      return schema.type === "number" || schema.type === "integer" ? Number(input.value) : input.value;
    };
    return { name, read, node: field(isRequired || isBoolean ? label : t("{name} (optional)", { name: label }), input, schema.description) };
  });
  const read = () => Object.fromEntries(inputs.map((one) => [one.name, one.read()]).filter(([, value]) => value !== undefined));
  return { fields: inputs.map((one) => one.node), read };
}

function input(item, send) {
  const text = h("textarea", { rows: 3 });
  const post = once((body, key) => send("input", { ...body, key }));
  const act = async () => {
    if (!text.value.trim()) throw new Error(t("Write a text first."));
    await post({ text: text.value });
  };
  return [field(t("Text for the model"), text), h("div", { class: "buttons" }, actionButton(t("Send"), act, { class: "primary" }))];
}

function pause(item, send) {
  return [h("div", { class: "buttons" }, actionButton(t("Resume"), () => send("resume", {}), { class: "primary" }))];
}
