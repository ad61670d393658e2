// Classes x time on a canvas.  Only what is in view is drawn, and of what shares a pixel only the
// first, so a hundred thousand spans stay fluid.

const AXIS = 24, GAP = 16, MAIN = 28, LANE = 11, NARROW = 600;

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

class Diagram {
  // data: of one replay; total: ns of the axis; sought: whether each kind of span is searched for
  constructor(canvas, onView, data, total) {
    this.canvas = canvas; this.onView = onView; this.data = data;
    this.total = Math.max(1, total);
    this.view = [0, this.total];
    this.lanesShown = true; this.pathShown = false; this.drag = null; this.sought = null;
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

  x(ns) { return this.margin + (ns - this.view[0]) / (this.view[1] - this.view[0]) * (this.width - this.margin); }
  ns(x) { return this.view[0] + (x - this.margin) / (this.width - this.margin) * (this.view[1] - this.view[0]); }

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
    this.margin = width < NARROW ? 74 : 118;
    this.colours = {};
    for (const name of [...PHASES, "other", "ink", "quiet", "line", "accent", "bg"]) this.colours[name] = variable(name);
    this.axis(g, height);
    g.save();
    g.beginPath();
    g.rect(this.margin, 0, width - this.margin, height);
    g.clip();
    for (const row of this.rows) this.row(g, row);
    if (this.pathShown) this.path(g);
    if (this.drag && this.drag.select) this.selection(g, height);
    g.restore();
    g.fillStyle = this.colours.ink;
    g.font = "600 12px system-ui, 'DejaVu Sans', sans-serif";
    g.textBaseline = "middle";
    for (const row of this.rows) {
      g.font = "600 12px system-ui, 'DejaVu Sans', sans-serif"; g.fillStyle = this.colours.ink;
      g.fillText(row.name, 0, row.y + MAIN / 2, this.margin - 10);
      g.font = "10px system-ui, 'DejaVu Sans', sans-serif"; g.fillStyle = this.colours.quiet; g.textAlign = "right";
      if (this.lanesShown) row.lanes.forEach((lane, i) =>
        g.fillText(groupName(this.data.lanes[lane.lane]), this.margin - 8, row.y + MAIN + 3 + i * (LANE + 1) + LANE / 2, this.margin - 20));
      g.textAlign = "left";
    }
  }

  axis(g, height) {
    const wide = (this.width - this.margin) / this.total;  // above: where the view is in the whole
    g.fillStyle = this.colours.accent;
    g.fillRect(this.margin + this.view[0] * wide, 0, Math.max(3, (this.view[1] - this.view[0]) * wide), 3);
    const step = niceStep((this.view[1] - this.view[0]) / Math.max(2, (this.width - this.margin) / 110));
    g.font = "11px system-ui, 'DejaVu Sans', sans-serif";
    g.textBaseline = "middle";
    for (let t = Math.ceil(this.view[0] / step) * step; t <= this.view[1]; t += step) {
      const x = Math.round(this.x(t)) + 0.5;
      g.strokeStyle = this.colours.line;
      g.beginPath(); g.moveTo(x, AXIS - 6); g.lineTo(x, height); g.stroke();
      g.fillStyle = this.colours.quiet;
      if (x + 60 < this.width) g.fillText(t ? formatNs(t) : "0", x + 4, AXIS / 2 + 1);
    }
  }

  row(g, row) {
    g.globalAlpha = 0.28;
    for (const block of row.blocks) {
      if (block.end < this.view[0] || block.start > this.view[1]) continue;
      const x = this.x(block.start), w = Math.max(0.5, this.x(block.end) - x);
      g.fillStyle = this.phase(block.phase);
      g.fillRect(x, row.y, w, MAIN);
    }
    g.globalAlpha = 1;
    if (row.main) this.spans(g, row.main, row.y + 2, MAIN - 4, null);
    this.labels(g, row);
    if (!this.lanesShown) return;
    row.lanes.forEach((lane, i) => {
      const y = row.y + MAIN + 3 + i * (LANE + 1);
      g.fillStyle = this.colours.line; g.globalAlpha = 0.4;
      g.fillRect(this.margin, y, this.width - this.margin, LANE);
      g.globalAlpha = 1;
      this.spans(g, lane, y, LANE, paint(groupColour(this.data.lanes[lane.lane])));
    });
  }

