// The pages of the navigation, in their order. A page is a module with `path`, `title`, `mount(main, parameters)`,
// and `needs` if not every caller may read what it shows: see `permits`.
import { agents } from "./agents.js";
import { alerts } from "./alerts.js";
import { costs } from "./costs.js";
import { overview } from "./overview.js";
import { rollouts } from "./rollouts.js";
import { runs } from "./runs.js";
import { schedules } from "./schedules.js";
import { sessions } from "./sessions.js";
import { talk } from "./talk.js";
import { waiting } from "./waiting.js";
import { workers } from "./workers.js";

export const PAGES = [talk, runs, waiting, agents, sessions, overview, costs, alerts, rollouts, schedules, workers];
