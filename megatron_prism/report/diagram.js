// Classes x time on a canvas.  Only what is in view is drawn, and of what shares a pixel only the
// first, so a hundred thousand spans stay fluid.

const FEW = Math.max(DATA.rows.length, DATA.other ? DATA.other.rows.length : 0) <= 8;
const MARGIN = 118, AXIS = 24, GAP = FEW ? 18 : 12, MAIN = FEW ? 30 : 20, LANE = FEW ? 9 : 5;

// columns of differences -> absolute ns in typed arrays
function decode(lane) {
  const n = lane.ready.length, ready = new Float64Array(n), start = new Float64Array(n), end = new Float64Array(n);
  let at = 0, longest = 0;
  for (let i = 0; i < n; i++) {
    at += lane.ready[i];
    ready[i] = at;
    start[i] = at + lane.wait[i];
    end[i] = start[i] + lane.run[i];
    longest = Math.max(longest, end[i] - at);
  }
  return { lane: lane.lane, kind: lane.kind, step: lane.step, count: lane.count, ready, start, end, longest };
}

// runs of one step on the main stream -> blocks [start, end, step, phase]
function blocksOf(lane, kinds) {
  const found = [];
  for (let i = 0; i < lane.step.length; i++) {
    const last = found[found.length - 1], phase = kinds[lane.kind[i]][1];
    if (last && last.step === lane.step[i] && last.phase === phase) last.end = Math.max(last.end, lane.end[i]);
    else found.push({ start: lane.start[i], end: lane.end[i], step: lane.step[i], phase });
  }
  return found;
}

function firstAfter(values, value) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < value) low = middle + 1; else high = middle;
  }
  return low;
}

class Diagram {
  // data: of one replay; total: ns of the axis
  constructor(canvas, overview, onView, data = DATA, total = data.figures.iteration_ns) {
    this.canvas = canvas; this.overview = overview; this.onView = onView; this.data = data;
    this.total = Math.max(1, total);
    this.view = [0, this.total];
    this.lanesShown = true; this.pathShown = false; this.drag = null;
    this.rows = data.rows.map((row) => {
      const lanes = row.lanes.map(decode);
      const main = lanes.find((lane) => lane.lane === 0);
      return { name: row.name, main, lanes: lanes.filter((lane) => lane !== main), blocks: main ? blocksOf(main, data.kinds) : [] };
    });
    this.listen();
  }

  layout() {
    let y = AXIS;
    for (const row of this.rows) {
      row.y = y;
      row.height = MAIN + (this.lanesShown ? row.lanes.length * (LANE + 1) + 2 : 0);
      y += row.height + GAP;
    }
    return y;
  }

  x(ns) { return MARGIN + (ns - this.view[0]) / (this.view[1] - this.view[0]) * (this.width - MARGIN); }
  ns(x) { return this.view[0] + (x - MARGIN) / (this.width - MARGIN) * (this.view[1] - this.view[0]); }

  zoom(factor, at = (this.view[0] + this.view[1]) / 2) {
    this.show(at - (at - this.view[0]) / factor, at + (this.view[1] - at) / factor);
  }
  move(part) {
    const by = (this.view[1] - this.view[0]) * part;
    this.show(this.view[0] + by, this.view[1] + by);
  }
  show(start, end) {
    const width = Math.min(this.total, Math.max(end - start, Math.min(200, this.total)));
    start = Math.max(0, Math.min(start, this.total - width));
    this.view = [start, start + width];
    this.draw();
    this.onView(this.view);
  }

  sized(canvas, height) {
    const width = canvas.clientWidth || 800, ratio = window.devicePixelRatio || 1;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const g = canvas.getContext("2d");
    g.scale(ratio, ratio);
    return [g, width];
  }

  draw() {
    const height = this.layout();
    const [g, width] = this.sized(this.canvas, height);
    this.width = width;
    this.colours = palette();
    this.axis(g, height);
    g.save();
    g.beginPath();
    g.rect(MARGIN, 0, width - MARGIN, height);
    g.clip();
    for (const row of this.rows) this.row(g, row);
    if (this.pathShown) this.path(g);
    if (this.drag && this.drag.select) this.selection(g, height);
    g.restore();
    g.fillStyle = this.colours.ink;
    g.font = "600 12px system-ui, 'DejaVu Sans', sans-serif";
    g.textBaseline = "middle";
    for (const row of this.rows) g.fillText(row.name, 0, row.y + MAIN / 2, MARGIN - 10);
    if (this.overview) this.drawOverview();
  }

