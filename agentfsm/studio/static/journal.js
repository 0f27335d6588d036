// The journal of one run, and the run at any version of it. The machine's table says which state each event leads to.

const REPLIES = new Set(["ToolsChosen", "AnswerGiven", "AnswerDrafted", "ModelFaltered"]);
// Purposes of usage in events that do not name one, as in agentfsm/core/run_facts.py; all others are turns.
const PURPOSES = { Compacted: "summary", ToolsOffered: "tool_selection", Judged: "judge" };
// Seconds between two events that no worker accounts for: shorter ones are differences of clocks.
const IDLE_S = 0.2;
const USAGE = ["input_tokens", "output_tokens", "cached_tokens", "reasoning_tokens", "cost_usd"];

/** Events of a run in their order, and the state after each. */
export class Journal {
  constructor(table) {
    this.table = table;
    this.events = [];
    this.turns = 0;
    this.states = ["observe"];
  }

  get version() {
    return this.events.length;
  }

  /** Add the event that makes a version. */
  add(version, event) {
    if (version !== this.version + 1) return;
    this.states.push(this.table[this.states[this.version]][event.is]);
    this.events.push(event);
    if (REPLIES.has(event.is)) this.turns++;
  }
}

/** Return the run at a version: its state, turns, calls, messages, plan, usage and waits. */
export function fold(journal, version, prompt) {
  const view = {
    version,
    state: journal.states[version],
    path: new Map(), // "observe>think": number of times
    turns: [],
    calls: new Map(),
    entries: [], // the transcript
    plans: [],
    usage: emptyUsage(),
    purposes: new Map(),
    seconds: 0,
    waited: 0,
    idleBefore: 0, // newest version before which no worker had the run
    updatedAt: journal.events[version - 1]?.at ?? null,
    stop: null,
    prompt,
  };
  let previousAt = null;
  for (let index = 0; index < version; index++) {
    const event = journal.events[index];
    const arrow = `${journal.states[index]}>${journal.states[index + 1]}`;
    view.path.set(arrow, (view.path.get(arrow) ?? 0) + 1);
    const took = event.took_s ?? 0;
    const idle = previousAt === null ? 0 : Math.max(0, event.at - previousAt - took);
    view.waited += idle;
    if (idle > IDLE_S) view.idleBefore = index + 1;
    previousAt = event.at;
    view.seconds += took;
    addUsage(view, event);
    if (REPLIES.has(event.is)) addTurn(view, event, index + 1);
    (STEPS[event.is] ?? (() => {}))(view, event, index + 1);
  }
  return view;
}

/** What an answer says was done, although it was not, with the reasons. */
export const undoneOf = (event) => (event.claims ?? [])
  .filter((claim) => !claim.call_id)
  .map((claim) => `${claim.tool}(${JSON.stringify(claim.arguments)}): ${claim.fault}`).join("\n");

function addTurn(view, event, version) {
  const turn = { number: view.turns.length + 1, version, event, usage: event.usage ?? {}, calls: [] };
  view.turns.push(turn);
  if (event.is === "ModelFaltered") note(view, version, "fault", event.error);
  else view.entries.push({ kind: "reply", version, turn: turn.number, message: event.message, calls: [], model: event.model });
}

function addCalls(view, calls, event, version, turn) {
  for (const call of calls) {
    const known = {
      id: call.id,
      name: call.name,
      arguments: parseArguments(call.arguments),
      turn,
      key: call.key,
      kind: "",
      askedAt: event.at,
      version,
      status: "intended",
      starts: [],
      attempts: 0,
      waits: [],
      crashes: [], // times at which it was found that a worker had died
      guards: [], // decisions on the call
      result: null,
    };
    view.calls.set(call.id, known);
    if (turn) view.turns.at(-1).calls.push(known);
    const entry = view.entries.findLast((each) => each.version === version && each.calls);
    entry?.calls.push(known);
  }
}

