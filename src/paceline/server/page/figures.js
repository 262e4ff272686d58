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

/** Snapshots of the last minute; starts afresh when the server did. */
export class History {
  samples = []; // of { at: seconds, stats }

  push(at, stats) {
    const last = this.samples.at(-1)?.stats;
    const restarted =
      last && (stats.restarts !== last.restarts || stats.tokens.output < last.tokens.output);
    if (restarted) this.samples = [];
    this.samples.push({ at, stats });
    this.samples = this.samples.filter((sample) => at - sample.at <= 61);
  }

  get latest() {
    return this.samples.at(-1).stats;
  }

  /** Counts over the last `seconds`, or null where there are none to compare. */
  #recent(seconds) {
    const last = this.samples.at(-1);
    const first = this.samples.find(({ at }) => last.at - at <= seconds);
    if (first === last) return null;
    return { seconds: last.at - first.at, counts: minus(last.stats, first.stats) };
  }

  /** Output tokens per second, over about three seconds. */
  get rate() {
    const recent = this.#recent(3.5);
    return recent ? recent.counts.tokens.output / recent.seconds : null;
  }

  /** [seconds ago, output tokens per second] for each pair of neighbours. */
  get rates() {
    const end = this.samples.at(-1).at;
    return this.samples.slice(1).map(({ at, stats }, place) => {
      const before = this.samples[place];
      return [at - end, (stats.tokens.output - before.stats.tokens.output) / (at - before.at)];
    });
  }

  /** The counts of the last ten seconds; of all time when nothing ran in them. */
  get span() {
    const recent = this.#recent(10.5);
    if (recent?.counts.speculation.steps > 0) {
      return { name: "the last 10 s", counts: recent.counts };
    }
    return { name: "since the start", counts: this.latest };
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
