// Labels of the data that the run has read.
import { fill, h } from "../dom.js";
import { t } from "../i18n.js";

export const labels = {
  id: "labels",
  title: "Labels",
  shows: (run) => (run.details?.labels?.length ?? 0) > 0,
  mount(host, run) {
    return () => fill(host,
      h("p", { class: "soft" }, t("The run has read data with these labels.")),
      h("p", {}, run.details.labels.map((each) => [h("span", { class: "label" }, each), " "])));
  },
};
