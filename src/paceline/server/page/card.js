// The model's card: what the server says of the model, in a dialog behind its name.

import { $, el } from "./dom.js";
import { model } from "./generate.js";
import { openDialog } from "./keys.js";

const PROMISES = {
  identical:
    "The same tokens as without speculation, bit for bit: greedy or sampled with a seed, alone or among other requests.",
  "up to rounding":
    "The same tokens as without speculation up to rounding: of two that are almost equally likely, the other one can win.",
};

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
    ["Computed in", [dtype, backend].filter(Boolean).join(", ")],
    ["Model", root],
    ["Size", large(meta.size, ["B", "kB", "MB", "GB"])],
    ["Sampling", sampling && `temperature ${sampling.temperature}, by ${sampling.source}`],
    ["Who drafts", model.proposers.join(", ") || "nobody"],
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
