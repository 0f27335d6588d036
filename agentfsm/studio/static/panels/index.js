// The panels of a run, in their order. A panel is a module with `id`, `title`, `shows(run)` and `mount(host, run)`;
// `mount` returns a function that draws the panel again when the run has changed.
import { calls } from "./calls.js";
import { changes } from "./changes.js";
import { cost } from "./cost.js";
import { events } from "./events.js";
import { guards } from "./guards.js";
import { labels } from "./labels.js";
import { memory } from "./memory.js";
import { plan } from "./plan.js";
import { shown } from "./shown.js";
import { trace } from "./trace.js";
import { transcript } from "./transcript.js";

export const PANELS = [transcript, trace, events, calls, shown, plan, labels, guards, memory, cost, changes];
