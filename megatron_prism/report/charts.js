// Legends, stacked bars, tables with meters, and plots with axes.

function swatch(colour, className) {
  const made = element("i", `swatch ${className || ""}`);
  made.style.backgroundColor = colour;
  return made;
}

function legend(items) {
  return element("div", "legend", ...items.map(([text, colour, className]) => element("span", "", swatch(colour, className), text)));
}

// one bar each: [{name, total, share, note, parts: [[what, value, colour, className]]}]; share: of the longest bar
function stack(bars, write = formatNs) {
  const box = element("div", "stack");
  for (const bar of bars) {
    const track = element("div", "track");
    track.style.width = `${100 * (bar.share ?? 1)}%`;
    for (const [what, value, colour, className] of bar.parts) {
      if (!value) continue;
      const part = element("div", `part ${className || ""}`);
      part.style.width = `${100 * value / Math.max(1, bar.total)}%`;
      part.style.backgroundColor = colour;
      track.append(tipOn(part, what, `${bar.name}: ${write(value)}, ${percent(value / Math.max(1, bar.total))}`));
    }
    box.append(element("div", "", bar.name), track, element("div", "quiet", bar.note));
  }
  return box;
}

// head: names; rows: cells (strings or elements); columns named in ``texts`` are to the left
function table(head, rows, texts = []) {
  const cell = (tag) => (value, i) => {
    const made = element(tag, texts.includes(i) ? "text" : "", value);
    if (tag === "td") made.dataset.head = head[i].replaceAll("_", "_\u200b");  // where it may break
    return made;
  };
  return element("table", "",
    element("thead", "", element("tr", "", ...head.map(cell("th")))),
    element("tbody", "", ...rows.map((row) => element("tr", "", ...row.map(cell("td"))))));
}

// the same without columns that have one value: [table, what is the same in all rows]
function foldedTable(head, rows, texts = []) {
  const kept = head.map((_, i) => i).filter((i) => !i || rows.length < 2 || rows.some((row) => row[i] !== rows[0][i]));
  const same = head.flatMap((name, i) => kept.includes(i) || rows[0][i] === "" ? [] : [`${name} ${rows[0][i]}`]);
  return [table(kept.map((i) => head[i]), rows.map((row) => kept.map((i) => row[i])), texts.map((i) => kept.indexOf(i))),
    quiet(same.length ? `The same for all: ${same.join(", ")}.` : "")];
}

function meter(part, colour, className = "") {
  const made = element("div", `meter ${className}`);
  made.style.width = `${Math.max(0, 100 * part)}%`;
  if (colour) made.style.backgroundColor = colour;
  return made;
}
const meters = (...all) => element("div", "share", ...all.map((one) => meter(...one)));

// ---- two breakdowns of a mean rank: {name, ns, parts: [[what, ns]]}
function pair(section, two) {
  const most = Math.max(...two.map((one) => one.ns));
  const bars = two.map((one) => ({ name: one.name, total: one.ns, share: one.ns / most, note: formatNs(one.ns),
    parts: one.parts.filter(([what]) => what !== "idle").map(([what, ns]) => { const [text, ...style] = partStyle(what); return [text, ns, ...style]; }) }));
  const rows = partChanges(two).map(([what, a, b]) => [partStyle(what)[0], formatNs(a), formatNs(b), signed(b - a, formatNs)]);
  section.append(quiet("The main stream of a mean rank. Striped: waiting for other ranks to reach a call. Empty: idle."),
    stack(bars), kindsLegend(), table(["mean rank", two[0].name, two[1].name, "difference"], rows));
}

// [[what, ns in the first, in the second]], the largest change first
function partChanges(two) {
  const of = two.map((one) => new Map(one.parts));
  return [...new Set(of.flatMap((one) => [...one.keys()]))].map((what) => [what, ...of.map((one) => one.get(what) || 0)])
    .filter(([, a, b]) => a || b).sort((x, y) => Math.abs(y[2] - y[1]) - Math.abs(x[2] - x[1]));
}

// computing, every kind of group that the page names, and waiting
function kindsLegend(first = [["compute", "var(--forward)"]]) {
  const names = new Map(Object.values(DATA.groups).map(([name, kind]) => [name, `var(--${kind})`]));
  return legend([...first, ...names, ["waiting", "var(--other)", "waits"]]);
}

// the next of 1, 2, 5, 10, 20, …
function niceStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((m) => m * power).find((step) => step >= rough);
}

