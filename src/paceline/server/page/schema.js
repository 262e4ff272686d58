// Trying a schema: checks that it is JSON, asks for an answer held to it, and shows both.

import { Answer } from "./answer.js";
import { settle } from "./chat.js";
import { $, el, sendOnEnter } from "./dom.js";
import { generate } from "./generate.js";

const object = (properties) => ({
  type: "object",
  properties,
  required: Object.keys(properties),
  additionalProperties: false,
});

const EXAMPLES = {
  Person: ["Describe a person from a novel.", object({
    name: { type: "string", maxLength: 30 },
    age: { type: "integer", minimum: 0, maximum: 120 },
    occupation: { enum: ["captain", "teacher", "baker", "spy"] },
    is_hero: { type: "boolean" },
  })],
  "Shopping list": ["Write a shopping list for pancakes.", object({
    items: {
      type: "array",
      minItems: 2,
      maxItems: 4,
      items: object({ article: { type: "string", maxLength: 20 }, amount: { type: "integer", minimum: 1, maximum: 12 } }),
    },
  })],
};

let running = null;

export function setUpSchema() {
  const choice = $("schema-example");
  choice.append(...Object.keys(EXAMPLES).map((name) => el("option", {}, name)));
  choice.addEventListener("change", () => fill(choice.value));
  $("schema-text").addEventListener("input", showSyntax);
  sendOnEnter($("schema-prompt"));
  $("schema-form").addEventListener("submit", submitted);
  $("schema-stop").addEventListener("click", stopSchema);
  fill(choice.value);
}

export function stopSchema() {
  running?.abort();
}

function fill(name) {
  const [prompt, schema] = EXAMPLES[name];
  $("schema-prompt").value = prompt;
  $("schema-text").value = JSON.stringify(schema, null, 2);
  showSyntax();
}

/** Parses the schema; shows what is wrong with it and returns null then. */
function showSyntax() {
  const text = $("schema-text").value;
  let schema = null;
  let problem = "";
  try {
    schema = JSON.parse(text);
    if (schema === null || typeof schema !== "object") problem = "A schema must be a JSON object.";
  } catch (error) {
    problem = `Not valid JSON: ${error.message}`;
  }
  showProblem(problem);
  return problem ? null : schema;
}

function showProblem(text) {
  $("schema-error").textContent = text;
  $("schema-text").setAttribute("aria-invalid", Boolean(text));
}

async function submitted(event) {
  event.preventDefault();
  if (running) return;
  const schema = showSyntax();
  if (!schema) return $("schema-text").focus();
  running = new AbortController();
  setBusy(true);
  const view = new Answer("Answer");
  $("schema-answer").replaceChildren(view.node);
  $("schema-parsed").replaceChildren();
  const job = {
    mode: "chat",
    messages: [{ role: "user", content: $("schema-prompt").value }],
    sampling: $("schema-max").value ? { max_tokens: $("schema-max").valueAsNumber } : {},
    seed: null,
    speculation: true,
    schema,
  };
  if (await settle(view, generate(job, view, running.signal))) showParsed(view);
  const { param, message } = view.failure ?? {};
  if (/response_format|structured_outputs/.test(`${param} ${message}`)) showProblem(message);
  running = null;
  setBusy(false);
}

function showParsed(view) {
  try {
    const pretty = JSON.stringify(JSON.parse(view.text), null, 2);
    $("schema-parsed").replaceChildren(
      el("p", { className: "ok" }, "Complete JSON"), el("pre", {}, pretty));
  } catch {
    const why = view.reason === "length"
      ? "Incomplete: the answer reached the token limit or the end of the context. Bound strings and lists in the schema, or raise the limit."
      : "The answer is not valid JSON.";
    $("schema-parsed").replaceChildren(el("p", { className: "problem" }, why));
  }
}

function setBusy(busy) {
  $("schema-send").hidden = busy;
  $("schema-stop").hidden = !busy;
}
