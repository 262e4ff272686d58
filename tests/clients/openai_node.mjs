// npm's openai: a chat whole and streamed, a response, a tool, embeddings.
// In Node it prints one JSON line: node openai_node.mjs URL KEY MODEL, in a folder where the package
// is installed. In a browser `ask` does the same; esbuild makes one script of it.

import OpenAI from "openai";

const parameters = {
  type: "object",
  properties: { city: { type: "string", enum: ["Rome", "Oslo"] } },
  required: ["city"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "weather", parameters } }];
const messages = [{ role: "user", content: "Once upon a time" }];

export async function ask(url, apiKey, model) {
  const client = new OpenAI({
    baseURL: `${url}/v1`,
    apiKey,
    maxRetries: 0,
    dangerouslyAllowBrowser: true,
  });
  const asked = { model, max_tokens: 60, temperature: 0.7, seed: 3 };
  const whole = await client.chat.completions.create({ ...asked, messages });
  let streamed = "";
  const stream = await client.chat.completions.create({ ...asked, messages, stream: true });
  for await (const chunk of stream) streamed += chunk.choices[0]?.delta?.content ?? "";
  const called = await client.chat.completions.create({
    ...asked,
    messages,
    tools,
    tool_choice: "required",
  });
  const response = await client.responses.create({
    model,
    input: messages[0].content,
    max_output_tokens: 60,
    temperature: 0.7,
    seed: 3,
  });
  const vectors = await client.embeddings.create({ model, input: ["a", "b"] });
  return {
    text: whole.choices[0].message.content,
    streamed,
    by_responses: response.output_text,
    city: JSON.parse(called.choices[0].message.tool_calls[0].function.arguments).city,
    num_vectors: vectors.data.length,
  };
}

if (typeof process !== "undefined") {
  console.log(JSON.stringify(await ask(...process.argv.slice(2))));
}
