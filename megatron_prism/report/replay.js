// A timeline, or two side by side.  #/pipeline@START-END in the address shows those ns.

const F = DATA.figures, TOTAL = Math.max(1, F.iteration_ns);
function basis() {
  const shares = {};
  for (const source of F.sources) shares[kindOf(source.text)] = (shares[kindOf(source.text)] || 0) + source.path_ns;
  return Object.entries(shares).filter(([, ns]) => ns).map(([kind, ns]) => `${Math.round(100 * ns / TOTAL)} % ${kind}`).join(", ");
}

function figures() {
  const value = (found, write) => found.value === null ? null : write(found.value);
  const peaks = F.classes.filter((one) => one.peak_bytes !== null);
  const peak = peaks.length ? peaks.reduce((a, b) => b.peak_bytes > a.peak_bytes ? b : a) : null;
  const range = F.high_ns > F.low_ns
    ? `; ${formatNs(F.low_ns)} to ${formatNs(F.high_ns)}, nine times in ten` : "";
  cards([
    ["iteration", formatNs(F.iteration_ns), (basis() || "nothing takes time") + range],
    ["computing", percent(F.computing), "of all ranks' time"],
    ["exposed", percent(F.exposed), "communication that nothing hides"],
    ["bubble", percent(F.bubble), "waiting for others, or idle"],
    ...(F.host === null || F.host < 5e-4 ? [] : [["host", percent(F.host), "of the critical path: GPUs wait for Python"]]),
    ["tokens per second", value(F.tokens_per_s, (v) => round(v, 6)), F.tokens_per_s.basis],
    ["per GPU", value(F.flops_per_gpu, (v) => `${round(v / 1e12)} TFLOP/s`), F.flops_per_gpu.basis],
    ["MFU", value(F.mfu, percent), F.mfu.basis],
    ["most live memory", peak ? formatBytes(peak.peak_bytes) : null, peak ? peak.name : "the slices recorded no allocations"]]);
}

// ---- panels
function parts(one) {
  const found = [["compute", one.compute, "var(--forward)"]];
  for (const group of Object.keys(F.exposed_by_group)) found.push([`exposed ${group}`, one.exposed[group] || 0, groupColour(group)]);
  for (const group of Object.keys(F.waiting_by_group)) found.push([`waiting ${group}`, one.waiting[group] || 0, groupColour(group), "waits"]);
  return found;
}

function breakdown(section) {
  const groups = [...new Set([...Object.keys(F.exposed_by_group), ...Object.keys(F.waiting_by_group)])];
  const bars = F.classes.map((one) => ({ name: one.name, total: one.total, parts: parts(one), note: `${one.count.toLocaleString("en-US")} ranks` }));
  const rows = F.classes.map((one) => {
    const sum = (by) => Object.values(by).reduce((a, b) => a + b, 0);
    return [one.name, one.ranks, one.count.toLocaleString("en-US"), formatNs(one.compute), formatNs(sum(one.exposed)), formatNs(sum(one.waiting)),
      formatNs(one.idle), formatNs(one.total), formatNs(one.critical), formatNs(one.slack)];
  });
  section.append(element("h2", "", "Where each rank's iteration went"),
    element("p", "quiet", "The main stream of one rank of each class. Striped: waiting for other ranks to reach a call. Empty: idle."),
    stack(bars),
    legend([["compute", "var(--forward)"], ...groups.map((group) => [group, groupColour(group)])]),
    table(["class", "ranks", "count", "compute", "exposed", "waiting", "idle", "total", "compute on critical path", "least slack"], rows, [1]), more());
}

function more() {
  const hidden = F.all_classes - F.classes.length;
  return element("p", "quiet", hidden ? `… and ${hidden} classes more: prism replay --json has them all.` : "");
}

function critical(section) {
  const merged = new Map();  // what only differs in the source of its times is one row
  for (const part of F.path) {
    const key = [part.phase, part.what, part.group, kindOf(part.source)].join("|"), one = merged.get(key);
    merged.set(key, one ? { ...one, ns: one.ns + part.ns, count: one.count + part.count } : part);
  }
  const path = [...merged.values()].sort((a, b) => b.ns - a.ns);
  const total = path.reduce((sum, part) => sum + part.ns, 0) || 1;
  const most = Math.max(1, ...path.map((part) => part.ns));
  const colour = (part) => part.group ? groupColour(part.group) : `var(--${PHASES.includes(part.phase) ? part.phase : "outside"})`;
  const rows = path.map((part) => [`${part.phase} ${part.what}`, part.group, element("div", "share", meter(part.ns / most, colour(part))),
    percent(part.ns / total), formatNs(part.ns), part.count.toLocaleString("en-US"), badge(part.source)]);
  section.append(element("h2", "", "What the critical path is made of"),
    element("p", "quiet", `${path.reduce((sum, part) => sum + part.count, 0).toLocaleString("en-US")} steps, one after the other, add up to the iteration. Tick “critical path” in the pipeline to see its way through the classes.`),
    table(["step", "group", "", "share", "time", "steps", "times are"], rows, [1, 2]));
}

