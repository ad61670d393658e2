// A distribution of the iteration time, and what moves it.

const LEVELS = Array.from({ length: 199 }, (_, i) => 0.005 + 0.99 * i / 198);  // of ``times``
const quantile = (level) => `p${round(100 * level)}`;
const between = (q) => q.ns === null ? `needs ${count(q.needed)} samples` : `${ms(q.low)} to ${ms(q.high)}`;
// predictions differ in the fourth digit
const ms = (ns) => `${(ns / 1e6).toLocaleString("en-US", { minimumFractionDigits: 1, maximumFractionDigits: 1 })} ms`;

// ---- one distribution
function figures() {
  const p = (level) => DATA.quantiles.find((q) => q.level === level);
  const over = (q) => q.ns === null ? `needs ${count(q.needed)} samples`
    : `${signed(q.ns / DATA.steady - 1, percent)}; ${ms(q.low)} to ${ms(q.high)}`;
  const range = DATA.steady_high > DATA.steady_low
    ? `on the job's machine ${ms(DATA.steady_low)} to ${ms(DATA.steady_high)}, nine times in ten` : "as prism replay has it";
  const all = [["without variation", ms(DATA.steady), range]];
  for (const level of [0.5, 0.95, 0.99]) if (p(level)) all.push([quantile(level), p(level).ns === null ? null : ms(p(level).ns), over(p(level))]);
  all.push(["drawn", count(DATA.samples), `iterations of ${count(DATA.replicas)} replicas, seed ${DATA.seed}`]);
  cards(all);
}

function distribution(section) {
  const times = DATA.times, low = times[0], high = times[times.length - 1];
  section.append(heading("How long iterations take"));
  if (low === high) { section.append(element("p", "", "Every iteration takes the same time.")); return; }
  const edges = Array.from({ length: 41 }, (_, i) => low + (high - low) * i / 40);
  const below = (time) => {
    const i = Math.min(times.length - 1, Math.max(1, times.findIndex((t) => t >= time)));
    const part = (time - times[i - 1]) / (times[i] - times[i - 1] || 1);
    return LEVELS[i - 1] + Math.max(0, Math.min(1, part)) * (LEVELS[i] - LEVELS[i - 1]);
  };
  const bars = edges.slice(1).map((edge, i) => below(edge) - below(edges[i]));
  const x = { from: Math.min(DATA.steady, low), to: high + (high - low) * 0.08, write: formatNs, title: "iteration time" };
  const marks = [[DATA.steady, `without variation: ${ms(DATA.steady)}`, "var(--other)"],
    ...DATA.quantiles.filter((q) => q.level >= 0.5 && q.ns !== null).map((q) => [q.ns, `${quantile(q.level)}: ${ms(q.ns)}`, "var(--path)"])];
  section.append(quiet("Share of the iterations in each fortieth of the range."));
  const top = Math.max(...bars) * 1.5;  // room for the names of the marks
  const plot = new Plot(section, "distribution of the iteration time", { x, y: { from: 0, to: top, write: (part) => `${round(100 * part, 2)} %` } });
  bars.forEach((part, i) => tipOn(plot.bar(edges[i], edges[i + 1], part, "var(--accent)"), `${round(100 * part, 2)} % of iterations`, `${ms(edges[i])} to ${ms(edges[i + 1])}`));
  plot.marks(marks);
  section.append(table(["", "iteration", "over the time without variation", "95 % interval of the draws"], [
    ["without variation", ms(DATA.steady), "", ""],
    ...DATA.quantiles.map((q) => [quantile(q.level), or(q.ns, ms), q.ns === null ? "" : signed(q.ns / DATA.steady - 1, percent), between(q)])]));
}

function halved(section) {
  const rows = Object.entries(DATA.halved).filter(([, ns]) => ns !== DATA.halved_from).sort((a, b) => a[1] - b[1])
    .map(([part, ns]) => [`${part} spread halved`, ms(ns), signed(ns - DATA.halved_from, ms)]);
  const slow = Object.entries(DATA.slow).map(([index, ns]) =>
    [`one GPU of ${DATA.classes[index]} takes ${round(DATA.slow_by)} x as long`, ms(ns), signed(ns - DATA.slow_from, ms)]);
  section.append(heading("What moves p95"), table(["if", "p95", "change"], [...rows, ...slow]));
}

figures();
tabs([["distribution", "Distribution", anew(distribution)], ["moves", "What moves p95", once(halved)],
  provenance(["What the prediction rests on", ["", ""], [["spreads", DATA.source], ["calls", DATA.calls],
    ...DATA.durations.map((text) => [badge(text), text.replace(/^\w+: /, "")])]]),
  reading("without variation", "p50, p95, p99", "what moves p95", "assumed spreads")]);
