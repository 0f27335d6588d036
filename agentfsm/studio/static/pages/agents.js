// Agents: tools with declarations and findings, sub-agents, MCP servers, limits, the machine.
import { api } from "../api.js";
import { fill, h } from "../dom.js";
import { count, json } from "../format.js";
import { t } from "../i18n.js";
import { drawMachine } from "../machine.js";
import { card, chip, empty, facts, failure, table } from "../parts.js";

export const agents = {
  path: "agents",
  title: "Agents",
  async mount(main, _parameters, name) {
    try {
      const { agents: found } = await api.agents();
      if (!found.length) {
        return void fill(main, h("header", { class: "page" }, h("h1", {}, t("Agents"))),
          empty(t("No agent is served"), t("The studio was opened on a store. `agentfsm studio module:agent` shows an agent, and executes its runs.")),
          card(t("Machine"), drawMachine((await api.machine()).table)));
      }
      if (name === undefined) {
        if (found.length === 1) return void await drawAgent(main, found[0].name);
        return void fill(main, h("header", { class: "page" }, h("h1", {}, t("Agents"))), drawList(found));
      }
      return void await drawAgent(main, name);
    } catch (error) {
      return void fill(main, failure(error));
    }
  },
};

const link = (name, text) => h("a", { href: `#/agents/${encodeURIComponent(name)}` }, text ?? name);

function drawList(found) {
  return table(t("Agents"), [t("Agent"), t("Version"), t("Model"), [t("Tools")]], found.map((each) =>
    h("tr", {}, h("td", {}, link(each.name)), h("td", {}, each.version), h("td", {}, each.model), h("td", { class: "number" }, each.tools.length))));
}

async function drawAgent(main, name) {
  const [agent, machine] = await Promise.all([api.agent(name), api.machine()]);
  fill(main,
    h("header", { class: "page" }, h("h1", {}, agent.name),
      h("div", { class: "line" }, agent.version && chip("soft", agent.version), h("span", { class: "soft" }, agent.model),
        h("a", { href: `#/runs?agent=${encodeURIComponent(agent.name)}` }, t("its runs")))),
    card(t("Tools"), agent.tools.length ? drawTools(agent) : empty(t("No tools"), t("This agent only talks."))),
    agent.findings.length > 0 && card(t("Findings"), h("ul", { class: "findings" }, agent.findings.map((each) =>
      h("li", {}, chip(each.severity), " ", each.tool && h("code", {}, each.tool), " ", each.message)))),
    agent.sub_agents.length > 0 && card(t("Sub-agents"), h("ul", {}, agent.sub_agents.map((each) =>
      h("li", {}, h("code", {}, each.tool), " → ", h("strong", {}, each.name), h("span", { class: "soft" }, ` ${each.model}`))))),
    agent.mcp_servers.length > 0 && card(t("MCP servers"), drawServers(agent.mcp_servers)),
    card(t("Limits"), facts(Object.entries(agent.limits).map(([name, value]) => [name, typeof value === "number" ? count(value) : value]), "facts grid")),
    agent.input_schema && card(t("Inputs"), h("pre", {}, json(agent.input_schema))),
    agent.instructions && card(t("Instructions"), h("pre", {}, agent.instructions)),
    card(t("Machine"), drawMachine(machine.table)));
}

function drawTools(agent) {
  const rows = agent.tools.map((each) => h("tr", { "data-tool": each.name },
    h("td", { class: "nowrap" }, h("code", {}, each.name)),
    h("td", {}, each.description),
    h("td", {}, each.declarations.map((word) => [h("span", { class: "label" }, word), " "])),
    h("td", {}, h("details", {}, h("summary", {}, t("schema")), h("pre", {}, json(each.parameters))))));
  return table(t("Tools"), [t("Tool"), t("Description"), t("Declarations"), t("Parameters")], rows);
}

function drawServers(servers) {
  const rows = servers.map((each) => h("tr", {},
    h("td", {}, each.name),
    h("td", {}, chip(each.trusted ? "done" : "soft", each.trusted ? t("trusted") : t("not trusted"))),
    h("td", { class: "number" }, each.tools),
    h("td", {}, each.pinned ? h("span", {}, t("{n} tools pinned", { n: each.pinned })) : t("no pins")),
    h("td", {}, each.error ?? "")));
  return table(t("MCP servers"), [t("Server"), t("Trust"), [t("Tools")], t("Pins"), t("Error")], rows);
}
