// npm's openai: a chat whole and streamed, a response, a tool, embeddings. Prints one JSON line.
// node openai_node.mjs URL KEY MODEL, in a folder where the package is installed.

import OpenAI from "openai";

const [url, apiKey, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: "Once upon a time" }];
const asked = { model, max_tokens: 60, temperature: 0.7, seed: 3 };
const parameters = {
  type: "object",
  properties: { city: { type: "string", enum: ["Rome", "Oslo"] } },
  required: ["city"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "weather", parameters } }];

const whole = await client.chat.completions.create({ ...asked, messages });
let streamed = "";
for await (const chunk of await client.chat.completions.create({ ...asked, messages, stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
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
console.log(
  JSON.stringify({
    text: whole.choices[0].message.content,
    streamed,
    by_responses: response.output_text,
    city: JSON.parse(called.choices[0].message.tool_calls[0].function.arguments).city,
    num_vectors: vectors.data.length,
  }),
);
