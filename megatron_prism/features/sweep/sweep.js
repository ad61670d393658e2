// The page of a sweep: the answer first, time against memory, what values cost, all layouts.

const ROWS = DATA.rows, FIRST = ROWS[0];
const slower = (row) => row === FIRST ? "" : `${signed(row.slower[0], percent)} (${signed(row.slower[1], percent)} to ${signed(row.slower[2], percent)})`;

function figures() {
  if (!ROWS.length) { cards([["layouts", count(DATA.dropped.length), "none can run"]]); return; }
  cards([["iteration", formatNs(FIRST.ns), `${formatNs(FIRST.low)} to ${formatNs(FIRST.high)}`],
    ["memory", formatBytes(FIRST.memory), DATA.limit === null ? "limit unknown" : `of ${formatBytes(DATA.limit)}`],
    ["chance to be the best", percent(FIRST.best), `of ${count(ROWS.length)} layouts that run`],
    ["tokens per second and GPU", FIRST.tokens === null ? null : round(FIRST.tokens), ""],
    ["MFU", FIRST.mfu === null ? null : percent(FIRST.mfu), ""],
    ["dropped", count(DATA.dropped.length), "layouts that cannot run"]]);
}

// ---- the layout to take, its command, why it wins, and what it costs to be wrong
function answer(section) {
  const pre = element("pre", "", FIRST.command);
  const copy = button("copy", () => {  // without a secure context there is no clipboard: select it, too
    getSelection().selectAllChildren(pre);
    copy.textContent = document.execCommand("copy") ? "copied" : "press Ctrl+C";
  });
  section.append(element("p", "", why()), element("p", "", wrong()),
    heading("Start it"), quiet("Behind your own launcher (torchrun …, srun …):"), element("div", "command", pre, element("span", "buttons", copy)));
}

function why() {
  if (!DATA.pair.length) return "It is the only layout that runs.";
  const [less, more] = [1, -1].map((way) => partChanges(DATA.pair).filter(([, a, b]) => way * (b - a) > 0.002 * FIRST.ns).slice(0, 2)
    .map(([what, a, b]) => `${formatNs(Math.abs(b - a))} ${partStyle(what)[0].replace(/^compute$/, "computing").replace(/^exposed (.*)/, "in $1 communication").replace(/^waiting /, "waiting for ")}`).join(" and "));
  const second = ROWS[1];
  return `Against the next one (${second.name}), whose iteration takes ${formatNs(second.ns)}: a mean rank spends ${less || "no less"}${less ? " less" : ""}${more ? `, and ${more} more` : ""}.`;
}

function wrong() {
  const rivals = ROWS.slice(1).filter((row) => row.rank === FIRST.rank), risk = rivals.reduce((most, row) => Math.max(most, -row.slower[1]), 0);
  if (!rivals.length) return "No other layout is as good with 95 %.";
  return `${count(rivals.length)} other ${rivals.length > 1 ? "layouts may be" : "layout may be"} as good: if the best of them is, this one costs at most ${percent(risk / (1 - Math.min(risk, 0.99)))} more (95 %).`;
}

// ---- time against memory: a dot per layout, a line through those that nothing beats in both
function front(section) {
  const gib = 2 ** 30, sizes = extent(ROWS.map((row) => row.memory / gib), 0.12), limit = DATA.limit === null ? Infinity : DATA.limit / gib;
  if (limit < sizes.to + 2 * (sizes.to - sizes.from)) sizes.to = Math.max(sizes.to, limit * 1.02);
  section.append(heading("Time against memory"),
    quiet(`A dot per layout that runs. The line joins those that no other beats in both.${limit === Infinity ? "" : limit <= sizes.to ? " Dashed: the limit." : ` The limit, ${formatBytes(DATA.limit)}, is above.`}`));
  const plot = new Plot(section, "iteration time against memory", { height: 340,
    x: { ...extent(ROWS.map((row) => row.ns), 0.08), write: formatNs, title: "iteration time" }, y: { ...sizes, write: (size) => `${round(size)} GiB` } });
  if (limit <= sizes.to) plot.segment(plot.left, plot.Y(limit), plot.width - plot.right, plot.Y(limit), "var(--path)", "6 5");
  const best = ROWS.filter((row) => row.front).sort((a, b) => a.ns - b.ns);
  plot.line(best.map((row) => [row.ns, row.memory / gib]), "var(--accent)", 1.5);
  for (const row of [...ROWS].reverse()) {
    const dot = svg("circle", { cx: plot.X(row.ns), cy: plot.Y(row.memory / gib), r: row.front ? 6 : 4.5, fill: row.front ? "var(--accent)" : "var(--other)", stroke: "var(--card)" });
    plot.add(tipOn(dot, `${row.rank}. ${row.name}`, `${formatNs(row.ns)} (${formatNs(row.low)} to ${formatNs(row.high)})`, formatBytes(row.memory), slower(row)));
  }
}

// ---- per axis: the best layout with each value
function values(section) {
  const rows = DATA.axes.flatMap((axis, i) => {
    const seen = [...new Set(ROWS.map((row) => row.axes[i]))];
    return seen.length < 2 ? [] : seen.map((value) => {
      const [one] = ROWS.filter((row) => row.axes[i] === value);  // they are ranked
      return [`${axis.replaceAll("_", " ")} ${value}`, meters([FIRST.ns / one.ns, one === FIRST ? "var(--accent)" : "var(--other)"]), formatNs(one.ns), slower(one), one.name];
    });
  });
  if (rows.length) section.append(heading("What each value costs"), quiet("The best layout that has it; a longer bar is faster."), table(["value", "", "iteration", "to the first", "layout"], rows, [1, 4]));
}

function ranked(section) {
  const linked = (row) => row.link ? Object.assign(element("a", "", row.cells[0]), { href: row.link }) : row.cells[0];
  section.append(heading(`Layouts, by ${DATA.objective}`), quiet("A rank with a link leads to its timeline. Front: no other layout is better in both time and memory."),
    ...foldedTable([...DATA.head, "front"], ROWS.map((row) => [linked(row), ...row.cells.slice(1), row.front ? "●" : ""])));
}

figures();
tabs([
  ...(ROWS.length ? [["answer", "The answer", anew((section) => { answer(section); front(section); values(section); })], ["all", "All layouts", once(ranked)]] : []),
  ...(DATA.pair.length ? [["pair", "First and second", once((section) => { section.append(heading("Why the first beats the second")); pair(section, DATA.pair); })]] : []),
  ...(DATA.dropped.length ? [["dropped", "Dropped", once((section) => section.append(heading("Dropped layouts"), table(["layout", "by", "reason"], DATA.dropped, [0, 1, 2])))]] : []),
  provenance(["What the figures are made of", ["", ""], [["iteration", "replayed from what one rank of each stage issued; prism replay says more"], ["memory", DATA.memory_from]]]),
  reading("layout", "to the first", "allocated, reserved, device", "dropped"),
]);
