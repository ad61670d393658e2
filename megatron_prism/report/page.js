// The page: cards, tabs and what is in them.  #/pipeline@START-END in the address shows those ns.

const F = DATA.figures, TOTAL = Math.max(1, F.iteration_ns);
const TABS = { pipeline: "Pipeline", breakdown: "Breakdown", critical: "Critical path", collectives: "Communication",
  memory: "Memory", provenance: "Provenance", reading: "How to read this" };
const at = (id) => document.getElementById(id);
const kindOf = (source) => source.split(":")[0];

function badge(source) {
  return element("span", `badge ${["measured", "modelled"].find((k) => k === kindOf(source)) || ""}`, kindOf(source));
}

function basis() {
  const shares = {};
  for (const source of F.sources) shares[kindOf(source.text)] = (shares[kindOf(source.text)] || 0) + source.path_ns;
  return Object.entries(shares).filter(([, ns]) => ns).map(([kind, ns]) => `${Math.round(100 * ns / TOTAL)} % ${kind}`).join(", ");
}

function cards() {
  const card = (what, number, note) => {
    const [, digits, unit] = /^(.*?)( \D+)?$/.exec(number === null ? "unknown" : number);
    return element("div", "card", element("div", "what", what),
      element("div", number === null ? "number unknown" : "number", digits, unit ? element("small", "", unit) : null),
      element("div", "basis", note));
  };
  const value = (found, write) => found.value === null ? null : write(found.value);
  const peaks = F.classes.filter((one) => one.peak_bytes !== null);
  const peak = peaks.length ? peaks.reduce((a, b) => b.peak_bytes > a.peak_bytes ? b : a) : null;
  const range = F.high_ns > F.low_ns
    ? `; ${formatNs(F.low_ns)} to ${formatNs(F.high_ns)} with what is not measured` : "";
  at("cards").append(
    card("iteration", formatNs(F.iteration_ns), (basis() || "nothing takes time") + range),
    card("computing", percent(F.computing), "of all ranks' time"),
    card("exposed", percent(F.exposed), "communication that nothing hides"),
    card("bubble", percent(F.bubble), "waiting for others, or idle"),
    ...(F.host === null ? [] : [card("host", percent(F.host), "of the critical path: GPUs wait for Python")]),
    card("tokens per second", value(F.tokens_per_s, (v) => round(v, 6)), F.tokens_per_s.basis),
    card("per GPU", value(F.flops_per_gpu, (v) => `${round(v / 1e12)} TFLOP/s`), F.flops_per_gpu.basis),
    card("MFU", value(F.mfu, percent), F.mfu.basis),
    card("most live memory", peak ? formatBytes(peak.peak_bytes) : null, peak ? peak.name : "the slices recorded no allocations"));
}

// ---- panels
function parts(one) {
  const found = [["compute", one.compute, "var(--forward)"]];
  for (const group of Object.keys(F.exposed_by_group)) found.push([`exposed ${group}`, one.exposed[group] || 0, groupColour(group)]);
  for (const group of Object.keys(F.waiting_by_group)) found.push([`waiting ${group}`, one.waiting[group] || 0, groupColour(group), "waits"]);
  return found;
}

function breakdown() {
  const groups = [...new Set([...Object.keys(F.exposed_by_group), ...Object.keys(F.waiting_by_group)])];
  const bars = F.classes.map((one) => ({ name: one.name, total: one.total, parts: parts(one), note: `${one.count.toLocaleString("en-US")} ranks` }));
  const rows = F.classes.map((one) => {
    const sum = (by) => Object.values(by).reduce((a, b) => a + b, 0);
    return [one.name, one.ranks, one.count.toLocaleString("en-US"), formatNs(one.compute), formatNs(sum(one.exposed)), formatNs(sum(one.waiting)),
      formatNs(one.idle), formatNs(one.total), formatNs(one.critical), formatNs(one.slack)];
  });
  at("breakdown").append(element("h2", "", "Where each rank's iteration went"),
    element("p", "quiet", "The main stream of one rank of each class. Striped: waiting for other ranks to come to a call. Empty: idle."),
    stack(bars),
    legend([["compute", "var(--forward)"], ...groups.map((group) => [group, groupColour(group)])]),
    table(["class", "ranks", "count", "compute", "exposed", "waiting", "idle", "total", "compute on critical path", "least slack"], rows, [1]), more());
}

function more() {
  const hidden = F.all_classes - F.classes.length;
  return element("p", "quiet", hidden ? `… and ${hidden} classes more: prism replay --json has them all.` : "");
}

