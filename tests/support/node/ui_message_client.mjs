// Drives pages of `useChat` without a browser: `AbstractChat` and `DefaultChatTransport` are its own, and only the state is
// a plain object in place of React's. Each line of standard input has one of these, and is answered by one line
// {messages, status, error, requests}:
//   open: {chat, url, headers, messages}   begins a page of a chat
//   send: PARTS, id, metadata              sends a message of the user
//   submit: true                           sends the last message again
//   regenerate: true                       asks for another answer
//   approve: BOOLEAN, reason               decides on the calls that ask for it; the page sends that once all are decided
//   output: TEXT                           gives the result of the call that waits for one, and sends it
//   resume: true                           resumes the stream, as a page does that is loaded again
import { createInterface } from "node:readline";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(process.argv[2] + "/");
const ai = await import(pathToFileURL(require.resolve("ai")));

class State {
  constructor(messages) {
    Object.assign(this, { messages, status: "ready", error: undefined });
  }
  pushMessage = (message) => (this.messages = [...this.messages, message]);
  popMessage = () => (this.messages = this.messages.slice(0, -1));
  replaceMessage = (index, message) => (this.messages = this.messages.with(index, structuredClone(message)));
  snapshot = (value) => structuredClone(value);
}

class Page extends ai.AbstractChat {}

const settled = async (page) => {
  do await new Promise((done) => setTimeout(done, 5));
  while (page.status === "submitted" || page.status === "streaming");
};

let page;
let requests = [];
for await (const line of createInterface({ input: process.stdin })) {
  const asked = JSON.parse(line);
  requests = [];
  if (asked.open) {
    const { chat, url, headers, messages } = asked.open;
    const transport = new ai.DefaultChatTransport({
      api: url,
      headers,
      fetch: async (to, init) => {
        const answer = await fetch(to, init);
        requests.push([init.method, answer.status, answer.headers.get("x-vercel-ai-ui-message-stream")]);
        return answer;
      },
    });
    page = new Page({
      id: chat,
      transport,
      state: new State(messages ?? []),
      sendAutomaticallyWhen: ai.lastAssistantMessageIsCompleteWithApprovalResponses,
    });
  }
  const tools = (page.lastMessage?.parts ?? []).filter(ai.isToolUIPart);
  if (asked.send) await page.sendMessage({ parts: asked.send, id: asked.id, metadata: asked.metadata });
  if (asked.submit) await page.sendMessage();
  if (asked.regenerate) await page.regenerate();
  if (asked.resume) await page.resumeStream();
  if ("approve" in asked) {
    for (const part of tools.filter((each) => each.state === "approval-requested")) {
      await page.addToolApprovalResponse({ id: part.approval.id, approved: asked.approve, reason: asked.reason });
    }
    await settled(page);
  }
  if ("output" in asked) {
    const [part] = tools.filter((each) => each.state === "input-available");
    await page.addToolOutput({ tool: ai.getToolName(part), toolCallId: part.toolCallId, output: asked.output });
    await page.sendMessage();
  }
  const { messages, status, error } = page;
  console.log(JSON.stringify({ messages, status, error: error ? String(error.message) : null, requests }));
}
