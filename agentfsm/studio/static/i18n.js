// The language of the page. The English text is the key, or a word that names it; zh.js has the Chinese.
import { ZH } from "./zh.js";

const OUTCOMES = ["done", "failed", "cancelled", "rejected", "skipped", "unknown", "running", "approved", "paused", "closed", "finished"];
/** @type {Record<string, string>} */
const EN = {
  ...Object.fromEntries(OUTCOMES.map((word) => [`call ${word}`, word])),
  "call intended": "not started",
  "call asked": "needs approval",
  "call lost": "outcome unknown",
  "call timed_out": "timed out",
  "stop completed": "completed",
  "stop max_turns": "turn limit",
  "stop token_budget": "token budget",
  "stop cost_budget": "cost budget",
  "stop tool_budget": "tool call budget",
  "stop timeout": "time limit",
  "stop too_many_errors": "too many errors",
  "stop loop_detected": "loop",
  "stop model_error": "model error",
  "stop cancelled": "cancelled",
  "stop guard": "guard",
  "stop stop_condition": "stop condition",
  "stop step_failed": "step failed",
  "stop parked": "parked",
  "theme auto": "System theme",
  "theme light": "Light theme",
  "theme dark": "Dark theme",
  "sent tools": "Tools",
  "sent instructions": "Instructions",
  "sent history": "Conversation",
  "sent results": "Results",
  "sent recalled": "Recalled",
  "sent plan": "Plan",
  "sent note": "Reminder",
  "sent media": "Images and files",
  "sent answer": "Answer",
  "sent messages": "Messages",
  "purpose turn": "turns",
  "purpose last_answer": "last answer",
  "purpose summary": "summaries",
  "purpose tool_selection": "tool selection",
  "purpose plan": "planning",
  "purpose plan_question": "questions of plans",
  "purpose judge": "judging",
  "purpose tool": "tools",
  "purpose agent": "sub-agents",
  "purpose all": "all",
  "group agent": "Agent",
  "group model": "Model",
  "group purpose": "Purpose",
  "group user": "User",
  "group day": "Day",
  "group tenant": "Tenant",
  "missed latest": "the newest is made up for",
  "missed all": "all are made up for",
  "missed skip": "skipped",
  "posted approved": "Approved",
  "posted rejected": "Rejected",
  "posted settled": "Settled",
  "posted answered": "Answered",
  "posted decided": "Decided",
};

// The texts of one thing, by those of several.
/** @type {Record<string, string>} */
const ONE = {
  "{n} runs": "{n} run",
  "{n} runs wait": "{n} run waits",
  "{n} of those shown wait": "{n} of those shown waits",
  "the last {n} days": "the last day",
  "in {n} turns": "in {n} turn",
  "about {n} tokens": "about {n} token",
  "{n} tools pinned": "{n} tool pinned",
  "{n} messages in common": "{n} message in common",
  "Show {n} earlier entries": "Show {n} earlier entry",
};

const STORED = "agentfsm.language";
const chosen = localStorage.getItem(STORED) ?? (navigator.language.toLowerCase().startsWith("zh") ? "zh" : "en");

export const language = () => chosen;

/** @param {string} name */
export function setLanguage(name) {
  localStorage.setItem(STORED, name);
  location.reload();
}

/**
 * Return a text in the language of the page, with {names} replaced by values.
 *
 * @param {string} text
 * @param {Record<string, any>} [values]
 */
export function t(text, values = {}) {
  const found = (chosen === "zh" && ZH[text]) || (String(values.n) === "1" && ONE[text]) || EN[text] || text;
  return found.replace(/\{(\w+)\}/g, (whole, name) => (name in values ? values[name] : whole));
}