function parseArguments(text) {
  try {
    return JSON.parse(text);
  } catch {
    return { "": text };
  }
}

function note(view, version, kind, text, calls) {
  view.entries.push({ kind, version, text, calls });
}

/** Close the wait of a call, if it has one. */
function endWait(call, at) {
  const wait = call.waits.at(-1);
  if (wait && wait.to === null) wait.to = at;
}

const withCall = (act) => (view, event, version) => {
  const call = view.calls.get(event.call_id ?? event.result.call_id);
  if (call) act(call, event, view, version);
};

const beginWait = (status) => withCall((call, event) => {
  endWait(call, event.at);
  Object.assign(call, { status, digest: event.digest, description: event.description, expiresAt: event.expires_at });
  call.waits.push({ kind: status, from: event.at, to: null });
});

function editArguments(call, event) {
  if (!event.arguments) return;
  Object.assign(call, { proposed: call.arguments, arguments: parseArguments(event.arguments), key: event.key ?? call.key });
}

const STEPS = {
  Observed(view, event, version) {
    if (!view.entries.some((each) => each.kind === "prompt")) {
      view.entries.push({ kind: "prompt", version, text: view.prompt });
    }
    for (const input of event.inputs ?? []) {
      const text = (input.parts ?? []).map((part) => part.text ?? `[${part.is}]`).join("\n");
      view.entries.push({ kind: "input", version, text, source: input.kind ?? "user", by: input.by });
    }
  },
  ToolsChosen(view, event, version) {
    addCalls(view, event.message.calls ?? [], event, version, view.turns.length);
  },
  AnswerGiven(view) {
    view.stop = { reason: "completed", message: "" };
  },
  Accepted(view) {
    view.stop = { reason: "completed", message: "" };
  },
  Guarded: withCall((call, event, view, version) => {
    call.guards.push({ ...event, version });
  }),
  ToolStarted: withCall((call, event, view, version) => {
    endWait(call, event.at);
    // Started again without an end: a retry, or by another worker after a time without one.
    if (call.status === "running" && view.idleBefore > call.startedBy) call.crashes.push(event.at);
    Object.assign(call, { status: "running", startedBy: version, kind: event.kind ?? "", key: event.key || call.key });
    call.starts.push(event.since || event.at);
    call.attempts += event.attempts ?? 1;
  }),
  ToolCutOff: withCall((call, event) => {
    call.status = "intended";
    call.waits.push({ kind: "intended", from: event.started_at + event.duration_s, to: null });
  }),
  ToolFinished: withCall((call, event) => {
    endWait(call, event.at);
    Object.assign(call, { status: event.result.outcome, result: event.result, endedAt: event.at, by: event.by });
  }),
  ToolLost(view, event, version) {
    withCall((call) => !event.lacks_tool && call.crashes.push(event.at))(view, event, version);
    beginWait("lost")(view, event, version);
  },
  ToolPaused: withCall((call, event) => {
    endWait(call, event.at);
    Object.assign(call, { status: "paused", pending: event.pending });
    call.waits.push({ kind: "paused", from: event.at, to: null });
  }),
  InputGiven: withCall((call, event) => {
    endWait(call, event.at);
    if (call.status === "paused") call.status = "approved";
    call.informedBy = event.by;
  }),
  ApprovalAsked(view, event, version) {
    withCall(editArguments)(view, event, version);
    beginWait("asked")(view, event, version);
  },
  ApprovalGiven: withCall((call, event) => {
    endWait(call, event.at);
    call.status = "approved";
    call.approvedBy = event.by ?? "";
    editArguments(call, event);
  }),
  Compacted(view, event, version) {
    note(view, version, "compaction", `${event.why} (${event.tokens_before} → ${event.tokens_after})`);
  },
  ToolsOffered(view, event, version) {
    note(view, version, "tools", event.tools.join(", "));
  },
  Planned(view, event, version) {
    view.plans.push({ number: view.plans.length + 1, version, call: event.call.id, reason: event.reason, steps: [] });
    note(view, version, "plan", event.reason ?? "", []);
    addCalls(view, [event.call], event, version, 0);
  },
  PlanDropped(view, event, version) {
    note(view, version, "plan", event.reason);
  },
  StepsReady(view, event, version) {
    note(view, version, "steps", "", []);
    addCalls(view, event.calls, event, version, 0);
  },
  AnswerDrafted(view, event, version) {
    const left = undoneOf(event);
    if (left) note(view, version, "undone", left);
  },
  ChildReported(view, event, version) {
    withCall((call) => {
      endWait(call, event.at);
      if (event.pending) call.waits.push({ kind: "paused", from: event.at, to: null });
      call.background = { result: event.result ?? null, endedAt: event.result ? event.at : null, isWaiting: Boolean(event.pending) };
    })(view, event, version);
    if (event.result) note(view, version, "background", `${event.call_id} ${event.result.tool}: ${event.result.outcome}\n${event.result.content}`);
  },
  Judged(view, event, version) {
    note(view, version, "verdict", [event.verdict.action, event.verdict.note].filter(Boolean).join(": "));
  },
  Continued(view, event, version) {
    if (event.note) note(view, version, "note", event.note);
    if (event.asks) note(view, version, "question", event.asks);
  },
  Paused(view, event, version) {
    note(view, version, "pause", [event.by, event.message].filter(Boolean).join(": "));
  },
  Resumed(view, event, version) {
    const renamed = event.renamed ?? {};
    const names = Object.entries(renamed).map(([before, now]) => `${before} → ${now}`);
    note(view, version, "resume", [...(event.changes ?? []), ...names].join("; "));
    for (const call of view.calls.values()) {
      if (!call.starts.length && !call.result) call.name = renamed[call.name] ?? call.name;
    }
  },
  LimitReached(view, event, version) {
    closeCalls(view, event.at);
    note(view, version, "limit", event.message);
  },
  Failed(view, event, version) {
    closeCalls(view, event.at);
    view.stop = { reason: event.reason, message: event.message };
    note(view, version, "failure", event.message);
  },
};