function collectives(section) {
  const most = Math.max(1, ...F.calls.map((call) => call.moving + call.waiting));
  const rows = F.calls.map((call) => {
    const both = element("div", "share");
    const moved = meter(call.moving / most, groupColour(call.group)), waited = meter(call.waiting / most, groupColour(call.group));
    waited.classList.add("waits");
    both.append(moved, waited);
    return [call.name, call.group, call.ranks.toLocaleString("en-US"), round(call.calls), formatBytes(call.bytes), both,
      formatNs(call.moving), formatNs(call.waiting), call.moving ? `${round(call.bytes / call.moving, 3)} GB/s` : "", badge(call.source)];
  });
  const still = (group) => (F.exposed_by_group[group] || 0) + (F.waiting_by_group[group] || 0);
  const groups = Object.keys({ ...F.exposed_by_group, ...F.waiting_by_group }).sort((a, b) => still(b) - still(a));
  const exposed = groups.map((group) =>
    [group, formatNs(F.exposed_by_group[group] || 0), formatNs(F.waiting_by_group[group] || 0),
      percent(still(group) / TOTAL)]);
  section.append(element("h2", "", "What is not hidden, by group"),
    element("p", "quiet", "Time in which the main stream was blocked, as the mean over all ranks."),
    table(["group", "exposed", "waiting", "of the iteration"], exposed),
    element("h2", "", "Calls of one rank in an iteration"),
    element("p", "quiet", "The mean over the ranks that make them. Solid: data move. Striped: ready, but others have not arrived (also where that is hidden). Bytes are messages as nccl-tests counts them; GB/s is bytes over the time in which they move."),
    table(["call", "group", "ranks", "calls", "bytes", "", "moves", "waits", "rate", "times are"], rows, [1, 5]));
}

function links(section) {
  const rows = F.links.map((one) => {
    const both = element("div", "share");
    const shared = meter(one.shared, "var(--backward)"), alone = meter(one.busy - one.shared, "var(--forward)");
    both.append(shared, alone);
    const owner = F.classes.find((each) => each.index === one.owner);
    return [`${one.network ? "NIC" : "NVLinks"} ${one.into ? "into" : "out of"}`, owner ? owner.name : `class ${one.owner}`, both,
      percent(one.busy), percent(one.shared)];
  });
  section.append(element("h2", "", "Busy links"),
    element("p", "quiet", "The part of the iteration in which a link of one rank of each class moves data, alone or for several calls at once, which slow each other."),
    legend([["one call", "var(--forward)"], ["several calls", "var(--backward)"]]),
    table(["link", "class", "", "busy", "shared"], rows, [1, 2]));
}

let memoryChart;
function memory(section) {
  if (memoryChart) { memoryChart.draw(); return; }
  const canvas = element("canvas", ""), chart = memoryChart = new MemoryChart(canvas);
  const none = F.classes.every((one) => one.peak_bytes === null);
  const rows = F.classes.map((one) => [one.name, one.ranks, one.peak_bytes === null ? "unknown" : formatBytes(one.peak_bytes)]);
  section.append(element("h2", "", "Live memory of one rank of each class"),
    element("p", "quiet", none ? "unknown: the slices recorded no allocations." :
      "Live bytes of tensors, at the time of the op that follows the allocation; the allocator reserves more."));
  if (!none) section.append(canvas, legend(chart.curves.map((curve, place) => [curve.name, chart.colour(place)])));
  section.append(table(["class", "ranks", "peak"], rows, [1]));
  chart.draw();
}

