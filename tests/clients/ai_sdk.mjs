// Vercel's ai with @ai-sdk/openai, whose default is the Responses API: text whole and streamed, an
// object of a schema, a tool. Prints one JSON line.
// node ai_sdk.mjs URL KEY MODEL, in a folder where the packages are installed.

import { createOpenAI } from "@ai-sdk/openai";
import { generateText, Output, streamText, tool } from "ai";
import { z } from "zod";

const [url, apiKey, name] = process.argv.slice(2);
// What the API has no field for goes into the body.
const seeded = (address, options) =>
  fetch(address, { ...options, body: JSON.stringify({ ...JSON.parse(options.body), seed: 3 }) });
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey, fetch: seeded });
const asked = {
  model: openai(name),
  prompt: "Once upon a time",
  maxOutputTokens: 60,
  temperature: 0.7,
  maxRetries: 0,
};
const weather = tool({
  description: "Tells the weather.",
  inputSchema: z.object({ city: z.enum(["Rome", "Oslo"]) }),
});

const whole = await generateText(asked);
let streamed = "";
for await (const piece of streamText(asked).textStream) streamed += piece;
const called = await generateText({ ...asked, tools: { weather }, toolChoice: "required" });
const kind = z.enum(["reader", "writer"]);
const person = await generateText({ ...asked, output: Output.object({ schema: z.object({ kind }) }) });
console.log(
  JSON.stringify({
    text: whole.text,
    streamed,
    city: called.toolCalls[0].input.city,
    kind: person.output.kind,
  }),
);
