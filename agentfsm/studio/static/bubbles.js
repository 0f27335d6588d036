// One run of a conversation: what was said as bubbles, each of which opens its turn, and what the run waits for.
import { append, fill, h } from "./dom.js";
import { t } from "./i18n.js";
import { markdown, picture } from "./markdown.js";
import { callLines, WHO } from "./panels/transcript.js";
import { runLink } from "./parts.js";
import { waitsBox } from "./waits.js";

// Entries of the transcript that are no part of the conversation.
const UNSAID = ["tools", "compaction"];
// What becomes of a message that the run has not read.
const UNREAD = { unread: t("read at the next turn"), unseen: t("not read: the run had ended") };

/**
 * Return the element of a run and a function that brings it up to date.
 *
 * `said` are the texts that were sent from here: the prompt, then inputs; the run reads an input at its next turn.
 */
export function runBubbles(model, said) {
  const list = h("div", { class: "bubbles" });
  const waits = waitsBox(model);
  const element = h("section", { class: "said", "data-run": model.id }, list, waits.element);
  const shown = new Map(); // bubbles by what they say: they stay, so that what is unfolded or selected in them does

  function draw() {
    const { details, draft, view } = model;
    const entries = view.entries.filter((each) => !UNSAID.includes(each.kind));
    const prompt = { kind: "prompt", version: 0, text: details?.prompt || said[0] || "" };
    if (!entries.some((each) => each.kind === "prompt")) entries.unshift(prompt);
    const read = entries.filter((each) => each.kind === "input").length;
    const unread = said.slice(1 + read).map((text) => ({ kind: model.isOver ? "unseen" : "unread", version: view.version, text }));
    const keys = new Set();
    const bubbles = [...entries, ...unread].map((entry, index) => {
      const calls = entry.calls?.map((call) => [call.id, call.status, call.approvedBy]);
      const key = JSON.stringify([index, entry.kind, entry.version, calls, entry.text]);
      keys.add(key);
      if (!shown.has(key)) shown.set(key, drawBubble(entry, model));
      return shown.get(key);
    });
    for (const key of shown.keys()) if (!keys.has(key)) shown.delete(key);
    const isWorking = details && ["running", "queued"].includes(details.status);
    const last = draft ? bubble("theirs draft", runLink(model.id, t("writing")), markdown(draft.text))
      : isWorking && !details.pending.length && h("p", { class: "working", role: "status" }, model.status === "reconnecting" ? t("reconnecting…") : t("the model is working"));
    const wanted = [...bubbles, last].filter(Boolean);
    const isSame = wanted.length === list.children.length && wanted.every((each, index) => each === list.children[index]);
    if (!isSame) fill(list, wanted);
    if (model.error) append(list, [h("p", { class: "error" }, model.error.message)]);
    waits.update();
  }
  return { element, model, update: draw, isOpen: () => !model.isOver };
}

const bubble = (kind, link, ...content) => h("article", { class: `bubble ${kind}` }, h("div", { class: "content" }, content), h("footer", {}, link));

function drawBubble(entry, model) {
  const { kind, message, text, version } = entry;
  const link = (words) => runLink(model.id, words, version || null);
  if (kind === "prompt" || kind === "input") {
    const media = kind === "prompt" ? (model.header?.prompt ?? []).filter((part) => part.is !== "TextPart") : [];
    return bubble("mine", link(entry.by && kind === "input" ? entry.by : t("open the run")), h("p", { class: "text" }, text),
      media.map((part) => part.is === "ImagePart" && h("p", {}, picture(part.url))));
  }
  if (kind in UNREAD) return bubble("mine unread", h("span", {}, UNREAD[kind]), h("p", { class: "text" }, text));
  if (kind === "reply") {
    return bubble("theirs", link(t("turn {n}", { n: entry.turn })),
      message.thinking && h("details", {}, h("summary", {}, t("Thinking")), h("p", { class: "text soft" }, message.thinking)),
      message.text && markdown(message.text),
      callLines(entry, model.id));
  }
  const who = kind === "failure" && model.view.stop ? t(`stop ${model.view.stop.reason}`) : t(WHO[kind]);
  return bubble(`note is-${kind}`, link(who), text && h("p", { class: "text" }, text), callLines(entry, model.id));
}
