// The model's card: what the server says of the model, in a dialog behind its name.

import { $, el } from "./dom.js";
import { model } from "./generate.js";
import { openDialog } from "./keys.js";

const PROMISES = {
  identical:
    "The same tokens as without speculation, bit for bit: greedy or sampled with a seed, alone or among other requests.",
  "up to rounding":
    "The same tokens as without speculation, up to rounding: where two tokens are almost equally likely, either may be chosen.",
};

const FILTERS = { top_p: ["top-p", 1], top_k: ["top-k", 0], min_p: ["min-p", 0], repetition_penalty: ["repetition penalty", 1] };

/** What holds where a request says nothing, and where that comes from; filters only where they are on. */
function samplingOf({ temperature, source, ...values }) {
  const filters = Object.entries(FILTERS)
    .filter(([name, [, off]]) => values[name] !== undefined && values[name] !== off)
    .map(([name, [label]]) => `${label} ${values[name]}`);
  return `${[`temperature ${temperature}`, ...filters].join(", ")} (${source})`;
}

/** A large number in three digits and one of the units, each a thousand times the one before. */
function large(count, units) {
  if (!count) return "";
  const step = Math.min(Math.floor(Math.log10(count) / 3), units.length - 1);
  return `${Number((count / 1000 ** step).toPrecision(3))} ${units[step]}`;
}

export function setUpCard() {
  const { id, root, architecture, max_model_len: context, dtype, backend, promise, meta = {}, sampling } = model.card;
  const facts = [
    ["Architecture", architecture],
    ["Parameters", large(meta.n_params, ["", "thousand", "million", "billion"])],
    ["Context", context && `${context.toLocaleString("en")} tokens`],
    ["Precision and backend", [dtype, backend].filter(Boolean).join(", ")],
    ["Model", root],
    ["Size", large(meta.size, ["B", "kB", "MB", "GB"])],
    ["Sampling", sampling && samplingOf(sampling)],
    ["Proposers", model.proposers.join(", ") || "none"],
    ["Promise", PROMISES[promise] ?? model.promise],
  ];
  const name = id.split("/").at(-1);
  $("model").textContent = name;
  $("model").setAttribute("aria-label", `About the model ${name}`);
  $("model").hidden = false;
  $("model").onclick = () => openDialog("card");
  document.title = `Paceline: ${name}`;
  $("card-title").textContent = id;
  const known = facts.filter(([, value]) => value);
  $("card-facts").replaceChildren(...known.flatMap(([term, value]) => [el("dt", {}, term), el("dd", {}, value)]));
}