  axis(g, height) {
    const step = niceStep((this.view[1] - this.view[0]) / Math.max(2, (this.width - MARGIN) / 110));
    g.font = "11px system-ui, 'DejaVu Sans', sans-serif";
    g.textBaseline = "middle";
    for (let t = Math.ceil(this.view[0] / step) * step; t <= this.view[1]; t += step) {
      const x = Math.round(this.x(t)) + 0.5;
      g.strokeStyle = this.colours.line;
      g.beginPath(); g.moveTo(x, AXIS - 6); g.lineTo(x, height); g.stroke();
      g.fillStyle = this.colours.quiet;
      if (x + 60 < this.width) g.fillText(t ? formatNs(t) : "0", x + 4, AXIS / 2 - 2);
    }
  }

  row(g, row) {
    g.globalAlpha = 0.28;
    for (const block of row.blocks) {
      if (block.end < this.view[0] || block.start > this.view[1]) continue;
      const x = this.x(block.start), w = Math.max(0.5, this.x(block.end) - x);
      g.fillStyle = phaseColour(this.colours, block.phase);
      g.fillRect(x, row.y, w, MAIN);
    }
    g.globalAlpha = 1;
    if (row.main) this.spans(g, row.main, row.y + 2, MAIN - 4, null);
    this.labels(g, row);
    if (!this.lanesShown) return;
    row.lanes.forEach((lane, i) => {
      const y = row.y + MAIN + 3 + i * (LANE + 1);
      g.fillStyle = this.colours.line; g.globalAlpha = 0.4;
      g.fillRect(MARGIN, y, this.width - MARGIN, LANE);
      g.globalAlpha = 1;
      this.spans(g, lane, y, LANE, groupColour(this.data.lanes[lane.lane]));
    });
  }

  spans(g, lane, y, height, colour) {
    const last = firstAfter(lane.ready, this.view[1]);
    let until = -1;  // pixels to the left of it are painted
    for (let i = firstAfter(lane.ready, this.view[0] - lane.longest); i < last; i++) {
      const end = this.x(lane.end[i]);
      if (end <= until && end - this.x(lane.ready[i]) < 0.5) continue;
      const ready = this.x(lane.ready[i]), start = this.x(lane.start[i]);
      g.fillStyle = colour || phaseColour(this.colours, this.data.kinds[lane.kind[i]][1]);
      if (start - ready > 0.3) { g.globalAlpha = 0.3; g.fillRect(ready, y, start - ready, height); g.globalAlpha = 1; }
      const w = Math.max(0.35, end - start);
      g.fillRect(start, y, w > 3 ? w - 0.6 : w, height);
      until = end;
    }
  }

  labels(g, row) {
    g.font = "600 11px system-ui, 'DejaVu Sans', sans-serif";
    g.textBaseline = "middle";
    for (const block of row.blocks) {
      if (block.end < this.view[0] || block.start > this.view[1]) continue;
      const left = Math.max(MARGIN, this.x(block.start)), right = Math.min(this.width, this.x(block.end));
      const text = block.phase === "optimizer" ? "optimizer" : this.data.steps[block.step];
      if (text === "-" || right - left < 9 + 7 * text.length) continue;
      g.lineWidth = 3; g.strokeStyle = "rgb(0 0 0 / 45%)"; g.lineJoin = "round";
      g.strokeText(text, left + 4, row.y + MAIN / 2 + 0.5);
      g.fillStyle = "#fff";
      g.fillText(text, left + 4, row.y + MAIN / 2 + 0.5);
    }
    g.lineWidth = 1;
  }

  path(g) {
    const [rows, starts, runs] = this.data.path;
    g.strokeStyle = this.colours.path; g.lineWidth = 2.5; g.lineJoin = "round";
    g.beginPath();
    rows.forEach((row, i) => {
      if (row < 0) return;
      const y = this.rows[row].y + MAIN + 1;
      g.lineTo(this.x(starts[i]), y);
      g.lineTo(this.x(starts[i] + runs[i]), y);
    });
    g.stroke();
    g.lineWidth = 1;
  }

  selection(g, height) {
    const [a, b] = [this.drag.x, this.drag.now].sort((p, q) => p - q);
    g.fillStyle = this.colours.accent; g.globalAlpha = 0.16;
    g.fillRect(a, AXIS - 6, b - a, height);
    g.globalAlpha = 1;
  }

  drawOverview() {
    const [g, width] = this.sized(this.overview, 22), scale = (width - MARGIN) / this.total;
    const middle = this.rows[Math.floor((this.rows.length - 1) / 2)];
    for (const block of middle ? middle.blocks : []) {
      g.fillStyle = phaseColour(this.colours, block.phase); g.globalAlpha = 0.55;
      g.fillRect(MARGIN + block.start * scale, 5, Math.max(0.5, (block.end - block.start) * scale), 12);
    }
    g.globalAlpha = 1;
    g.strokeStyle = this.colours.accent; g.lineWidth = 1.5;
    g.strokeRect(MARGIN + this.view[0] * scale + 1, 1.5, Math.max(3, (this.view[1] - this.view[0]) * scale - 2), 19);
  }

