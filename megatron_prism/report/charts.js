// Plots with axes, stacked bars, tables with meters, and the memory curve.

function swatch(colour, className) {
  const made = element("i", `swatch ${className || ""}`);
  made.style.backgroundColor = colour;
  return made;
}

function legend(items) {
  return element("div", "legend", ...items.map(([text, colour, className]) => element("span", "", swatch(colour, className), text)));
}

// one bar per class: [{name, total, share, parts: [[what, ns, colour, className]]}]; share: of the longest bar
function stack(bars) {
  const box = element("div", "stack");
  for (const bar of bars) {
    const track = element("div", "track");
    track.style.width = `${100 * (bar.share ?? 1)}%`;
    for (const [what, ns, colour, className] of bar.parts) {
      if (!ns) continue;
      const part = element("div", `part ${className || ""}`);
      part.style.width = `${100 * ns / Math.max(1, bar.total)}%`;
      part.style.backgroundColor = colour;
      tipOn(part, what, `${bar.name}: ${formatNs(ns)}, ${percent(ns / Math.max(1, bar.total))}`);
      track.append(part);
    }
    box.append(element("div", "", bar.name), track, element("div", "quiet", bar.note));
  }
  return box;
}

// head: names; rows: cells (strings or elements); columns named in ``texts`` are to the left
function table(head, rows, texts = []) {
  const cell = (tag) => (value, i) => element(tag, texts.includes(i) ? "text" : "", value);
  return element("table", "",
    element("thead", "", element("tr", "", ...head.map(cell("th")))),
    element("tbody", "", ...rows.map((row) => element("tr", "", ...row.map(cell("td"))))));
}

function meter(part, colour) {
  const made = element("div", "meter");
  made.style.width = `${Math.max(0, 100 * part)}%`;
  if (colour) made.style.backgroundColor = colour;
  return made;
}

// ---- two breakdowns of a mean rank: {name, ns, note, parts: [[what, ns]]}
function pair(section, two, lanes) {
  const most = Math.max(...two.map((one) => one.ns));
  const colour = (what) => what === "compute" ? "var(--forward)" : groupColour(what.split(" ").slice(1).join(" "));
  const bars = two.map((one) => ({ name: one.name, total: one.ns, share: one.ns / most, note: formatNs(one.ns),
    parts: one.parts.filter(([what]) => what !== "idle").map(([what, ns]) => [what, ns, colour(what), what.startsWith("waiting") ? "waits" : ""]) }));
  const of = two.map((one) => new Map(one.parts));
  const difference = (what) => (of[1].get(what) || 0) - (of[0].get(what) || 0);
  const whats = [...new Set([...of[0].keys(), ...of[1].keys()])].filter((what) => of[0].get(what) || of[1].get(what))
    .sort((a, b) => Math.abs(difference(b)) - Math.abs(difference(a)));
  const rows = whats.map((what) => [what, formatNs(of[0].get(what) || 0), formatNs(of[1].get(what) || 0), signed(difference(what), formatNs)]);
  section.append(quiet("The main stream of a mean rank. Striped: waiting for other ranks to reach a call. Empty: idle."),
    stack(bars), legend([["compute", "var(--forward)"], ...lanes.map((group) => [group, groupColour(group)])]),
    table(["mean rank", "first", "second", "second − first"], rows));
}

