// The live view: asks for the counters every second while it can be seen, and shows them.

import { getJson, watchServer } from "./api.js";
import { bars, costChart, rateChart, stack } from "./charts.js";
import { $, el, figure, pause, percent } from "./dom.js";
import { byPosition, byProposer, CHART_SECONDS, History, phaseShares, PHASES, ratio, widthShares } from "./figures.js";
import { originClass } from "./origins.js";

const EVERY_MS = 1000;
const history = new History();
let polling = false;

const isSeen = () => !$("live").hidden && !document.hidden;

/** Start to poll, with what went on while the view was hidden; stops by itself when it is again. */
export async function showLive() {
  if (polling) return;
  polling = true;
  let path = "stats?history=true";
  while (isSeen()) {
    const began = performance.now();
    try {
      history.push(began / 1000, await getJson(path));
      path = "stats";
      draw();
      if (history.latest.state !== "ready") watchServer();
    } catch (failure) {
      if (failure.kind === "key") break;
      await watchServer();
    }
    await pause(Math.max(EVERY_MS - (performance.now() - began), 100));
  }
  polling = false;
}

function draw() {
  const stats = history.latest;
  const { name, counts } = history.span;
  for (const node of document.querySelectorAll("#live .span")) node.textContent = name;
  drawTiles(stats, counts, name);
  rateChart($("rate-chart"), history.rates, CHART_SECONDS, "tok/s");
  bars($("by-proposer"), byProposer(counts).map(([proposer, share, accepted, drafted]) => [
    proposer,
    share,
    share === null ? "no drafts" : `${percent(share)} of ${figure(drafted)}`,
    originClass(proposer),
  ]), "No drafts yet.");
  bars($("by-position"), byPosition(counts).map(([position, share]) => [
    String(position), share, percent(share),
  ]), "No drafts yet.");
  costChart($("cost-chart"), stats.cost_curve, widthShares(counts));
  stack($("phases"), phaseShares(counts), PHASES);
}

function drawTiles(stats, counts, span) {
  const { steps, emitted } = counts.speculation;
  const length = ratio(emitted, steps);
  const kv = ratio(stats.kv.used, stats.kv.total) ?? 0;
  const cached = ratio(stats.tokens.cached, stats.tokens.prompt);
  const tiles = [
    ["Running", figure(stats.running), `of at most ${figure(stats.max_num_seqs)}`],
    ["Waiting", figure(stats.waiting), `engine ${stats.state}`],
    ["Output", history.rate === null ? "…" : figure(history.rate), "tokens per second"],
    ["Acceptance length", length === null ? "–" : length.toFixed(2), `tokens per step, ${span}`],
    ["KV cache", percent(kv), `${figure(stats.kv.used)} of ${figure(stats.kv.total)} blocks`, kv],
    ["Prompt tokens", figure(stats.tokens.prompt), `${percent(cached ?? 0)} from the prefix cache`],
  ];
  $("tiles").replaceChildren(...tiles.map(([label, value, note, share]) => {
    const tile = el("div", { className: "tile" },
      el("h2", {}, label), el("strong", {}, value), el("small", {}, note));
    if (share !== undefined) {
      const meter = el("div", { className: "meter" }, el("div", { className: "fill" }));
      meter.firstChild.style.width = `${100 * share}%`;
      tile.append(meter);
    }
    return tile;
  }));
}
