// Drives a gateway with CopilotKit's own client, without a page: for each line {url, headers, threadId, state, context,
// properties, tools, messages} of standard input it adds the messages of the user one after the other, and runs the agent
// after each. `tools` maps the name of a front-end tool to {parameters, results, state}: its handler returns the next
// result, or throws it if that is {error}, and first sets the fields of `state` in the agent's state, as a page does.
// Prints a line {messages, state, states, executed, errors}.
import { createInterface } from "node:readline";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

process.env.COPILOTKIT_TELEMETRY_DISABLED = "true";
for (const name of ["log", "info", "warn", "error", "debug"]) console[name] = () => {}; // standard output is for answers
const require = createRequire(process.argv[2] + "/");
const { CopilotKitCore } = await import(pathToFileURL(require.resolve("@copilotkit/core")));
const own = createRequire(require.resolve("@copilotkit/core")); // its own version of the AG-UI client
const { HttpAgent } = await import(pathToFileURL(own.resolve("@ag-ui/client")));

for await (const line of createInterface({ input: process.stdin })) {
  const asked = JSON.parse(line);
  const { url, headers, threadId } = asked;
  const agent = new HttpAgent({ agentId: "shop", url, headers, threadId, initialState: asked.state ?? {} });
  const core = new CopilotKitCore({ agents__unsafe_dev_only: { shop: agent }, properties: asked.properties ?? {} });
  const states = [];
  const executed = [];
  const errors = [];
  core.subscribe({ onError: ({ code, error }) => void errors.push(`${code}: ${error.message}`) });
  agent.subscribe({ onStateChanged: ({ state }) => void states.push(structuredClone(state)) });
  for (const each of asked.context ?? []) core.addContext(each);
  for (const [name, made] of Object.entries(asked.tools ?? {})) {
    core.addTool({
      name,
      description: `The page's ${name}`,
      parameters: { "~standard": { version: 1, vendor: "test", jsonSchema: { input: () => made.parameters } } },
      handler: async (given) => {
        executed.push([name, given]);
        if (made.state) agent.setState({ ...agent.state, ...made.state });
        const result = made.results.shift();
        if (result?.error) throw new Error(result.error);
        return result;
      },
    });
  }
  for (const [index, content] of asked.messages.entries()) {
    agent.addMessage({ id: `u${index}`, role: "user", content });
    await core.runAgent({ agent });
  }
  const answer = { messages: agent.messages, state: agent.state, states, executed, errors };
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}
