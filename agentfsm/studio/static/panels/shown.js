// What the model was shown in a turn: instructions, tools, and the messages after compaction.
import { api } from "../api.js";
import { fill, h } from "../dom.js";
import { t } from "../i18n.js";
import { messageText } from "../messages.js";
import { empty, failure } from "../parts.js";

export const shown = {
  id: "shown",
  title: "What the model saw",
  shows: (run) => run.view.turns.length > 0,
  mount(host, run) {
    const pick = h("select", { "aria-label": t("Turn"), onchange: () => draw() });
    const content = h("div", { class: "shown", "aria-live": "polite" });
    fill(host, h("div", { class: "toolbar" }, pick), content);
    let turns = 0;
    let drawn = 0;

    async function draw() {
      const turn = Number(pick.value);
      if (!turn || turn === drawn) return;
      drawn = turn;
      try {
        const found = await api.shown(run.id, turn);
        if (drawn === turn) fill(content, drawShown(found, run.header.instructions));
      } catch (error) {
        drawn = 0;
        fill(content, failure(error));
      }
    }

    return () => {
      if (turns === run.view.turns.length) return;
      const wasNewest = !pick.value || pick.selectedIndex === pick.options.length - 1;
      const value = pick.value;
      turns = run.view.turns.length;
      if (!turns) return void fill(content, empty(t("No turn yet"), t("The model has not been asked.")));
      fill(pick, run.view.turns.map((turn) => h("option", { value: turn.number }, t("turn {n}", { n: turn.number }))));
      pick.value = wasNewest ? String(turns) : value;
      draw();
    };
  },
};

function drawShown(found, instructions) {
  return [
    h("p", { class: "soft" },
      t("{n} messages", { n: found.messages.length }),
      found.is_compacted && ` · ${t("compacted")}`,
      found.offered && ` · ${t("tools")}: ${found.offered.join(", ")}`,
      found.hash && h("span", { class: "id" }, ` ${found.hash}`)),
    instructions && message(t("instructions"), instructions, "system"),
    found.messages.map((each) => message(each.origin ?? ROLE[each.is] ?? each.is, messageText(each), each.is)),
  ];
}

const ROLE = { SystemMessage: "system", UserMessage: "user", AssistantMessage: "assistant", ToolResult: "tool" };

function message(role, text, kind) {
  return h("article", { class: `message ${kind}` }, h("span", { class: "who" }, t(role)), h("pre", {}, text));
}
