// The trace: what took how long, within what.
import { fill } from "../dom.js";
import { traceView } from "../trace_view.js";

export const trace = {
  id: "trace",
  title: "Trace",
  shows: () => true,
  mount(host, run) {
    const view = traceView(run);
    fill(host, view.element);
    return view.update;
  },
};