function provenance(section) {
  const busy = F.sources.reduce((sum, source) => sum + source.busy_ns, 0) || 1;
  const sources = [...F.sources].sort((a, b) => b.path_ns - a.path_ns || b.busy_ns - a.busy_ns);
  const rows = sources.map((source) => [badge(source.text), source.text.replace(/^\w+: /, ""), percent(source.path_ns / TOTAL), percent(source.busy_ns / busy)]);
  const about = Object.entries(F.source).map(([key, value]) => [key, value]);
  section.append(element("h2", "", "Where the times are from"),
    table(["", "source", "of the critical path", "of all busy time"], rows, [1]),
    element("h2", "", "Where the programs are from"),
    table(["", ""], about.length ? about : [["unknown", "the programs do not say"]], [1]),
    element("h2", "", "What is assumed"),
    element("p", "", `The host issues ahead without limit except where Megatron waits for the device. ${F.links.length ? "Calls share the links that are named under Links." : "Links are not contended (network=rails)."} Kernels and calls do not slow each other. All ranks of a class are equally fast.`),
    element("p", "quiet", `Figures are of iteration ${F.iterations} of ${F.iterations}. ${DATA.merged ? `In the diagram, spans below ${formatNs(DATA.merged)} are merged.` : "The diagram shows every span."}` +
      (DATA.missing ? ` ${DATA.missing} classes are not drawn: those least on the critical path.` : "")));
}

// ---- two replays side by side
function comparison(section) {
  const other = DATA.other, two = [DATA, other], total = Math.max(...two.map((one) => one.figures.iteration_ns));
  const facts = [["iteration", (f) => f.iteration_ns, formatNs], ["computing", (f) => f.computing, percent], ["exposed", (f) => f.exposed, percent],
    ["bubble", (f) => f.bubble, percent], ["tokens per second", (f) => f.tokens_per_s.value, (v) => round(v, 6)],
    ["MFU", (f) => f.mfu.value, percent]];
  const rows = facts.map(([what, read, write]) => {
    const [a, b] = two.map((one) => read(one.figures));
    return [what, or(a, write), or(b, write), a === null || b === null || !a ? "" : write === percent ? signed(100 * (b - a), (v) => `${v.toFixed(1)} points`) : signed(b / a - 1, percent)];
  });
  section.append(element("h2", "", "First and second"), table(["", DATA.name, other.name, "second against first"], rows));
  section.append(element("h2", "", "The same time axis"), quiet("Zooming one zooms both."));
  const diagrams = two.map((one) => {
    const canvas = element("canvas", "diagram");
    canvas.tabIndex = 0;
    section.append(element("h3", "", `${one.name}: ${formatNs(one.figures.iteration_ns)}`), canvas);
    return new Diagram(canvas, null, (view) => {
      for (const each of diagrams || []) if (each.view[0] !== view[0] || each.view[1] !== view[1]) each.show(...view);
    }, one, total);
  });
  for (const one of diagrams) one.draw();
  section.append(element("h2", "", "Where the difference is"));
  pair(section, two.map((one) => ({ name: one.name, ns: one.figures.iteration_ns, parts: one.parts })), DATA.groups.filter((lane) => lane !== "main"));
}

at("world").textContent = F.sizes;
const JOB = ["recipe", "megatron_core", "torch", "tier", "device"];  // the rest is under Provenance
at("slices").textContent = [F.world, ...JOB.filter((key) => F.source[key]).map((key) => `${key} ${F.source[key]}`)].join(" · ");
figures();
const diagram = new Diagram(at("diagram"), at("overview"), ([start, end]) => {
  at("range").textContent = `${formatNs(start)} – ${formatNs(end)}`;
});
at("zoom-in").addEventListener("click", () => diagram.zoom(1.6));
at("zoom-out").addEventListener("click", () => diagram.zoom(1 / 1.6));
at("zoom-fit").addEventListener("click", () => diagram.show(0, diagram.total));
at("show-lanes").addEventListener("change", (event) => { diagram.lanesShown = event.target.checked; diagram.draw(); });
at("show-path").addEventListener("change", (event) => { diagram.pathShown = event.target.checked; diagram.draw(); });
at("legend").replaceWith(legend([...["forward", "backward", "weight", "optimizer"].map((phase) => [phase, `var(--${phase})`]),
  ["outside of steps", "var(--outside)"], ...DATA.lanes.slice(1).map((lane) => [lane, groupColour(lane)]), ["waiting", "var(--outside)", "pale"]]));
diagram.onView(diagram.view);
tabs([...(DATA.other ? [["compare", "Two replays", anew(comparison)]] : []),
  ["pipeline", "Pipeline", () => diagram.draw()], ["breakdown", "Breakdown", once(breakdown)], ["critical", "Critical path", once(critical)],
  ["collectives", "Communication", once(collectives)], ...(F.links.length ? [["links", "Links", once(links)]] : []), ["memory", "Memory", memory], ["provenance", "Provenance", once(provenance)],
  ["reading", "How to read this", null]], () => {
  const [, start, end] = /@(\d+)-(\d+)$/.exec(location.hash) || [];
  if (end && Number(end) > Number(start)) diagram.show(Number(start), Number(end));
});
