// Sends requests with Vercel's `ai` SDK and prints what it understood: for each line {provider, url, key, headers, call,
// schema, options} of standard input a line {text, object, id, finish, usage, error, status}. `provider` is "openai", which
// speaks Responses, or "compatible", which speaks chat completions.
import { createInterface } from "node:readline";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(process.argv[2] + "/");
const load = (name) => import(pathToFileURL(require.resolve(name)));
const { generateText, streamText, jsonSchema, Output } = await load("ai");
const { createOpenAI } = await load("@ai-sdk/openai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const makers = {
  openai: createOpenAI,
  compatible: (options) => createOpenAICompatible({ name: "shop", supportsStructuredOutputs: true, includeUsage: true, ...options }),
};

globalThis.AI_SDK_LOG_WARNINGS = false;
for await (const line of createInterface({ input: process.stdin })) {
  const { provider, url, key, headers, call, schema, options } = JSON.parse(line);
  const model = makers[provider]({ baseURL: url, apiKey: key, headers })("shop");
  const request = { model, maxRetries: 0, ...options };
  if (schema) request.output = Output.object({ schema: jsonSchema(schema) });
  let failure = null;
  try {
    const result =
      call === "stream"
        ? streamText({ ...request, onError: ({ error }) => void (failure = error) })
        : await generateText(request);
    const text = await result.text;
    if (failure) throw failure;
    const said = {
      text,
      object: schema ? await result.output : null,
      id: (await result.response).id,
      finish: await result.finishReason,
      usage: await result.usage,
      messages: (await result.response).messages,
    };
    console.log(JSON.stringify(said));
  } catch (thrown) {
    const error = failure ?? thrown; // of a stream, which throws that it had no output
    console.log(JSON.stringify({ error: String(error.message ?? error), status: error.statusCode ?? null }));
  }
}
