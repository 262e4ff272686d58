// From cumulative counters to figures of a span of time. Knows no document.

/** What was counted from one snapshot to a later one, number by number; lists may have grown. */
export function minus(later, earlier) {
  if (typeof later === "number") return later - (typeof earlier === "number" ? earlier : 0);
  if (later === null || typeof later !== "object") return later;
  if (Array.isArray(later)) return later.map((value, place) => minus(value, earlier?.[place]));
  return Object.fromEntries(
    Object.entries(later).map(([name, value]) => [name, minus(value, earlier?.[name])]),
  );
}

export const ratio = (part, whole) => (whole > 0 ? part / whole : null);

export const CHART_SECONDS = 300;
const SPAN_SECONDS = 10.5;

/** What the server counted, over the last minutes; starts afresh when its engine did. */
export class History {
  samples = []; // of { at: seconds, stats }, as far as spans reach back
  outputs = []; // of [seconds, output tokens until then], as far as the chart does

  push(at, stats) {
    const last = this.samples.at(-1)?.stats;
    const restarted =
      last && (stats.restarts !== last.restarts || stats.tokens.output < last.tokens.output);
    if (restarted) this.samples = this.outputs = [];
    // The server's own knows of the time before the page asked.
    if (stats.output_history) this.outputs = stats.output_history.map(([ago, output]) => [at - ago, output]);
    this.samples = [...this.samples, { at, stats }].filter((sample) => at - sample.at <= SPAN_SECONDS);
    this.outputs = [...this.outputs, [at, stats.tokens.output]].filter(([then]) => at - then <= CHART_SECONDS);
  }

  get latest() {
    return this.samples.at(-1).stats;
  }

  /** Output tokens per second, over about three seconds; null where nothing can be compared. */
  get rate() {
    const [end, output] = this.outputs.at(-1);
    const [begin, before] = this.outputs.find(([at]) => end - at <= 3.5);
    return begin < end ? (output - before) / (end - begin) : null;
  }

  /** [seconds ago, output tokens per second] for each pair of neighbours. */
  get rates() {
    const end = this.outputs.at(-1)[0];
    return this.outputs.slice(1).map(([at, output], place) => {
      const [began, before] = this.outputs[place];
      return [at - end, at > began ? (output - before) / (at - began) : 0];
    });
  }

  /** The counts of the last ten seconds; of all time when nothing ran in them. */
  get span() {
    const counts = minus(this.latest, this.samples[0].stats);
    if (counts.speculation.steps > 0) return { name: "last 10 s", counts };
    return { name: "since startup", counts: this.latest };
  }
}

/** [name, accepted / drafted tokens, accepted, drafted] by proposer. */
export function byProposer({ speculation }) {
  return Object.entries(speculation.by_proposer).map(([name, counts]) => [
    name, ratio(counts.accepted, counts.draft_tokens), counts.accepted, counts.draft_tokens,
  ]);
}

/** [position, accepted / drafts that reached it] from 1 up, as far as drafts went. */
export function byPosition({ speculation }) {
  return speculation.drafts_per_pos
    .map((drafts, place) => [place + 1, ratio(speculation.accepted_per_pos[place] ?? 0, drafts)])
    .filter(([, share]) => share !== null);
}

/** [rows, share of the steps] of every width that was chosen, in order. */
export function widthShares({ widths }) {
  const chosen = Object.entries(widths).filter(([, steps]) => steps > 0);
  const all = chosen.reduce((sum, [, steps]) => sum + steps, 0);
  return chosen
    .map(([rows, steps]) => [Number(rows), steps / all])
    .sort((one, other) => one[0] - other[0]);
}

/** The phases of a step in their order; their places choose their colours. */
export const PHASES = "schedule propose plan pack forward verify commit observe".split(" ");

/** [phase, milliseconds of a step, share] in the order of a step. */
export function phaseShares({ phases, speculation }) {
  const all = Object.values(phases).reduce((sum, seconds) => sum + seconds, 0);
  const steps = Math.max(speculation.steps, 1);
  return Object.entries(phases)
    .filter(([, seconds]) => seconds > 0)
    .map(([name, seconds]) => [name, (1000 * seconds) / steps, seconds / all])
    .sort((one, other) => PHASES.indexOf(one[0]) - PHASES.indexOf(other[0]));
}
