// One generation: the body of the request, its stream, and the count of what came. Knows no view.

import { ApiFailure, events, getJson, request } from "./api.js";

/** What is known of the model; `hasTemplate` turns false when the server says so. */
export const model = { id: null, hasTemplate: true, proposers: [], promise: "" };

export async function loadModel() {
  const [models, stats] = await Promise.all([getJson("v1/models"), getJson("stats")]);
  model.id = models.data[0].id;
  model.proposers = stats.proposers ?? [];
  model.promise = stats.promise ?? "";
  if (stats.has_chat_template === false) model.hasTemplate = false;
}

/** The token that ends a step is the target's own; the tokens before it were drafted. */
export const TARGET = "target";

/** Shares a stream's text among the tokens that it came from.
 *
 * A token's text can be held back, cut or never shown, so the two are matched as they come; text
 * that matches no token is nobody's.
 */
export class Splitter {
  #tokens = [];

  push(tokens) {
    this.#tokens.push(...tokens);
  }

  take(text) {
    const pieces = [];
    while (text && this.#tokens.length) {
      const token = this.#tokens[0];
      if (token.text && text.startsWith(token.text)) {
        pieces.push(this.#tokens.shift());
        text = text.slice(token.text.length);
      } else if (token.text && token.text.startsWith(text)) {
        pieces.push({ ...token, text });
        token.text = token.text.slice(text.length);
        text = "";
      } else {
        this.#tokens.shift();
      }
    }
    if (text) pieces.push({ id: null, text, origin: "" });
    return pieces;
  }
}

/** Tokens, steps and times of one stream, from which the ratios follow. Times in milliseconds. */
export class Tally {
  tokens = 0;
  steps = 0;
  origins = new Map();
  beganAt = null;
  firstAt = null;
  lastAt = null;
  #first = 0;
  #measured = null;

  /** The request is being sent. */
  begin(now = performance.now()) {
    this.beganAt = now;
  }

  add(tokens, now = performance.now()) {
    if (!tokens.length) return;
    this.tokens += tokens.length;
    for (const { origin } of tokens) {
      this.origins.set(origin, (this.origins.get(origin) ?? 0) + 1);
      if (origin === TARGET) this.steps += 1;
    }
    if (this.firstAt === null) {
      this.firstAt = now;
      this.#first = this.tokens;
    }
    this.lastAt = now;
  }

  /** The server's own count, which replaces what was counted on the way. */
  close(usage) {
    if (!usage) return;
    this.tokens = usage.completion_tokens ?? this.tokens;
    this.#measured = usage.metrics?.speculative_decoding?.mean_acceptance_length ?? null;
  }

  /** Tokens per second after the first chunk; null while there is too little to tell. */
  get rate() {
    const seconds = (this.lastAt - this.firstAt) / 1000;
    return seconds > 0.1 ? (this.tokens - this.#first) / seconds : null;
  }

  /** Emitted tokens per step, the bonus token counted. */
  get acceptanceLength() {
    return this.#measured ?? (this.steps ? this.tokens / this.steps : null);
  }

  get milliseconds() {
    return this.lastAt === null ? null : this.lastAt - this.beganAt;
  }

  get firstAfter() {
    return this.firstAt === null ? null : this.firstAt - this.beganAt;
  }
}

/** The request's path and body.
 *
 * @param job { mode, messages, temperature, maxTokens, seed, speculation, salt?, schema? }
 */
function call(job) {
  const isChat = job.mode === "chat";
  const body = {
    model: model.id,
    temperature: job.temperature,
    max_tokens: job.maxTokens,
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
    if (job.schema) {
      const named = { name: "answer", schema: job.schema, strict: true };
      body.response_format = { type: "json_schema", json_schema: named };
    }
  } else {
    body.prompt = job.messages.at(-1).content;
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
