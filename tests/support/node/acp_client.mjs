// An editor: runs an agent that speaks the Agent Client Protocol, by the official client. The second argument is JSON
// {command, cwd, env, load, prompt, answer, until}: it begins a session, or loads the one of `load`, says `prompt` if there is one,
// and answers requests for permission with `answer`, or kills the agent if that is "kill". At the end of the prompt, or once
// the agent has said `until` after a session was loaded, it prints {session, agent, stop, updates, asked, error, code}.
import { spawn } from "node:child_process";
import { createRequire } from "node:module";
import { Readable, Writable } from "node:stream";
import { pathToFileURL } from "node:url";

const require = createRequire(process.argv[2] + "/");
const acp = await import(pathToFileURL(require.resolve("@agentclientprotocol/sdk")));
const { command, cwd, env, load, prompt, answer, until } = JSON.parse(process.argv[3]);
const child = spawn(command[0], command.slice(1), { cwd, env, stdio: ["pipe", "pipe", "inherit"] });
const said = { updates: [], asked: [], error: null };
let answered;
const hasAnswered = new Promise((done) => (answered = done));
const { agent, client: ours } = acp.methods;

try {
  await acp
    .client({ name: "editor" })
    .onNotification(ours.session.update, ({ params }) => {
      said.updates.push(params.update);
      const texts = said.updates.filter((each) => each.sessionUpdate === "agent_message_chunk");
      if (texts.map((each) => each.content.text).join("") === until) answered();
    })
    .onRequest(ours.session.requestPermission, ({ params }) => {
      said.asked.push(params);
      if (answer === "kill") child.kill("SIGKILL");
      return { outcome: { outcome: "selected", optionId: answer } };
    })
    .connectWith(acp.ndJsonStream(Writable.toWeb(child.stdin), Readable.toWeb(child.stdout)), async (editor) => {
      const begun = await editor.request(agent.initialize, {
        protocolVersion: acp.PROTOCOL_VERSION,
        clientCapabilities: {},
      });
      said.agent = begun.agentInfo;
      const session = { cwd, mcpServers: [] };
      if (load) await editor.request(agent.session.load, { ...session, sessionId: load });
      said.session = load ?? (await editor.request(agent.session.new, session)).sessionId;
      const parts = { sessionId: said.session, prompt: [{ type: "text", text: prompt }] };
      if (prompt) said.stop = (await editor.request(agent.session.prompt, parts)).stopReason;
      else await hasAnswered;
    });
} catch (error) {
  said.error = String(error.message ?? error);
}
child.stdin.end();
if (child.exitCode === null && child.signalCode === null) await new Promise((done) => child.once("exit", done));
console.log(JSON.stringify({ ...said, code: child.exitCode }));
