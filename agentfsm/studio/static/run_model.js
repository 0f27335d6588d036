// One run as the page sees it: its details, its journal, the version that is shown, and changes as they happen.
import { api, follow } from "./api.js";
import { throttle } from "./dom.js";
import { fold, Journal } from "./journal.js";

// Milliseconds between two drawings, at least.
const DRAW_MS = 120;
const DETAILS_MS = 300;
/** Statuses of a run that does not go on. */
export const OVER = ["done", "failed"];

export class RunModel {
  constructor(id, machine, changed) {
    this.id = id;
    this.machine = machine;
    this.journal = new Journal(machine.table);
    this.children = new Map(); // what is known of the runs below, by id
    this.details = null;
    this.draft = null;
    this.chosen = null; // version that the reader went to; null: the newest
    this.status = "";
    this.isLoaded = false;
    this.error = null;
    this.view = fold(this.journal, 0, "");
    this.stopper = new AbortController();
    this.changed = changed;
    this.draw = throttle(() => this.refresh(), DRAW_MS);
    this.loadDetails = throttle(() => this.readDetails(), DETAILS_MS);
  }

  get isLive() {
    return this.chosen === null || this.chosen >= this.journal.version;
  }

  /** Whether the run is over, as its events say or its status, whichever is read first. */
  get isOver() {
    return this.view.stop !== null || OVER.includes(this.details?.status);
  }

  /** Whether a worker executes the run now, of which the newest version is shown. */
  get isWorking() {
    return this.isLive && !this.isOver && this.details?.status === "running";
  }

  /** Read the run and follow it. The journal of a new one is only followed, so that no text of its model is missed. */
  async open({ isNew = false } = {}) {
    if (isNew) this.follow();
    await this.read({ isNew });
    if (!isNew && !this.error) this.follow();
  }

  /** Read the run as it is. */
  async read({ isNew = false } = {}) {
    await Promise.all([this.readDetails(), !isNew && this.readJournal()]);
    this.isLoaded = true;
    this.refresh();
  }

  follow() {
    follow(this.id, this.journal.version ? String(this.journal.version) : "", {
      event: (item) => this.addEvent(item),
      delta: (delta) => this.addDelta(delta),
      status: (word) => {
        this.status = word;
        if (word !== "reconnecting") this.loadDetails();
        this.draw();
      },
    }, this.stopper.signal);
  }

  close() {
    this.stopper.abort();
  }

  /** Read the journal page by page, which is quicker than to follow it from its beginning. */
  async readJournal() {
    this.header = await this.readPages(this.id, this.journal).catch((error) => void (this.error = error));
  }

  /** Read what a journal lacks, and return its header. */
  async readPages(id, journal) {
    let header = null;
    for (let after = journal.version; after !== null && !this.stopper.signal.aborted;) {
      const page = await api.journal(id, after);
      header = page.header;
      for (const { version, event } of page.events) journal.add(version, event);
      after = page.after;
    }
    return header;
  }

  /** Return what is known of a run below this one: its events that have arrived, and whether they have been read. */
  child(id) {
    if (!this.children.has(id)) this.children.set(id, { journal: new Journal(this.machine.table), isRead: false, error: null });
    return this.children.get(id);
  }

  /** Read the journal of a run below this one, once; its later events are followed. */
  async openChild(id) {
    const child = this.child(id);
    if (child.isRead) return;
    child.isRead = true;
    await this.readPages(id, child.journal).catch((error) => Object.assign(child, { error, isRead: false }));
    this.draw();
  }

  addEvent({ run_id: runId, version, event }) {
    (runId === this.id ? this.journal : this.child(runId).journal).add(version, event);
    const isBroken = event.is === "AttemptFailed" || event.is === "Failed";
    if (runId === this.id && (isBroken || this.draft?.turn <= this.journal.turns)) this.draft = null;
    this.loadDetails();
    this.draw();
  }

  addDelta(delta) {
    if (delta.run_id !== this.id || delta.type !== "text_delta" || delta.turn <= this.journal.turns) return;
    if (!this.draft || this.draft.turn !== delta.turn || this.draft.attempt !== delta.attempt) {
      this.draft = { turn: delta.turn, attempt: delta.attempt, text: "" };
    }
    this.draft.text = this.draft.text.slice(0, delta.offset) + delta.text; // from its beginning after a reconnection
    this.draw();
  }

  async readDetails() {
    try {
      this.details = await api.details(this.id);
      this.error = null;
    } catch (error) {
      if (!this.details) this.error = error;
    }
    this.draw();
  }

  goTo(version) {
    const isNewest = version === null || version >= this.journal.version;
    this.chosen = isNewest ? null : Math.max(0, version);
    this.refresh();
  }

  refresh() {
    if (!this.isLoaded || this.stopper.signal.aborted) return;
    const version = Math.min(this.chosen ?? this.journal.version, this.journal.version);
    this.view = fold(this.journal, version, this.details?.prompt ?? "");
    this.changed();
  }
}
