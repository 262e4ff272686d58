// One generation: the body of the request and its stream. Knows no view.

import { ApiFailure, events, getJson, request } from "./api.js";
import { Splitter } from "./tally.js";

/** What is known of the model; `hasTemplate` turns false when the server says so. */
export const model = { id: null, hasTemplate: true, proposers: [], promise: "", card: null };

export async function loadModel() {
  const [models, stats] = await Promise.all([getJson("v1/models"), getJson("stats")]);
  model.card = models.data[0];
  model.id = model.card.id;
  model.proposers = stats.proposers ?? [];
  model.promise = stats.promise ?? "";
  if (stats.has_chat_template === false) model.hasTemplate = false;
}

/** The request's path and body.
 *
 * @param job { mode, messages, sampling, seed, speculation, salt?, schema? }: the last message is
 * the user's, or the assistant's, which is then continued
 */
function call(job) {
  const isChat = job.mode === "chat";
  const body = {
    model: model.id,
    ...job.sampling,
    stream: true,
    stream_options: { include_usage: true },
    include_metrics: true,
    return_origins: true,
    speculative: { enabled: job.speculation },
  };
  if (job.seed !== null) body.seed = job.seed;
  if (job.salt) body.cache_salt = job.salt;
  if (isChat) {
    body.messages = job.messages;
    if (job.messages.at(-1).role === "assistant") {
      Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
    }
    if (job.schema) {
      const named = { name: "answer", schema: job.schema, strict: true };
      body.response_format = { type: "json_schema", json_schema: named };
    }
  } else {
    const last = job.messages.findLastIndex(({ role }) => role === "user");
    body.prompt = job.messages.slice(last).map(({ content }) => content).join("");
    if (job.schema) body.structured_outputs = { json: job.schema };
  }
  return [isChat ? "v1/chat/completions" : "v1/completions", body];
}

/** Opens the stream; a model without a chat template is asked to complete the last message. */
async function open(job, signal) {
  if (!model.id) await loadModel();
  if (!model.hasTemplate) job.mode = "completion";
  try {
    const [path, body] = call(job);
    return await request(path, { body, signal });
  } catch (failure) {
    if (failure.code !== "no_chat_template" || job.mode !== "chat") throw failure;
    model.hasTemplate = false;
    return open(job, signal);
  }
}

/** Run a job and hand every piece of text to `view.add(channel, pieces)`, after `view.opened(job)`.
 *
 * @returns the finish reason. `view.tally` holds the counts.
 * Raises ApiFailure, or AbortError when `signal` says so.
 */
export async function generate(job, view, signal) {
  view.tally.begin();
  const response = await open(job, signal);
  view.opened(job);
  const splitter = new Splitter();
  let finish = null;
  for await (const { choices, usage } of events(response)) {
    view.tally.close(usage);
    const choice = choices?.[0];
    if (!choice) continue;
    const { content, reasoning_content: reasoning } = choice.delta ?? { content: choice.text };
    const tokens = choice.tokens ?? (content || reasoning ? [{ text: "", origin: "" }] : []);
    view.tally.add(tokens);
    splitter.push(tokens.map((token) => ({ ...token })));
    if (reasoning) view.add("reasoning", splitter.take(reasoning));
    if (content) view.add("content", splitter.take(content));
    finish = choice.finish_reason ?? finish;
  }
  if (finish === null) throw new ApiFailure("lost", "The stream ended before the answer did.");
  return finish;
}
