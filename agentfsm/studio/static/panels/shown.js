// What the model was shown in a turn: instructions, tools, and the messages after compaction.
import { api } from "../api.js";
import { fill, h } from "../dom.js";
import { json } from "../format.js";
import { t } from "../i18n.js";
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
      const version = Number(pick.value);
      if (!version || version === drawn) return;
      drawn = version;
      try {
        const found = await api.shown(run.id, version);
        if (drawn === version) fill(content, drawShown(found));
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
      fill(pick, run.view.turns.map((turn) => h("option", { value: turn.version - 1 }, t("turn {n}", { n: turn.number }))));
      pick.value = wasNewest ? String(run.view.turns.at(-1).version - 1) : value;
      draw();
    };
  },
};

function drawShown(found) {
  const hiddenCount = found.messages_in_all - found.messages.length;
  return [
    h("p", { class: "soft" },
      t("{n} messages", { n: found.messages.length }),
      hiddenCount > 0 && ` · ${t("compacted from {all}", { all: found.messages_in_all })}`,
      found.tools && ` · ${t("tools")}: ${found.tools.join(", ") || t("none")}`),
    found.instructions && message(t("instructions"), found.instructions, "system"),
    found.messages.map((each) => message(ROLE[each.is] ?? each.is, textOf(each), each.is)),
  ];
}

const ROLE = { SystemMessage: "system", UserMessage: "user", AssistantMessage: "assistant", ToolResult: "tool" };

function textOf(each) {
  const parts = [each.text, ...(each.parts ?? []).map((part) => part.text ?? `[${part.is ?? "media"}]`)];
  if (each.is === "ToolResult") parts.unshift(`[${each.tool}: ${each.outcome}]`, each.content);
  for (const call of each.calls ?? []) parts.push(`${call.name}(${call.arguments})`);
  return parts.filter(Boolean).join("\n") || json(each);
}

function message(role, text, kind) {
  return h("article", { class: `message ${kind}` }, h("span", { class: "who" }, t(role)), h("pre", {}, text));
}
