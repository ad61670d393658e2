// Stacked bars, tables with meters, and the memory curve.

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
