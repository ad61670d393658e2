// The page of a sweep: time against memory, the ranked points, why the first beats the second.

const ROWS = DATA.rows;

function figures() {
  const all = [["points", count(ROWS.length + DATA.dropped.length), `${count(ROWS.length)} run`]];
  if (ROWS.length) {
    const [first] = ROWS;
    all.push(["first", formatNs(first.ns), `${first.name}; ${formatNs(first.low)} to ${formatNs(first.high)}`],
      ["tokens per second and GPU", first.tokens === null ? null : round(first.tokens), "of the first"],
      ["MFU", first.mfu === null ? null : percent(first.mfu), "of the first"],
      ["memory", formatBytes(first.memory), DATA.limit === null ? "limit unknown" : `of ${formatBytes(DATA.limit)}`]);
  }
  cards(all);
}

// ---- time against memory: a dot per point, a line through those that nothing beats in both
function front(section) {
  section.append(element("h2", "", "Time against memory"),
    quiet("A dot per point that runs. The line joins those that no other point beats in both iteration time and memory; dashed: the limit."));
  const gib = 2 ** 30, limit = DATA.limit === null ? [] : [DATA.limit / gib];
  const plot = new Plot(section, "iteration time against memory", { height: 380,
    x: { ...extent(ROWS.map((row) => row.ns), 0.08), write: formatNs, title: "iteration time" },
    y: { ...extent([...ROWS.map((row) => row.memory / gib), ...limit], 0.08), write: (size) => `${round(size)} GiB` } });
  const { colours } = plot;
  for (const size of limit) plot.segment(plot.left, plot.Y(size), plot.width - plot.right, plot.Y(size), colours.path, "6 5");
  const best = ROWS.filter((row) => row.front).sort((a, b) => a.ns - b.ns);
  plot.line(best.map((row) => [row.ns, row.memory / gib]), colours.accent, 1.5);
  for (const row of [...ROWS].reverse()) {
    const dot = svg("circle", { cx: plot.X(row.ns), cy: plot.Y(row.memory / gib), r: row.front ? 5.5 : 4,
      fill: row.front ? colours.accent : colours.outside, stroke: colours.card });
    plot.add(tipOn(dot, `${row.rank}. ${row.name}`, `${formatNs(row.ns)} (${formatNs(row.low)} to ${formatNs(row.high)})`, formatBytes(row.memory)));
  }
}

function ranked(section) {
  const more = ["p95", "cost"].filter((name) => ROWS.some((row) => row[name] !== null));
  const write = { p95: formatNs, cost: (value) => round(value, 5) };
  const head = ["rank", ...DATA.axes, "iteration", "interval", "tokens/s/GPU", "MFU", "bubble", "exposed", "memory", "headroom", ...more, "front"];
  const rows = ROWS.map((row) => [`${row.rank}${row.equal ? "=" : ""}`, ...row.axes, formatNs(row.ns), `${formatNs(row.low)} – ${formatNs(row.high)}`,
    or(row.tokens, round), or(row.mfu, percent), or(row.bubble, percent), or(row.exposed, percent), formatBytes(row.memory),
    DATA.limit === null ? "unknown" : formatBytes(DATA.limit - row.memory), ...more.map((name) => or(row[name], write[name])), row.front ? "●" : ""]);
  section.append(element("h2", "", `Points, by ${DATA.objective}`),
    element("p", "quiet", "= : the interval of its time overlaps that of others. Front: no other point is better in both time and memory."),
    table(head, rows), element("h2", "", "Start the first"), element("p", "", element("code", "", ROWS[0].command)));
}

at("slices").textContent = DATA.machine;
figures();
tabs([
  ...(ROWS.length ? [["points", "Points", anew((section) => { front(section); ranked(section); })]] : []),
  ...(DATA.pair.length ? [["pair", "First and second", once((section) => {
    section.append(element("h2", "", "Why the first beats the second"));
    pair(section, DATA.pair, DATA.lanes);
  })]] : []),
  ...(DATA.dropped.length ? [["dropped", "Dropped", once((section) => section.append(element("h2", "", "Dropped points"),
    table(["point", "by", "reason"], DATA.dropped.map((one) => [one.name, one.by, one.reason]), [0, 1, 2])))]] : []),
  ["reading", "How to read this", null],
]);
