// The settings of the chat: how answers are sampled, with presets, and what the browser keeps of it.

import { $, el, recall, remember } from "./dom.js";

const CHOICES = [
  "mode", "temperature", "topP", "topK", "minP", "repetition", "presence", "frequency", "stop",
  "maxTokens", "seed", "system",
];
const SWITCHES = ["speculation", "compare", "colours", "rendered", "keep"];
/** Fields of the form by their names in a request; one that is empty has the model's default. */
const SAMPLING = {
  temperature: "temperature",
  topP: "top_p",
  topK: "top_k",
  minP: "min_p",
  repetition: "repetition_penalty",
  presence: "presence_penalty",
  frequency: "frequency_penalty",
};
/** Values of those fields; what a preset does not name has the model's default. */
const PRESETS = {
  "Model defaults": {},
  Precise: { temperature: "0" },
  Balanced: { temperature: "0.7", topP: "0.95" },
  Creative: { temperature: "1", minP: "0.05" },
};
const CUSTOM = "Custom";
let defaults = {};

export const fields = () => $("settings").elements;
export const mode = () => fields().mode.value;

/** @param changed called after each change, and not now. */
export function setUpSettings(changed) {
  defaults = chosen();
  const kept = JSON.parse(recall("choices") ?? "{}");
  for (const name of CHOICES) if (name in kept) fields()[name].value = kept[name];
  for (const name of SWITCHES) if (name in kept) fields()[name].checked = kept[name];
  fields().preset.append(...[...Object.keys(PRESETS), CUSTOM].map((name) => el("option", {}, name)));
  showPreset();
  $("settings").addEventListener("submit", (event) => event.preventDefault());
  $("settings").addEventListener("change", ({ target }) => {
    if (target === fields().preset) applyPreset(target.value);
    keepSettings();
    showPreset();
    changed();
  });
  $("settings-toggle").addEventListener("click", ({ target }) => {
    target.setAttribute("aria-expanded", target.getAttribute("aria-expanded") !== "true");
  });
}

function chosen() {
  const values = CHOICES.map((name) => [name, fields()[name].value]);
  const switches = SWITCHES.map((name) => [name, fields()[name].checked]);
  return Object.fromEntries([...values, ...switches]);
}

/** What differs from the defaults; the rest follows them, also when they change. */
export function keepSettings() {
  const { mode: wanted, ...others } = chosen();
  const isForced = fields().mode[0].disabled; // by a model that cannot chat; the next one may
  const all = Object.entries(isForced ? others : { mode: wanted, ...others });
  const kept = all.filter(([name, value]) => value !== defaults[name]);
  remember("choices", JSON.stringify(Object.fromEntries(kept)));
}

function applyPreset(name) {
  if (name === CUSTOM) return;
  for (const field of Object.keys(SAMPLING)) fields()[field].value = PRESETS[name][field] ?? "";
}

/** The preset that the fields agree with. */
function showPreset() {
  const agrees = ([, values]) =>
    Object.keys(SAMPLING).every((field) => fields()[field].value === (values[field] ?? ""));
  fields().preset.value = Object.entries(PRESETS).find(agrees)?.[0] ?? CUSTOM;
}

/** Show what an empty field stands for. */
export function showModelSampling(values) {
  for (const [field, name] of Object.entries(SAMPLING)) {
    if (values?.[name] !== undefined) fields()[field].placeholder = values[name];
  }
}

/** What a request says about sampling. */
export function sampling() {
  const body = {};
  if (fields().maxTokens.value !== "") body.max_tokens = fields().maxTokens.valueAsNumber;
  for (const [field, name] of Object.entries(SAMPLING)) {
    if (fields()[field].value !== "") body[name] = fields()[field].valueAsNumber;
  }
  const stop = fields().stop.value.split("\n").filter(Boolean);
  if (stop.length) body.stop = stop;
  return body;
}