function critical() {
  const total = F.path.reduce((sum, part) => sum + part.ns, 0) || 1;
  const most = Math.max(1, ...F.path.map((part) => part.ns));
  const colour = (part) => part.group ? groupColour(part.group) : `var(--${PHASES.includes(part.phase) ? part.phase : "outside"})`;
  const rows = F.path.map((part) => [`${part.phase} ${part.what}`, part.group, element("div", "share", meter(part.ns / most, colour(part))),
    percent(part.ns / total), formatNs(part.ns), part.count.toLocaleString("en-US"), badge(part.source)]);
  at("critical").append(element("h2", "", "What the critical path is made of"),
    element("p", "quiet", `${F.path.reduce((sum, part) => sum + part.count, 0).toLocaleString("en-US")} steps, one after the other, add up to the iteration. Tick “critical path” in the pipeline to see its way through the classes.`),
    table(["step", "group", "", "share", "time", "steps", "times are"], rows, [1, 2]));
}

function collectives() {
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
  at("collectives").append(element("h2", "", "What is not hidden, by group"),
    element("p", "quiet", "The main stream stood still; the mean over all ranks."),
    table(["group", "exposed", "waiting", "of the iteration"], exposed),
    element("h2", "", "Calls of one rank in an iteration"),
    element("p", "quiet", "The mean over the ranks that make them. Solid: data move. Striped: ready, but others have not come (also where that is hidden). Bytes are messages as nccl-tests counts them; GB/s is bytes over the time in which they move."),
    table(["call", "group", "ranks", "calls", "bytes", "", "moves", "waits", "rate", "times are"], rows, [1, 5]));
}

function memory() {
  const canvas = element("canvas", ""), chart = new MemoryChart(canvas);
  const none = F.classes.every((one) => one.peak_bytes === null);
  const rows = F.classes.map((one) => [one.name, one.ranks, one.peak_bytes === null ? "unknown" : formatBytes(one.peak_bytes)]);
  at("memory").append(element("h2", "", "Live memory of one rank of each class"),
    element("p", "quiet", none ? "unknown: the slices recorded no allocations." :
      "Live bytes of tensors, at the time of the op that follows the allocation; the allocator reserves more."));
  if (!none) at("memory").append(canvas, legend(chart.curves.map((curve, place) => [curve.name, chart.colour(place)])));
  at("memory").append(table(["class", "ranks", "peak"], rows, [1]));
  return chart;
}

function provenance() {
  const busy = F.sources.reduce((sum, source) => sum + source.busy_ns, 0) || 1;
  const rows = F.sources.map((source) => [badge(source.text), source.text.replace(/^\w+: /, ""), percent(source.path_ns / TOTAL), percent(source.busy_ns / busy)]);
  const about = Object.entries(F.source).map(([key, value]) => [key, value]);
  at("provenance").append(element("h2", "", "Where the times are from"),
    table(["", "source", "of the critical path", "of all busy time"], rows, [1]),
    element("h2", "", "Where the programs are from"),
    table(["", ""], about.length ? about : [["unknown", "the programs do not say"]], [1]),
    element("h2", "", "What is assumed"),
    element("p", "", "The host issues ahead without limit except where Megatron waits for the device. Links are not contended. Kernels and calls do not slow each other. All ranks of a class are equally fast."),
    element("p", "quiet", `Figures are of iteration ${F.iterations} of ${F.iterations}. ${DATA.merged ? `In the diagram, spans below ${formatNs(DATA.merged)} are merged.` : "The diagram shows every span."}` +
      (DATA.missing ? ` ${DATA.missing} classes are not drawn: those least on the critical path.` : "")));
}

// ---- tabs, and the address
function choose(name) {
  for (const key of Object.keys(TABS)) {
    at(key).hidden = key !== name;
    at(`tab-${key}`).setAttribute("aria-selected", String(key === name));
  }
  hideTip();
  if (name === "pipeline") diagram.draw();
  if (name === "memory") memoryChart.draw();
}

function fromAddress() {
  const [, name, start, end] = /^#\/(\w+)(?:@(\d+)-(\d+))?$/.exec(location.hash) || [];
  choose(TABS[name] ? name : "pipeline");
  if (end && Number(end) > Number(start)) diagram.show(Number(start), Number(end));
}

at("world").textContent = F.sizes;
const JOB = ["recipe", "megatron_core", "torch", "tier", "device"];  // the rest is under Provenance
at("slices").textContent = [F.world, ...JOB.filter((key) => F.source[key]).map((key) => `${key} ${F.source[key]}`)].join(" · ");
cards();
for (const [key, title] of Object.entries(TABS)) {
  const button = element("button", "", title);
  button.id = `tab-${key}`;
  button.setAttribute("role", "tab");
  button.setAttribute("aria-controls", key);
  button.addEventListener("click", () => { history.replaceState(null, "", `#/${key}`); choose(key); });
  at("tabs").append(button);
}
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
breakdown(); critical(); collectives(); provenance();
const memoryChart = memory();
diagram.onView(diagram.view);
fromAddress();
addEventListener("hashchange", fromAddress);
const redraw = () => choose(Object.keys(TABS).find((key) => !at(key).hidden));
addEventListener("resize", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
