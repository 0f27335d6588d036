// Talk: start a run of an agent, and go on with its conversation.
import { keepAddress } from "../address.js";
import { api, newKey, once } from "../api.js";
import { attachmentList } from "../attachments.js";
import { runBubbles } from "../bubbles.js";
import { every, fill, h } from "../dom.js";
import { t } from "../i18n.js";
import { actionButton, empty } from "../parts.js";
import { RunModel } from "../run_model.js";

// Runs of a session that are shown at once, the newest.
const PAGE = 10;
// Milliseconds between two readings of the status, which changes without an event when a process dies.
const STATUS_MS = 4000;
// Pixels from the end of the page within which it follows what is written.
const NEAR_PX = 120;
const PARTS = { TextPart: "text", ImagePart: "image", AudioPart: "audio", FilePart: "file" };

export const talk = {
  path: "talk",
  title: "Talk",
  async mount(main, parameters) {
    const [{ agents }, known, machine] = await Promise.all([api.agents(), api.sessions(), api.machine()]);
    if (!agents.length) {
      return void fill(main, h("header", { class: "page" }, h("h1", {}, t("Talk"))),
        empty(t("No agent is served"), t("The studio was opened on a store. `agentfsm studio module:agent` shows an agent, and executes its runs.")));
    }
    let session = parameters.get("session") ?? "";
    let said = []; // runs of the session, in their order
    let opened = 0;
    const start = once(api.start);
    const write = once(([id, message], key) => api.act(id, "input", { text: message, key }));
    const log = h("div", { class: "talk-log", role: "log", "aria-label": t("Conversation") });
    const earlier = h("div", {});
    const greeting = empty(t("A new conversation"), t("Enter sends a message, Shift+Enter begins a new line."));
    const agent = h("select", { "aria-label": t("Agent"), onchange: keepChoice }, agents.map((each) => h("option", { value: each.name }, each.name)));
    const sessions = h("select", { "aria-label": t("Session"), onchange: () => openSession(sessions.value) },
      h("option", { value: "" }, t("new session")),
      known.sessions.filter((each) => each.user === known.user).map((each) => h("option", { value: each.session, "data-agent": each.last.agent }, `${each.session} · ${each.last.prompt.slice(0, 60)}`)));
    const problem = h("p", { class: "error", role: "alert", hidden: true });
    const complain = (text) => {
      problem.hidden = !text;
      fill(problem, text);
    };
    const files = attachmentList(complain);
    const text = h("textarea", { rows: 2, "aria-label": t("Message"), placeholder: t("Write a message…") });
    const send = h("button", { class: "primary" }, t("Send"));
    const stop = actionButton(t("Stop"), () => api.act(last().model.id, "cancel", {}), { class: "danger" });
    const retry = actionButton(t("Retry"), repeat);
    const hint = h("span", { class: "soft", role: "status" });
    const form = h("form", { class: "composer" }, files.list, text, problem,
      h("div", { class: "buttons" }, send, files.button, files.chooser, stop, retry, hint));

    form.addEventListener("submit", (event) => {
      event.preventDefault();
      submit();
    });
    text.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return; // Enter also ends the composition of a sign
      event.preventDefault();
      submit();
    });
    text.addEventListener("paste", (event) => event.clipboardData?.files.length && files.add(event.clipboardData.files));
    form.addEventListener("dragover", (event) => event.preventDefault());
    form.addEventListener("drop", (event) => {
      event.preventDefault();
      if (event.dataTransfer) files.add(event.dataTransfer.files);
    });
    fill(main, h("div", { class: "talk" },
      h("header", { class: "page" }, h("h1", {}, t("Talk")), agent, sessions, known.user && h("span", { class: "soft" }, t("as {user}", { user: known.user }))),
      earlier, greeting, log, form));

    const last = () => said.at(-1) ?? null;

    function keepChoice() {
      keepAddress("talk", { agent: agent.value, session });
    }

    function addRun(id, { isNew = false, prompt = "", first = false } = {}) {
      const own = opened;
      const model = new RunModel(id, machine, () => {
        if (own !== opened) return;
        const isNear = document.documentElement.scrollHeight - window.scrollY - window.innerHeight < NEAR_PX;
        part.update();
        update();
        if (isNear) window.scrollTo(0, document.documentElement.scrollHeight);
      });
      const texts = [prompt];
      const part = Object.assign(runBubbles(model, texts), { texts });
      said = first ? [part, ...said] : [...said, part];
      if (first) log.prepend(part.element);
      else log.append(part.element);
      return model.open({ isNew });
    }

    function close() {
      opened += 1;
      for (const each of said) each.model.close();
      said = [];
      fill(log);
      fill(earlier);
    }

    async function openSession(name) {
      close();
      session = name;
      const chosen = [...sessions.options].find((each) => each.value === name);
      if (chosen?.dataset.agent && agents.some((each) => each.name === chosen.dataset.agent)) agent.value = chosen.dataset.agent;
      keepChoice();
      update();
      if (name) await addEarlier(null).catch((error) => complain(error.message));
      text.focus();
      window.scrollTo(0, document.documentElement.scrollHeight);
    }

    /** Add the runs of the session before a place in the list, the newest ones. */
    async function addEarlier(after) {
      const own = opened;
      const found = await api.runs({ session, user: known.user, limit: PAGE, after });
      if (own !== opened) return;
      const rows = found.runs.filter((row) => !row.parent);
      fill(earlier, found.after && h("button", { type: "button", class: "quiet wide", onclick: () => addEarlier(found.after).catch((error) => complain(error.message)) }, t("Show earlier runs")));
      await Promise.all(rows.map((row) => addRun(row.id, { first: true })));
    }

    async function submit() {
      const parts = files.parts();
      const written = text.value.trim();
      if (send.disabled || !(written || parts.length)) return;
      const prompt = parts.length ? [...(written ? [{ type: "text", text: written }] : []), ...parts] : written;
      await post(prompt, written, () => {
        text.value = "";
        files.clear();
      });
    }

    /** Start a run with the prompt of the last one again; it continues the conversation. */
    async function repeat() {
      const { model } = last();
      const { header } = await api.journal(model.id, 0);
      const prompt = header.prompt.map(({ is, text: words, url, name }) => (is === "TextPart" ? { type: "text", text: words } : { type: PARTS[is], url, ...(name ? { name } : {}) }));
      await post(prompt, model.details.prompt, () => {});
    }

    /** Send a message: input of the run that goes on, or a run that continues the session. */
    async function post(prompt, words, done) {
      send.disabled = true;
      complain("");
      const open = last()?.isOpen() ? last() : null;
      session ||= `talk-${newKey().slice(0, 8)}`;
      const own = opened;
      try {
        if (open) {
          await write([open.model.id, prompt]);
          open.texts.push(words);
          open.model.draw();
        } else {
          const run = await start({ prompt, agent: agent.value, session });
          if (own !== opened) return; // the reader has gone elsewhere
          if (![...sessions.options].some((each) => each.value === session)) sessions.append(h("option", { value: session }, `${session} · ${words.slice(0, 60)}`));
          sessions.value = session;
          keepChoice();
          addRun(run.id, { isNew: true, prompt: words });
        }
        done();
        window.scrollTo(0, document.documentElement.scrollHeight);
      } catch (error) {
        complain(error.message);
      } finally {
        update();
      }
    }

    function update() {
      const current = last();
      const isOpen = current?.isOpen() ?? false;
      const isDeciding = isOpen && current.model.details?.pending.some((item) => !["input", "task"].includes(item.kind));
      send.disabled = isDeciding;
      greeting.hidden = session !== "" && current !== null;
      stop.hidden = !isOpen;
      retry.hidden = isOpen || !current;
      hint.textContent = isDeciding ? t("Decide above first, or stop the run.") : isOpen ? t("The run reads a message at its next turn.") : "";
    }

    if (parameters.get("agent") && agents.some((each) => each.name === parameters.get("agent"))) agent.value = parameters.get("agent");
    if (session && ![...sessions.options].some((each) => each.value === session)) sessions.append(h("option", { value: session }, session));
    sessions.value = session;
    every(STATUS_MS, log, () => last()?.isOpen() && last().model.readDetails());
    await openSession(session);
    return close;
  },
};
