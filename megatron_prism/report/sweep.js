// The page of a sweep: time against memory, the ranked points, why the first beats the second.

const ROWS = DATA.rows;
const at = (id) => document.getElementById(id);
const or = (value, write) => value === null ? "unknown" : write(value);
const count = (number) => number.toLocaleString("en-US");

function cards() {
  const card = (what, number, note) => element("div", "card", element("div", "what", what),
    element("div", "number", number), element("div", "basis", note));
  at("cards").append(card("points", count(ROWS.length + DATA.dropped.length), `${count(ROWS.length)} run`));
  if (!ROWS.length) return;
  const [first] = ROWS;
  at("cards").append(
    card("first", formatNs(first.ns), `${first.name}; ${formatNs(first.low)} to ${formatNs(first.high)}`),
    card("tokens per second and GPU", or(first.tokens, round), "of the first"),
    card("MFU", or(first.mfu, percent), "of the first"),
    card("memory", formatBytes(first.memory), DATA.limit === null ? "limit unknown" : `of ${formatBytes(DATA.limit)}`));
}

// ---- time against memory: a dot per point, a line through those that nothing beats in both
function svg(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// [first, last] with room, and round ticks between
function scale(values) {
  const low = Math.min(...values), high = Math.max(...values), room = (high - low) * 0.08 || high * 0.05 || 1;
  const from = Math.max(0, low - room), to = high + room, step = niceStep((to - from) / 6), ticks = [];
  for (let tick = Math.ceil(from / step) * step; tick <= to; tick += step) ticks.push(tick);
  return { from, to, ticks };
}

function front() {
  at("front").append(element("h2", "", "Time against memory"),
    element("p", "quiet", "A dot per point that runs. The line joins those that no other point beats in both iteration time and memory; dashed: the limit."));
  const colours = palette(), width = 960, height = 380, left = 90, bottom = 340, gib = 2 ** 30;
  const limit = DATA.limit === null ? [] : [DATA.limit / gib];
  const times = scale(ROWS.map((row) => row.ns)), sizes = scale([...ROWS.map((row) => row.memory / gib), ...limit]);
  const x = (ns) => left + (ns - times.from) / (times.to - times.from) * (width - left - 20);
  const y = (size) => bottom - (size - sizes.from) / (sizes.to - sizes.from) * (bottom - 14);
  const line = (x1, y1, x2, y2, more) => svg("line", { x1, y1, x2, y2, stroke: colours.line, ...more });
  const words = (text, px, py, anchor) => svg("text", { x: px, y: py, "text-anchor": anchor, "font-size": 12, fill: colours.quiet }, text);
  const chart = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "iteration time against memory" });
  for (const tick of sizes.ticks) chart.append(line(left, y(tick), width - 20, y(tick)), words(`${round(tick)} GiB`, left - 8, y(tick) + 4, "end"));
  for (const tick of times.ticks) chart.append(line(x(tick), bottom, x(tick), bottom + 5), words(formatNs(tick), x(tick), bottom + 20, "middle"));
  for (const size of limit) chart.append(line(left, y(size), width - 20, y(size), { stroke: colours.path, "stroke-dasharray": "6 5" }));
  const best = ROWS.filter((row) => row.front).sort((a, b) => a.ns - b.ns);
  const path = best.map((row) => `${x(row.ns)},${y(row.memory / gib)}`).join(" ");
  chart.append(svg("polyline", { points: path, fill: "none", stroke: colours.accent, "stroke-width": 1.5 }));
  for (const row of [...ROWS].reverse()) {
    const dot = svg("circle", { cx: x(row.ns), cy: y(row.memory / gib), r: row.front ? 5.5 : 4,
      fill: row.front ? colours.accent : colours.outside, stroke: colours.card });
    chart.append(tipOn(dot, `${row.rank}. ${row.name}`, `${formatNs(row.ns)} (${formatNs(row.low)} to ${formatNs(row.high)})`, formatBytes(row.memory)));
  }
  at("front").append(chart);
}

function ranked() {
  const more = ["p95", "cost"].filter((name) => ROWS.some((row) => row[name] !== null));
  const write = { p95: formatNs, cost: (value) => round(value, 5) };
  const head = ["rank", ...DATA.axes, "iteration", "interval", "tokens/s/GPU", "MFU", "bubble", "exposed", "memory", "headroom", ...more, "front"];
  const rows = ROWS.map((row) => [`${row.rank}${row.equal ? "=" : ""}`, ...row.axes, formatNs(row.ns), `${formatNs(row.low)} – ${formatNs(row.high)}`,
    or(row.tokens, round), or(row.mfu, percent), or(row.bubble, percent), or(row.exposed, percent), formatBytes(row.memory),
    DATA.limit === null ? "unknown" : formatBytes(DATA.limit - row.memory), ...more.map((name) => or(row[name], write[name])), row.front ? "●" : ""]);
  at("ranked").append(element("h2", "", `Points, by ${DATA.objective}`),
    element("p", "quiet", "= : the interval of its time overlaps that of others. Front: no other point is better in both time and memory."),
    table(head, rows), element("h2", "", "Start the first"), element("p", "", element("code", "", ROWS[0].command)));
}

// ---- the first two side by side
function pair() {
  const two = DATA.pair, most = Math.max(...two.map((one) => one.ns));
  const colour = (what) => what === "compute" ? "var(--forward)" : groupColour(what.split(" ").slice(1).join(" "));
  const bars = two.map((one) => ({ name: one.name, total: one.ns, share: one.ns / most, note: formatNs(one.ns),
    parts: one.parts.filter(([what]) => what !== "idle").map(([what, ns]) => [what, ns, colour(what), what.startsWith("waiting") ? "waits" : ""]) }));
  const of = two.map((one) => new Map(one.parts));
  const difference = (what) => (of[1].get(what) || 0) - (of[0].get(what) || 0);
  const whats = [...new Set([...of[0].keys(), ...of[1].keys()])].sort((a, b) => Math.abs(difference(b)) - Math.abs(difference(a)));
  const rows = whats.map((what) => [what, formatNs(of[0].get(what) || 0), formatNs(of[1].get(what) || 0), formatNs(difference(what))]);
  at("pair").append(element("h2", "", "Why the first beats the second"),
    element("p", "quiet", "The main stream of a mean rank. Striped: waiting for other ranks to come to a call. Empty: idle."),
    stack(bars), legend([["compute", "var(--forward)"], ...DATA.lanes.map((group) => [group, groupColour(group)])]),
    table(["mean rank", "first", "second", "difference"], rows));
}

function dropped() {
  at("dropped").append(element("h2", "", "Points that fell"),
    table(["point", "by", "reason"], DATA.dropped.map((one) => [one.name, one.by, one.reason]), [0, 1, 2]));
}

at("slices").textContent = DATA.machine;
cards();
if (ROWS.length) { front(); ranked(); } else { at("front").remove(); at("ranked").remove(); }
if (DATA.pair.length) pair(); else at("pair").remove();
if (DATA.dropped.length) dropped(); else at("dropped").remove();