  // ---- what lies under the pointer: {row, lane, i} or {row, block}
  hit(x, y) {
    if (x < MARGIN) return null;
    const row = this.rows.find((one) => y >= one.y && y < one.y + one.height), t = this.ns(x);
    if (!row) return null;
    const near = 2 * (this.view[1] - this.view[0]) / (this.width - MARGIN);
    const within = (lane) => {
      let best = -1;
      for (let i = firstAfter(lane.ready, t - lane.longest - near); i < lane.ready.length && lane.ready[i] <= t + near; i++)
        if (lane.end[i] >= t - near && (best < 0 || lane.ready[i] <= t)) best = i;
      return best;
    };
    const place = Math.floor((y - row.y - MAIN - 3) / (LANE + 1));
    const lane = y < row.y + MAIN ? row.main : row.lanes[place];
    const i = lane ? within(lane) : -1;
    if (i >= 0) return { row, lane, i };
    const block = lane === row.main && row.blocks.find((one) => one.start <= t && t < one.end);
    return block ? { row, block } : null;
  }

  describe(found) {
    if (found.block) return [`${this.data.steps[found.block.step]} ${found.block.phase}`, `${found.row.name}: the main stream waits`];
    const { lane, i } = found, [name, phase, group, bytes, site, note, source] = this.data.kinds[lane.kind[i]];
    const wait = lane.start[i] - lane.ready[i], count = lane.count.length ? lane.count[i] : 1;
    const [title, basis] = [`${name} ${this.data.steps[lane.step[i]]}`, (this.data.sources[source] || "").split(" (")[0]];
    return [
      count > 1 ? `${count} spans, ${title} …` : title,
      `${found.row.name} · ${phase || "outside of steps"}${group ? ` · ${group}` : ""}`,
      `at ${formatNs(lane.start[i])}, takes ${formatNs(lane.end[i] - lane.start[i])}`,
      wait > 0 ? `others came ${formatNs(wait)} after this rank was ready` : "",
      bytes ? formatBytes(bytes) : "", site, note, basis,
    ];
  }

  listen() {
    const canvas = this.canvas;
    const at = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
    canvas.addEventListener("pointerdown", (event) => {
      const [x] = at(event);
      this.drag = { x, now: x, select: !event.shiftKey, view: [...this.view] };
      canvas.setPointerCapture(event.pointerId);
      hideTip();
    });
    canvas.addEventListener("pointermove", (event) => {
      const [x, y] = at(event);
      if (!this.drag) {
        const found = this.hit(x, y);
        if (found) showTip(event, ...this.describe(found)); else hideTip();
      } else if (this.drag.select) { this.drag.now = Math.max(MARGIN, x); this.draw(); } else {
        const by = (this.drag.x - x) / (this.width - MARGIN) * (this.drag.view[1] - this.drag.view[0]);
        this.show(this.drag.view[0] + by, this.drag.view[1] + by);
      }
    });
    canvas.addEventListener("pointerup", () => {
      const drag = this.drag;
      this.drag = null;
      if (drag && drag.select && Math.abs(drag.now - drag.x) > 5)
        this.show(...[this.ns(drag.x), this.ns(drag.now)].sort((a, b) => a - b));
      else this.draw();
    });
    canvas.addEventListener("pointercancel", () => { this.drag = null; this.draw(); });
    canvas.addEventListener("pointerleave", hideTip);
    canvas.addEventListener("dblclick", () => this.show(0, this.total));
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      this.zoom(Math.exp(-event.deltaY / 300), this.ns(at(event)[0]));
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      const act = { "+": () => this.zoom(1.6), "=": () => this.zoom(1.6), "-": () => this.zoom(1 / 1.6),
        "0": () => this.show(0, this.total), ArrowLeft: () => this.move(-0.2), ArrowRight: () => this.move(0.2) }[event.key];
      if (act) { event.preventDefault(); act(); }
    });
    const jump = (event) => {
      if (!(event.buttons & 1)) return;
      const box = this.overview.getBoundingClientRect(), half = (this.view[1] - this.view[0]) / 2;
      const t = (event.clientX - box.left - MARGIN) / (box.width - MARGIN) * this.total;
      this.show(t - half, t + half);
    };
    if (!this.overview) return;
    this.overview.addEventListener("pointerdown", jump);
    this.overview.addEventListener("pointermove", jump);
  }
}
