// Sends AG-UI requests with the official client, whose pipeline has `verifyEvents`, and prints what it understood: for
// each line {url, method, headers, input} of standard input a line {event} for each event as it comes, and then one line
// {events, messages, interrupts, error}.
import { createInterface } from "node:readline";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(process.argv[2] + "/");
const { HttpAgent } = await import(pathToFileURL(require.resolve("@ag-ui/client")));

process.on("unhandledRejection", () => {}); // of a connection that was cut; the run's own error is in the answer

for await (const line of createInterface({ input: process.stdin })) {
  const { url, method, headers, input } = JSON.parse(line);
  const events = [];
  const agent = new HttpAgent({
    url,
    headers,
    threadId: input.threadId,
    initialMessages: input.messages,
    fetch: (to, init) => fetch(to, method === "GET" ? { ...init, method, body: undefined } : init),
  });
  let error = null;
  try {
    await agent.runAgent(
      { runId: input.runId, resume: input.resume },
      {
        onEvent: ({ event }) => {
          events.push(event);
          console.log(JSON.stringify({ event: event.type }));
        },
        onRunFailed: (failed) => void (error = String(failed.error)),
      },
    );
  } catch (failed) {
    error = String(failed);
  }
  const interrupts = agent.pendingInterrupts ?? [];
  console.log(JSON.stringify({ events, messages: agent.messages, interrupts, error }));
}
