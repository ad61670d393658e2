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

// ---- parallel coordinates: a line per point through its value on every axis, time and memory
function coordinates(section) {
  const values = (i) => [...new Set(ROWS.map((row) => row.axes[i]))].sort((a, b) => a - b || (a > b ? 1 : a < b ? -1 : 0));
  const place = (all, value) => all.length > 1 ? all.indexOf(value) / (all.length - 1) : 0.5;
  const scaled = (name, read, write) => {
    const all = ROWS.map(read), low = Math.min(...all), high = Math.max(...all);
    return { name, at: (row) => high > low ? (read(row) - low) / (high - low) : 0.5, ticks: high > low ? [[0, write(low)], [1, write(high)]] : [[0.5, write(low)]] };
  };
  const axes = DATA.axes.map((name, i) => {
    const all = values(i);
    return { name, at: (row) => place(all, row.axes[i]), ticks: all.map((value) => [place(all, value), value]) };
  }).filter((axis) => axis.ticks.length > 1);
  axes.push(scaled("iteration", (row) => row.ns, formatNs), scaled("memory", (row) => row.memory, formatBytes));
  section.append(element("h2", "", "Which values the fast points share"),
    quiet("A line per point. Bold: the first, and those that surely are as fast; the front in colour."));
  const plot = new Plot(section, "axes, iteration time and memory of every point", { height: 380, right: 84,
    x: { from: 0, to: axes.length - 1, ticks: [], write: String, title: "" }, y: { from: 0, to: 1, ticks: [], write: String } });
  const { colours } = plot;
  for (const row of [...ROWS].reverse()) {
    const line = plot.line(axes.map((axis, i) => [i, axis.at(row)]), row.front ? colours.accent : colours.outside, row.rank === 1 ? 3 : 1);
    line.setAttribute("stroke-opacity", row.rank === 1 || row.front ? 1 : 0.45);
    tipOn(line, `${row.rank}. ${row.name}`, formatNs(row.ns), formatBytes(row.memory));
  }
  axes.forEach((axis, i) => {
    plot.segment(plot.X(i), plot.top, plot.X(i), plot.bottom, colours.ink);
    plot.text(plot.X(i), plot.bottom + 24, axis.name, "middle", colours.ink);
    for (const [at, text] of axis.ticks) plot.text(plot.X(i) + 6, plot.Y(at) + (at > 0.9 ? 12 : -4), text, "start", colours.ink);
  });
}

function ranked(section) {
  const more = ["p95", "cost"].filter((name) => ROWS.some((row) => row[name] !== null));
  const write = { p95: formatNs, cost: (value) => round(value, 5) };
  const head = ["rank", ...DATA.axes, "iteration", "to the first", "best", "tokens/s/GPU", "MFU", "bubble", "exposed", "memory", "headroom", ...more, "front"];
  const place = (row) => `${row.rank}${row.equal ? "=" : ""}`;
  const linked = (row) => row.link ? Object.assign(element("a", "", place(row)), { href: row.link }) : place(row);
  const rows = ROWS.map((row) => [linked(row), ...row.axes, formatNs(row.ns), row.slower, percent(row.best),
    or(row.tokens, round), or(row.mfu, percent), or(row.bubble, percent), or(row.exposed, percent), formatBytes(row.memory),
    DATA.limit === null ? "unknown" : formatBytes(DATA.limit - row.memory), ...more.map((name) => or(row[name], write[name])), row.front ? "●" : ""]);
  section.append(element("h2", "", `Points, by ${DATA.objective}`),
    element("p", "quiet", "= : not slower than the first of its rank with 95 %, whatever is unknown of the machine. Front: no other point is better in both time and memory. A rank with a link leads to its timeline."),
    table(head, rows), element("h2", "", "Start the first"), element("p", "", element("code", "", ROWS[0].command)));
}

at("slices").textContent = DATA.machine;
figures();
tabs([
  ...(ROWS.length ? [["points", "Points", anew((section) => { front(section); coordinates(section); ranked(section); })]] : []),
  ...(DATA.pair.length ? [["pair", "First and second", once((section) => {
    section.append(element("h2", "", "Why the first beats the second"));
    pair(section, DATA.pair, DATA.lanes);
  })]] : []),
  ...(DATA.dropped.length ? [["dropped", "Dropped", once((section) => section.append(element("h2", "", "Dropped points"),
    table(["point", "by", "reason"], DATA.dropped.map((one) => [one.name, one.by, one.reason]), [0, 1, 2])))]] : []),
  ["reading", "How to read this", null],
]);
