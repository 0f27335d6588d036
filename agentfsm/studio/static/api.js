// The gateway's HTTP API: every request of the studio is made here.

const KEY = "agentfsm.key";
// Path of the gateway, below which the studio is: empty, unless an application or a proxy has it below another.
const ROOT = new URL("..", import.meta.url).pathname.slice(0, -1);

/** Error of a request: the gateway's text, or the network's. Status 0: no answer. */
export class ApiError extends Error {
  /**
   * @param {number} status
   * @param {string} code
   * @param {string} message
   */
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const credentials = {
  get: () => localStorage.getItem(KEY),
  set: (/** @type {string} */ key) => localStorage.setItem(KEY, key),
  clear: () => localStorage.removeItem(KEY),
  /** Call `act` when another window has set the key. */
  onSet: (/** @type {() => void} */ act) => window.addEventListener("storage", (event) => event.key === KEY && event.newValue && act()),
};

async function send(method, path, body, options = {}) {
  const headers = { ...options.headers };
  if (credentials.get()) headers.authorization = `Bearer ${credentials.get()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(ROOT + path, { ...options, method, headers, body: body && JSON.stringify(body), cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "unreachable", "The server does not answer.");
  }
  if (!response.ok) {
    if (response.status === 401) window.dispatchEvent(new Event("signed-out"));
    const told = await response.json().catch(() => ({}));
    throw new ApiError(response.status, told.error?.code ?? "", told.error?.message ?? response.statusText);
  }
  return response;
}

async function read(method, path, body, options) {
  const response = await send(method, path, body, options);
  return response.status === 204 ? null : response.json();
}

function query(values) {
  const given = Object.entries(values ?? {}).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return given.length ? `?${new URLSearchParams(given)}` : "";
}

/** Return a random key for a request, with which it may be sent again. */
export const newKey = () => Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");

/**
 * Let a request take effect once: until it has an answer, the same body is sent again with the same key.
 *
 * @template B, A
 * @param {(body: B, key: string) => Promise<A>} request
 * @returns {(body: B) => Promise<A>}
 */
export function once(request) {
  let sent = { text: "", key: "" };
  return async (body) => {
    const text = JSON.stringify(body);
    if (sent.text !== text) sent = { text, key: newKey() };
    const answer = await request(body, sent.key);
    sent = { text: "", key: "" };
    return answer;
  };
}

const runPath = (id, rest = "") => `/v1/runs/${encodeURIComponent(id)}${rest}`;

export const api = {
  machine: () => read("GET", "/v1/machine"),
  runs: (filters) => read("GET", `/v1/runs${query(filters)}`),
  start: (body, key) => read("POST", "/v1/runs", body, { headers: { "idempotency-key": key } }),
  run: (id) => read("GET", runPath(id)),
  details: (id) => read("GET", runPath(id, "/details")),
  journal: (id, after) => read("GET", runPath(id, `/journal${query({ after, limit: 2000 })}`)),
  shown: (id, turn) => read("GET", runPath(id, `/request${query({ turn })}`)),
  diff: (id, values) => read("GET", runPath(id, `/diff${query(values)}`)),
  replay: (id) => read("GET", runPath(id, "/replay")),
  fork: (id, body, key) => read("POST", runPath(id, "/fork"), body, { headers: { "idempotency-key": key } }),
  act: (id, verb, body) => read("POST", runPath(id, `/${verb}`), body),
  agents: () => read("GET", "/v1/agents"),
  agent: (name) => read("GET", `/v1/agents/${encodeURIComponent(name)}`),
  sessions: () => read("GET", "/v1/sessions"),
  costs: (filters) => read("GET", `/v1/costs${query(filters)}`),
  caller: () => read("GET", "/v1/caller"),
  open: () => read("GET", "/v1/open"),
  metrics: (filters) => read("GET", `/v1/metrics${query(filters)}`),
  alerts: (filters) => read("GET", `/v1/alerts${query(filters)}`),
  schedules: () => read("GET", "/v1/schedules"),
  steer: (name, verb) => read("POST", `/v1/schedules/${encodeURIComponent(name)}/${verb}`),
  rollouts: () => read("GET", "/v1/rollouts"),
  back: (name, body) => read("POST", `/v1/rollouts/${encodeURIComponent(name)}/back`, body),
  workers: () => read("GET", "/v1/workers"),
};

const RETRY_MS = 1000;

/**
 * @typedef {object} Followed
 * @property {(item: {run_id: string, version: number, event: any}) => void} event
 * @property {(delta: any) => void} [delta]
 * @property {(word: string) => void} status
 */

/**
 * Follow the journals of a run and its sub-agents after a position, through restarts of the server, until they end.
 *
 * `on.event(item)` gets each event once, `on.delta(delta)` text that a model is writing, `on.status(word)` "live",
 * "reconnecting" or "complete", or the text of a final error.
 *
 * @param {string} id
 * @param {string} position
 * @param {Followed} on
 * @param {AbortSignal} signal
 */
export async function follow(id, position, on, signal) {
  while (!signal.aborted) {
    try {
      const response = await send("GET", runPath(id, "/events"), undefined, {
        signal,
        headers: position ? { "last-event-id": position } : {},
      });
      on.status("live");
      for await (const message of readMessages(response.body)) {
        if (message.event === "end") return on.status("complete");
        if (message.event === "retry") break;
        if (message.event === "delta") on.delta?.(JSON.parse(message.data));
        else on.event(JSON.parse(message.data));
        if (message.id) position = message.id;
      }
    } catch (error) {
      if (signal.aborted || error.name === "AbortError") return;
      if (error instanceof ApiError && error.status >= 400 && error.status < 500) return on.status(error.message);
    }
    on.status("reconnecting");
    await new Promise((resume) => setTimeout(resume, RETRY_MS));
  }
}

async function* readMessages(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop() ?? "";
    for (const block of blocks) {
      const message = {};
      for (const line of block.split("\n")) {
        const colon = line.indexOf(": ");
        if (colon > 0) message[line.slice(0, colon)] = line.slice(colon + 2);
      }
      if (message.data !== undefined) yield message;
    }
  }
}
