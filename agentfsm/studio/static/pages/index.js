// The pages of the navigation, in their order. A page is a module with `path`, `title` and `mount(main, parameters)`.
import { agents } from "./agents.js";
import { costs } from "./costs.js";
import { rollouts } from "./rollouts.js";
import { runs } from "./runs.js";
import { sessions } from "./sessions.js";
import { talk } from "./talk.js";
import { waiting } from "./waiting.js";
import { workers } from "./workers.js";

export const PAGES = [talk, runs, waiting, agents, sessions, costs, rollouts, workers];