  phase(name) { return this.colours[PHASES.includes(name) ? name : "other"]; }

  spans(g, lane, y, height, colour) {
    const last = firstAfter(lane.ready, this.view[1]);
    let until = -1;  // pixels to the left of it are painted
    for (let i = firstAfter(lane.ready, this.view[0] - lane.longest); i < last; i++) {
      const end = this.x(lane.end[i]);
      if (end <= until && end - this.x(lane.ready[i]) < 0.5) continue;
      const ready = this.x(lane.ready[i]), start = this.x(lane.start[i]);
      g.fillStyle = colour || this.phase(this.data.kinds[lane.kind[i]][1]);
      const alpha = this.sought && !this.sought[lane.kind[i]] ? 0.15 : 1;
      if (start - ready > 0.3) { g.globalAlpha = 0.3 * alpha; g.fillRect(ready, y, start - ready, height); }
      const w = Math.max(0.35, end - start);
      g.globalAlpha = alpha;
      g.fillRect(start, y, w > 3 ? w - 0.6 : w, height);
      g.globalAlpha = 1;
      until = end;
    }
  }

  labels(g, row) {
    g.font = "600 11px system-ui, 'DejaVu Sans', sans-serif";
    g.textBaseline = "middle";
    for (const block of row.blocks) {
      if (block.end < this.view[0] || block.start > this.view[1]) continue;
      const left = Math.max(this.margin, this.x(block.start)), right = Math.min(this.width, this.x(block.end));
      const text = block.phase === "optimizer" ? "optimizer" : this.data.steps[block.step][0];
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
    g.lineJoin = "round";
    g.beginPath();
    rows.forEach((row, i) => {
      if (row < 0) return;
      const y = this.rows[row].y + MAIN + 1;
      g.lineTo(this.x(starts[i]), y);
      g.lineTo(this.x(starts[i] + runs[i]), y);
    });
    for (const [colour, width] of [[this.colours.bg, 5], [this.colours.ink, 2.2]]) {
      g.strokeStyle = colour; g.lineWidth = width;
      g.stroke();
    }
    g.lineWidth = 1;
  }

  selection(g, height) {
    const [a, b] = [this.drag.x, this.drag.now].sort((p, q) => p - q);
    g.fillStyle = this.colours.accent; g.globalAlpha = 0.16;
    g.fillRect(a, AXIS - 6, b - a, height);
    g.globalAlpha = 1;
  }

  // ---- what lies under the pointer: {row, lane, i} or {row, block}
  hit(x, y) {
    if (x < this.margin) return null;
    const row = this.rows.find((one) => y >= one.y && y < one.y + one.height), t = this.ns(x);
    if (!row) return null;
    const near = 2 * (this.view[1] - this.view[0]) / (this.width - this.margin);
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
    if (found.block) return [`${this.data.steps[found.block.step][1]}: the main stream waits`, found.row.name];
    const { lane, i } = found, [what, , where, site, source] = this.data.kinds[lane.kind[i]];
    const wait = lane.start[i] - lane.ready[i], number = lane.count.length ? lane.count[i] : 1;
    const basis = (this.data.sources[source] || "").split(" (")[0];
    return [
      number > 1 ? `${count(number)} spans, the first: ${what}` : what, where ? `of ${where}` : "",
      `${found.row.name}, ${this.data.steps[lane.step[i]][1]}`,
      `${formatNs(lane.end[i] - lane.start[i])} at ${formatNs(lane.start[i])}${basis ? `, ${basis}` : ""}`,
      wait > 0 ? `others came ${formatNs(wait)} after this rank was ready` : "", site,
    ];
  }

  // spans whose words have ``words`` in them stand out; next: show the first one behind the last
  search(words, next = false) {
    const matches = (kind) => [kind[0], kind[1], kind[2], kind[3]].some((text) => String(text).toLowerCase().includes(words));
    this.sought = words ? this.data.kinds.map(matches) : null;
    if (next && this.sought) {
      const all = this.rows.flatMap((row) => [row.main, ...row.lanes].filter(Boolean).flatMap((lane) =>
        Array.from(lane.start.keys()).filter((i) => this.sought[lane.kind[i]]).map((i) => ({ row, lane, i }))))
        .sort((a, b) => a.lane.start[a.i] - b.lane.start[b.i]);
      const one = all[this.nth = ((this.nth ?? -1) + 1) % (all.length || 1)];
      if (one) {
        const middle = (one.lane.start[one.i] + one.lane.end[one.i]) / 2, half = Math.max(20 * (one.lane.end[one.i] - one.lane.start[one.i]), this.total / 200);
        this.show(middle - half, middle + half);
        pinDetails(...this.describe(one));
      }
    }
    if (!next) this.nth = -1;
    if (this.canvas.clientWidth) this.draw();
  }

  listen() {
    const canvas = this.canvas;
    const at = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
    canvas.addEventListener("pointerdown", (event) => {
      const [x] = at(event);
      this.drag = { x, now: x, select: !event.shiftKey, view: [...this.view] };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      const [x, y] = at(event);
      if (!this.drag) {
        const found = this.hit(x, y);
        if (found) showDetails(...this.describe(found)); else hideDetails();
      } else if (this.drag.select) { this.drag.now = Math.max(this.margin, x); this.draw(); } else {
        const by = (this.drag.x - x) / (this.width - this.margin) * (this.drag.view[1] - this.drag.view[0]);
        this.show(this.drag.view[0] + by, this.drag.view[1] + by);
      }
    });
    canvas.addEventListener("pointerup", (event) => {
      const drag = this.drag, found = this.hit(...at(event));
      this.drag = null;
      if (drag && drag.select && Math.abs(drag.now - drag.x) > 5)
        this.show(...[this.ns(drag.x), this.ns(drag.now)].sort((a, b) => a - b));
      else { this.draw(); pinDetails(...(found ? this.describe(found) : [])); }
    });
    canvas.addEventListener("pointercancel", () => { this.drag = null; this.draw(); });
    canvas.addEventListener("pointerleave", hideDetails);
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
  }
}

// Diagrams above each other on one time axis, with what steers them: [[name, data]]
function diagrams(section, all, total) {
  const range = element("span", "quiet"), made = [];
  const tick = (text, checked, act) => {
    const box = element("input", "");
    Object.assign(box, { type: "checkbox", checked });
    box.addEventListener("change", () => made.forEach((one) => { act(one, box.checked); one.draw(); }));
    return element("label", "", box, text);
  };
  section.append(element("div", "bar",
    element("div", "buttons", button("+", () => made[0].zoom(1.6), "zoom in (+)"), button("−", () => made[0].zoom(1 / 1.6), "zoom out (−)"),
      button("whole", () => made[0].show(0, made[0].total), "the whole iteration (0)")),
    tick("communication", true, (one, on) => { one.lanesShown = on; }), tick("critical path", false, (one, on) => { one.pathShown = on; }), range,
    element("span", "hint quiet", "drag: zoom in · ctrl + wheel: zoom · shift + drag, ← →: move · double-click: whole")));
  for (const [name, data] of all) {
    const canvas = element("canvas", "diagram");
    Object.assign(canvas, { tabIndex: 0, ariaLabel: "what every class does over time" });
    section.append(...(name ? [element("h3", "", name)] : []), canvas);
    made.push(new Diagram(canvas, (view) => {
      range.textContent = `${formatNs(view[0])} – ${formatNs(view[1])}`;
      for (const one of made) if (one.view[0] !== view[0] || one.view[1] !== view[1]) one.show(...view);
    }, data, total));
  }
  section.append(kindsLegend([...PHASES.map((phase) => [phase, phaseColour(phase)]), ["outside of steps", "var(--other)"]]));
  for (const one of made) one.show(...one.view);
  SEARCHED.push((...words) => made.forEach((one) => one.search(...words)));
  return made;
}