// ---- a plot with axes: x and y are {from, to, write, title, ticks}; drawn as wide as its box
function svg(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// [from, to] with room around values
function extent(values, room = 0.06) {
  const low = Math.min(...values), high = Math.max(...values), more = (high - low) * room || Math.abs(high) * 0.05 || 1;
  return { from: low < 0 ? low - more : Math.max(0, low - more), to: high + more };
}

class Plot {
  constructor(section, label, { x, y, height = 320, right = 24 }) {
    this.width = Math.min(1400, Math.max(240, section.clientWidth - 40));
    Object.assign(this, { x, y, left: 70, right, top: 16, bottom: height - 46 });
    this.svg = svg("svg", { viewBox: `0 0 ${this.width} ${height}`, role: "img", "aria-label": label });
    const steps = (axis, most) => {
      const step = niceStep((axis.to - axis.from) / most), found = [];
      for (let tick = Math.ceil(axis.from / step); tick * step <= axis.to; tick++) found.push(tick * step);
      return found;
    };
    for (const tick of y.ticks || steps(y, 6)) {
      this.segment(this.left, this.Y(tick), this.width - right, this.Y(tick), "var(--line)");
      this.text(this.left - 8, this.Y(tick) + 4, y.write(tick), "end");
    }
    let free = 0;  // no tick's text runs into the one before it
    for (const tick of x.ticks || steps(x, this.width / 120)) {
      const text = x.write(tick), half = 3.6 * text.length;
      this.segment(this.X(tick), this.bottom, this.X(tick), this.bottom + 5, "var(--line)");
      if (this.X(tick) - half < free || this.X(tick) + half > this.width) continue;
      this.text(this.X(tick), this.bottom + 20, text, "middle");
      free = this.X(tick) + half + 8;
    }
    this.text((this.left + this.width - right) / 2, this.bottom + 40, x.title, "middle");
    section.append(this.svg);
  }

  X(value) { return this.left + (value - this.x.from) / (this.x.to - this.x.from || 1) * (this.width - this.left - this.right); }
  Y(value) { return this.bottom - (value - this.y.from) / (this.y.to - this.y.from || 1) * (this.bottom - this.top); }
  add(made) { this.svg.append(made); return made; }
  segment(x1, y1, x2, y2, stroke, dash = "") { return this.add(svg("line", { x1, y1, x2, y2, stroke, "stroke-dasharray": dash })); }
  text(x, y, text, anchor, fill = "var(--quiet)") {
    return this.add(svg("text", { x, y, "text-anchor": anchor, "font-size": 12, fill }, text));
  }
  line(points, stroke, width = 2) {
    const path = points.map(([x, y]) => `${this.X(x).toFixed(1)},${this.Y(y).toFixed(1)}`).join(" ");
    return this.add(svg("polyline", { points: path, fill: "none", stroke, "stroke-width": width }));
  }
  bar(x0, x1, y, fill) {
    return this.add(svg("rect", { x: this.X(x0), y: this.Y(y), width: Math.max(0.5, this.X(x1) - this.X(x0) - 1), height: Math.max(0, this.bottom - this.Y(y)), fill }));
  }
  // between two curves over the same x
  area(xs, lows, highs, fill) {
    const point = (x, y) => `${this.X(x).toFixed(1)},${this.Y(y).toFixed(1)}`;
    const points = [...xs.map((x, i) => point(x, highs[i])), ...xs.map((x, i) => point(x, lows[i])).reverse()];
    return this.add(svg("polygon", { points: points.join(" "), fill }));
  }
  // hear(x) where the pointer is, and on a click hear(x, true)
  follow(hear) {
    const value = (event) => {
      const box = this.svg.getBoundingClientRect(), x = (event.clientX - box.left) * this.width / box.width;
      return this.x.from + (x - this.left) / (this.width - this.left - this.right) * (this.x.to - this.x.from);
    };
    this.svg.addEventListener("pointermove", (event) => hear(value(event)));
    this.svg.addEventListener("click", (event) => hear(value(event), true));
    this.svg.addEventListener("pointerleave", hideDetails);
  }
  // upright lines with their names, each name on a line of its own
  marks(all) {
    all.forEach(([value, text, stroke], i) => {
      const x = this.X(value), room = this.width - 6.6 * text.length;
      this.segment(x, this.top, x, this.bottom, stroke, "4 3");
      this.text(Math.max(this.left + 4, Math.min(x + 6, room)), this.top + 12 + 16 * i, text, "start", "var(--ink)");
    });
  }
  // names at the right ends of curves, moved apart
  names(all) {
    let free = -Infinity;
    for (const [value, text, fill] of [...all].sort((a, b) => b[0] - a[0])) {
      const y = Math.max(this.Y(value) + 4, free + 15);
      this.text(this.width - this.right + 6, y, text, "start", fill);
      free = y;
    }
  }
}