function signed(value, write) {  // what is written as zero has no sign
  const text = write(Math.abs(value));
  return `${/[1-9]/.test(text) ? value > 0 ? "+" : "−" : ""}${text}`;
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
    this.width = Math.min(1200, Math.max(320, section.clientWidth - 40));
    Object.assign(this, { x, y, left: 84, right, top: 16, bottom: height - 46, colours: palette() });
    this.svg = svg("svg", { viewBox: `0 0 ${this.width} ${height}`, role: "img", "aria-label": label });
    const steps = (axis, most) => {
      const step = niceStep((axis.to - axis.from) / most), found = [];
      for (let tick = Math.ceil(axis.from / step); tick * step <= axis.to; tick++) found.push(tick * step);
      return found;
    };
    for (const tick of y.ticks || steps(y, 6)) {
      this.segment(this.left, this.Y(tick), this.width - right, this.Y(tick), this.colours.line);
      this.text(this.left - 8, this.Y(tick) + 4, y.write(tick), "end");
    }
    let free = 0;  // no tick's text runs into the one before it
    for (const tick of x.ticks || steps(x, this.width / 120)) {
      const text = x.write(tick), half = 3.6 * text.length;
      this.segment(this.X(tick), this.bottom, this.X(tick), this.bottom + 5, this.colours.line);
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
  text(x, y, text, anchor, fill = this.colours.quiet) {
    return this.add(svg("text", { x, y, "text-anchor": anchor, "font-size": 12, fill }, text));
  }
  line(points, stroke, width = 2) {
    const path = points.map(([x, y]) => `${this.X(x).toFixed(1)},${this.Y(y).toFixed(1)}`).join(" ");
    return this.add(svg("polyline", { points: path, fill: "none", stroke, "stroke-width": width }));
  }
  bar(x0, x1, y, fill) {
    return this.add(svg("rect", { x: this.X(x0), y: this.Y(y), width: Math.max(0.5, this.X(x1) - this.X(x0) - 1), height: Math.max(0, this.bottom - this.Y(y)), fill }));
  }
  // upright lines with their names, each name on a line of its own
  marks(all) {
    all.forEach(([value, text, stroke], i) => {
      const x = this.X(value), y = this.top + 12 + 16 * i, over = x + 8 + 7 * text.length > this.width;
      this.segment(x, this.top, x, this.bottom, stroke, "4 3");
      this.text(over ? x - 6 : x + 6, y, text, over ? "end" : "start", this.colours.ink);
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

// ---- live memory over time, a line per class
class MemoryChart {
  constructor(canvas) {
    this.canvas = canvas;
    this.curves = DATA.rows.map((row, i) => ({ name: row.name, t: row.memory[0], b: row.memory[1], i }))
      .filter((curve) => curve.t.length);
    this.peak = Math.max(1, ...this.curves.map((curve) => curve.b.reduce((a, b) => Math.max(a, b), 0)));
    this.chosen = -1;
    canvas.addEventListener("pointermove", (event) => this.hover(event));
    canvas.addEventListener("pointerleave", () => { this.chosen = -1; hideTip(); this.draw(); });
  }

  colour(i) {
    const share = this.curves.length > 1 ? i / (this.curves.length - 1) : 0;
    return `hsl(${215 + 135 * share} 62% ${matchMedia("(prefers-color-scheme: dark)").matches ? 66 : 48}%)`;
  }

  draw() {
    const ratio = window.devicePixelRatio || 1, width = this.canvas.clientWidth || 800, height = 380;
    this.canvas.style.height = `${height}px`;
    this.canvas.width = width * ratio; this.canvas.height = height * ratio;
    const g = this.canvas.getContext("2d"), colours = palette(), total = Math.max(1, DATA.figures.iteration_ns);
    g.scale(ratio, ratio);
    const left = 84, bottom = height - 28, top = 10;
    this.x = (t) => left + t / total * (width - left - 8);
    this.y = (b) => bottom - b / (this.peak * 1.06) * (bottom - top);
    this.t = (x) => (x - left) / (width - left - 8) * total;
    g.font = "11px system-ui, 'DejaVu Sans', sans-serif"; g.textBaseline = "middle"; g.fillStyle = colours.quiet;
    const step = 2 ** Math.ceil(Math.log2(this.peak / 7));
    for (let b = 0; b <= this.peak * 1.06; b += step) {
      g.strokeStyle = colours.line;
      g.beginPath(); g.moveTo(left, Math.round(this.y(b)) + 0.5); g.lineTo(width, Math.round(this.y(b)) + 0.5); g.stroke();
      g.textAlign = "right"; g.fillText(formatBytes(b), left - 8, this.y(b));
    }
    g.textAlign = "center";
    const tick = niceStep(total / 9);
    for (let t = 0; t <= total; t += tick) g.fillText(t ? formatNs(t) : "0", Math.min(this.x(t), width - 28), height - 10);
    this.curves.forEach((curve, place) => {
      g.globalAlpha = this.chosen < 0 || this.chosen === place ? 1 : 0.18;
      g.lineWidth = this.chosen === place ? 2 : 1.3;
      g.strokeStyle = this.colour(place);
      g.beginPath();
      curve.t.forEach((t, k) => {
        if (k) g.lineTo(this.x(t), this.y(curve.b[k - 1]));
        g.lineTo(this.x(t), this.y(curve.b[k]));
      });
      g.stroke();
    });
    g.globalAlpha = 1; g.lineWidth = 1;
  }

  hover(event) {
    const box = this.canvas.getBoundingClientRect(), t = this.t(event.clientX - box.left), y = event.clientY - box.top;
    let best = -1, value = 0, far = 40;
    this.curves.forEach((curve, place) => {
      const b = curve.b[Math.max(0, firstAfter(curve.t, t) - 1)];
      if (Math.abs(this.y(b) - y) < far) { best = place; value = b; far = Math.abs(this.y(b) - y); }
    });
    if (best !== this.chosen) { this.chosen = best; this.draw(); }
    if (best >= 0) showTip(event, this.curves[best].name, `${formatBytes(value)} at ${formatNs(Math.max(0, t))}`);
    else hideTip();
  }
}