function closeCalls(view, at) {
  for (const call of view.calls.values()) {
    endWait(call, at);
    if (!call.result && call.status !== "closed") Object.assign(call, { status: "closed", endedAt: at });
  }
}

// Usage.

export const emptyUsage = () => Object.fromEntries([...USAGE.map((name) => [name, 0]), ["cost_usd", null], ["estimated", false], ["unpriced", false], ["count", 0]]);

/** Add up usages, of which some may be missing. */
export function sumUsage(usages) {
  const total = emptyUsage();
  for (const usage of usages) if (usage) addTo(total, usage);
  return total;
}

function addTo(total, usage) {
  for (const name of USAGE) if (usage[name] !== undefined && usage[name] !== null) total[name] = (total[name] ?? 0) + usage[name];
  for (const mark of ["estimated", "unpriced"]) total[mark] ||= usage[mark] === true;
  total.count += 1;
}

function addUsage(view, event) {
  const parts = [];
  if (event.usage) {
    const own = { ...event.usage };
    for (const each of event.tier?.spent ?? []) {
      parts.push([each.purpose, each.usage ?? {}]);
      for (const name of USAGE) if (each.usage?.[name]) own[name] -= each.usage[name];
    }
    parts.push([event.purpose ?? PURPOSES[event.is] ?? "turn", own]);
  }
  if (event.result?.child) parts.push(["agent", event.result.child.usage ?? {}]);
  for (const each of event.result?.spent ?? []) parts.push([each.purpose, each.usage ?? {}]);
  for (const [purpose, usage] of parts) {
    if (!view.purposes.has(purpose)) view.purposes.set(purpose, emptyUsage());
    addTo(view.purposes.get(purpose), usage);
    addTo(view.usage, usage);
  }
}

export const tokensOf = (usage) => (usage.input_tokens ?? 0) + (usage.output_tokens ?? 0);
