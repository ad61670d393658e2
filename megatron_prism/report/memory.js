// Memory: what the device holds at the peak, what is alive over time, and what that is, by class.

const MEMORY = DATA.memory;
const CATEGORIES = { param: ["weights", "param"], grad: ["gradients", "backward"], optim: ["optimizer", "optimizer"], master: ["master weights", "master"], act: ["activations", "forward"],
  comm: ["communication", "comm"], tmp: ["temporaries", "tmp"], graph: ["CUDA graphs", "path"], work: ["workspaces", "work"], mask: ["attention masks", "mask"], other: ["other", "other"] };
const category = (kind) => CATEGORIES[kind][0], categoryColour = (kind) => `var(--${CATEGORIES[kind][1]})`;
const series = (one, by) => by === "module" ? one.modules.map((name, i) => [name || "no module", `hsl(${(40 + 137 * i) % 360} 45% 55%)`])
  : one.kinds.map((kind) => [category(kind), categoryColour(kind)]);
let chosenClass = 0, chosenSeries = "category";

const ends = (one) => one.device ?? one.reserved;
function memoryCards() {
  const one = MEMORY.classes.reduce((a, b) => ends(b) > ends(a) ? b : a), level = one.device === null ? "reserved" : "device";
  const place = MEMORY.classes.length > 1 ? `of ${one.name}, ` : "";
  const room = MEMORY.limit === null ? null : MEMORY.limit - ends(one);
  return [[`peak, ${level}`, formatBytes(ends(one)), `${place}${one.when}`],
    [room === null || room >= 0 ? "left below the limit" : "above the limit", room === null ? null : formatBytes(Math.abs(room)),
      room === null ? "no limit is known" : `of ${formatBytes(MEMORY.limit)}`],
    ["allocated", formatBytes(one.allocated), "live tensors"],
    ...one.parts.filter(([kind]) => ["act", "param", "grad", "optim", "master"].includes(kind)).map(([kind, bytes]) => [category(kind), formatBytes(bytes), "at the peak"])];
}

// ---- every class at its peak, against the limit
function deviceBars() {
  const most = Math.max(MEMORY.limit ?? 0, ...MEMORY.classes.map(ends));
  const beyond = [["pools", "CUDA graphs' pools, in no tensor", "path"], ["cached", "cached by the allocator, in no tensor", "cached"], ["nccl", "NCCL's buffers", "nccl"], ["context", "context and libraries", "host"]]
    .filter(([key]) => MEMORY.classes.some((one) => one[key]));
  const bars = MEMORY.classes.map((one) => ({ name: one.name, total: most, note: formatBytes(ends(one)),
    parts: [...one.parts.map(([kind, bytes]) => [category(kind), bytes, categoryColour(kind)]),
      ...beyond.map(([key, text, colour]) => [text, one[key], `var(--${colour})`])] }));
  return [heading("The device's memory at the peak"),
    quiet(MEMORY.limit === null ? "A bar per class of ranks." : `A bar per class of ranks; the whole width is ${formatBytes(most)}${most > MEMORY.limit ? `, and the limit ${formatBytes(MEMORY.limit)}` : ", the limit"}.`),
    stack(bars, formatBytes),
    legend([...MEMORY.classes[0].kinds.map((kind) => [category(kind), categoryColour(kind)]), ...beyond.map(([, text, colour]) => [text, `var(--${colour})`])])];
}

// ---- one class: what is alive over its requests, by category or module
function overTime(section, one) {
  const all = series(one, chosenSeries), values = chosenSeries === "module" ? one.by_module : one.by_kind;
  const totals = one.events.map((_, i) => values.reduce((sum, row) => sum + row[i], 0));
  const beyond = ends(one) - one.allocated, room = MEMORY.limit === null ? Infinity : MEMORY.limit - beyond;
  const top = Math.max(one.allocated, room < 3 * one.allocated ? room : 0) * 1.06;
  const gib = 2 ** Math.max(0, 10 * Math.floor(Math.log2(top) / 10));  // of the axis
  const plot = new Plot(section, `live memory of ${one.name}`, { height: 400, right: 12,
    x: { from: 0, to: Math.max(1, one.events[one.events.length - 1]), ticks: one.steps.map(([event]) => event), title: "requests, by step",
      write: (event) => one.steps.find(([at]) => at === event)[1] },
    y: { from: 0, to: top / gib, write: (size) => formatBytes(size * gib) } });
  let low = totals.map(() => 0);
  values.forEach((row, i) => {
    const high = row.map((bytes, k) => (low[k] + bytes / gib));
    plot.area(one.events, low, high, all[i][1]);
    low = high;
  });
  plot.marks([[one.event, `${one.alive < one.allocated ? "most of this iteration" : "peak"} ${formatBytes(one.alive)}`, "var(--ink)"]]);
  if (room <= top) {
    plot.segment(plot.left, plot.Y(room / gib), plot.width - plot.right, plot.Y(room / gib), "var(--path)", "6 5");
    plot.text(plot.width - plot.right, plot.Y(room / gib) + 15, `the limit, ${formatBytes(MEMORY.limit)}`, "end", "var(--path)");
  }
  plot.follow((event, pin) => {
    const i = Math.max(0, firstAfter(one.events, event) - 1), step = one.steps.findLast(([at]) => at <= event) || ["", "before the iteration"];
    const found = [`${formatBytes(totals[i])} in ${step[2] || step[1]}`, ...all.map(([name], k) => values[k][i] ? `${name} ${formatBytes(values[k][i])}` : "")];
    (pin ? pinDetails : showDetails)(...found);
  });
  return legend(all);
}

function memory(section) {
  section.replaceChildren();
  if (typeof MEMORY === "string") { section.append(heading("Memory"), quiet(MEMORY)); return; }
  const one = MEMORY.classes[Math.min(chosenClass, MEMORY.classes.length - 1)];
  const choose = (words, current, act) => element("div", "buttons", ...(words.length < 2 ? [] : words).map((word, i) => {
    const made = button(word, () => { act(i); memory(section); });
    made.setAttribute("aria-pressed", String(i === current));
    return made;
  }));
  section.append(...(MEMORY.verdict ? [heading(MEMORY.verdict), ...MEMORY.about.map((line) => element("p", "", line))] : []),
    ...(MEMORY.changes.length ? [table(["what frees memory, tried on the slices", "then it needs"], MEMORY.changes, [0, 1])] : []), ...deviceBars(), heading("What is alive over time"),
    element("div", "bar", choose(MEMORY.classes.map((each) => each.name), chosenClass, (i) => { chosenClass = i; }),
      choose(one.modules.length < 2 ? [] : ["by category", "by module"], chosenSeries === "module" ? 1 : 0, (i) => { chosenSeries = i ? "module" : "category"; })));
  section.append(overTime(section, one), heading(`What is alive at the peak of ${one.name}`),
    quiet(`${formatBytes(one.allocated)} of tensors in ${one.when}, ${one.where}. ${formatBytes(ends(one) - one.allocated)} more are in no tensor, and the limit above is lower by them.`),
    ...foldedTable(["category", "module", "line", "tensors", "", "bytes"], one.top.map(([kind, module, site, number, bytes]) =>
      [element("span", "named", swatch(categoryColour(kind)), category(kind)), module, site, count(number), meters([bytes / one.top[0][4], categoryColour(kind)]), formatBytes(bytes)]), [0, 1, 2, 4]));
}

function firstAfter(values, value) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < value) low = middle + 1; else high = middle;
  }
  return low;
}
