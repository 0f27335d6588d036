// The conversation: prompt, inputs, replies with their calls, notes of the engine.
import { fill, h } from "../dom.js";
import { t } from "../i18n.js";
import { markdown } from "../markdown.js";
import { callLine } from "../parts.js";

// Entries that are shown at once.
const PAGE = 60;

/** Names of the kinds of entries. */
export const WHO = {
  prompt: "user",
  input: "input",
  fault: "model failed",
  compaction: "compacted",
  tools: "tools offered",
  plan: "plan",
  steps: "steps",
  background: "background run",
  verdict: "verdict",
  note: "note",
  question: "question",
  pause: "paused",
  resume: "resumed",
  limit: "limit",
  undone: "not done",
  failure: "stopped",
};

export const transcript = {
  id: "transcript",
  title: "Transcript",
  shows: () => true,
  mount(host, run) {
    let shownCount = PAGE;
    let shownTo = "";
    const update = () => {
      const { entries } = run.view;
      const first = Math.max(0, entries.length - shownCount);
      const state = [run.view.version, first, run.draft?.text.length].join();
      if (state === shownTo) return;
      shownTo = state;
      const earlier = first > 0 && h("button", { type: "button", class: "quiet wide", onclick: showEarlier }, t("Show {n} earlier entries", { n: Math.min(PAGE, first) }));
      const draft = run.isLive && run.draft && entryLine(t("writing"), "draft", h("p", { class: "text" }, run.draft.text));
      fill(host, h("div", { class: "transcript" }, earlier, entries.slice(first).map((each) => drawEntry(each, run)), draft));
    };
    const showEarlier = () => {
      shownCount += PAGE;
      update();
    };
    return update;
  },
};

function entryLine(who, kind, ...content) {
  return h("article", { class: `entry is-${kind}` }, h("span", { class: "who" }, who), h("div", { class: "content" }, content));
}

function drawEntry(entry, run) {
  const who = entry.kind === "reply" ? t("turn {n}", { n: entry.turn }) : t(WHO[entry.kind]);
  const { message } = entry;
  return entryLine(who, entry.kind,
    message?.thinking && h("details", {}, h("summary", {}, t("Thinking")), h("p", { class: "text soft" }, message.thinking)),
    message?.text && markdown(message.text),
    entry.text && h("p", { class: "text" }, entry.text),
    callLines(entry, run.id),
    entry.by && h("span", { class: "soft" }, entry.by));
}

/** The calls of an entry, each with its result. */
export function callLines(entry, runId) {
  return entry.calls?.map((call) => h("div", {}, callLine(call, runId),
    call.result?.content && h("details", { class: "result" }, h("summary", {}, preview(call.result.content)), h("pre", {}, call.result.content))));
}

function preview(text) {
  const line = text.trim().split("\n", 1)[0];
  return line.length > 110 ? `${line.slice(0, 110)}…` : line || t("empty result");
}
