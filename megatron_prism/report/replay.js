// A timeline, or two side by side.  #/pipeline@START-END in the address shows those ns.

const F = DATA.figures, TOTAL = Math.max(1, F.iteration_ns);
const sum = (by) => Object.values(by).reduce((a, b) => a + b, 0);

function figures() {
  const value = (found, write) => found.value === null ? null : write(found.value);
  const range = F.high_ns > F.low_ns ? `; ${formatNs(F.low_ns)} to ${formatNs(F.high_ns)}, nine times in ten` : "";
  cards([
    ["iteration", formatNs(F.iteration_ns), F.basis + range],
    ["computing", percent(F.computing), "of all ranks' time"],
    ["exposed", percent(F.exposed), "communication that nothing hides"],
    ["bubble", percent(F.bubble), "waiting for other ranks"],
    ...(F.idle < 5e-4 ? [] : [["idle", percent(F.idle), "GPUs waiting for their hosts"]]),
    ...(F.host === null || F.host < 5e-4 ? [] : [["host", percent(F.host), "of the critical path: the host launches kernels late"]]),
    ["tokens per second", value(F.tokens_per_s, (v) => round(v, 6)), F.tokens_per_s.basis],
    ["per GPU", value(F.flops_per_gpu, (v) => `${round(v / 1e12)} TFLOP/s`), F.flops_per_gpu.basis],
    ["MFU", value(F.mfu, percent), [F.mfu.basis, F.precision].filter(Boolean).join("; ")],
    ...(typeof MEMORY === "string" ? [["memory", null, MEMORY]] : memoryCards().slice(0, 1))]);
}

// ---- panels
function breakdown(section) {
  const parts = (one) => [["compute", one.compute], ...["exposed", "waiting"].flatMap((kind) =>
    Object.keys(F[`${kind}_by_group`]).map((name) => [`${kind} ${name}`, one[kind][name] || 0]))]
    .map(([what, ns]) => { const [text, ...style] = partStyle(what); return [text, ns, ...style]; });
  const bars = F.classes.map((one) => ({ name: one.name, total: one.total, parts: parts(one), note: `${count(one.count)} ranks` }));
  const rows = F.classes.map((one) => [one.name, one.ranks, count(one.count), formatNs(one.compute), formatNs(sum(one.exposed)), formatNs(sum(one.waiting)),
    formatNs(one.idle), formatNs(one.total), formatNs(one.critical), formatNs(one.slack)]);
  const hidden = F.all_classes - F.classes.length;
  section.append(heading("Where each rank's iteration went"),
    quiet("The main stream of one rank of each class. Striped: waiting for other ranks to reach a call. Empty: idle."), stack(bars), kindsLegend(),
    table(["class", "ranks", "count", "compute", "exposed", "waiting", "idle", "total", "compute on critical path", "least slack"], rows, [1]),
    quiet(hidden ? `… and ${hidden} classes more: prism replay --json has them all.` : ""));
}

function critical(section) {
  const path = F.path;
  const total = path.reduce((all, part) => all + part.ns, 0) || 1, most = Math.max(1, ...path.map((part) => part.ns));
  const colour = (part) => part.group ? groupColour(part.group) : part.what.startsWith("host") ? "var(--host)" : phaseColour(part.phase);
  const rows = path.map((part) => [`${part.phase} ${part.what}`, groupName(part.group), meters([part.ns / most, colour(part)]),
    percent(part.ns / total), formatNs(part.ns), count(part.count), badge(part.source)]);
  section.append(heading("What the critical path is made of"),
    quiet(`${count(path.reduce((all, part) => all + part.count, 0))} steps, one after the other, add up to the iteration. Tick “critical path” in the pipeline to see its way through the classes.`),
    table(["step", "group", "", "share", "time", "steps", "times are"], rows, [1, 2]));
}

function collectives(section) {
  const most = Math.max(1, ...F.calls.map((call) => call.moving + call.waiting));
  const rows = F.calls.map((call) => [call.name, groupName(call.group), count(call.ranks), round(call.calls), formatBytes(call.bytes),
    meters([call.moving / most, groupColour(call.group)], [call.waiting / most, groupColour(call.group), "waits"]),
    formatNs(call.moving), formatNs(call.waiting), call.moving ? `${round(call.bytes / call.moving, 3)} GB/s` : "", badge(call.source)]);
  const still = (name) => (F.exposed_by_group[name] || 0) + (F.waiting_by_group[name] || 0);
  const names = Object.keys({ ...F.exposed_by_group, ...F.waiting_by_group }).sort((a, b) => still(b) - still(a));
  const exposed = names.map((name) => [`${groupName(name)} (${name})`, formatNs(F.exposed_by_group[name] || 0), formatNs(F.waiting_by_group[name] || 0), percent(still(name) / TOTAL)]);
  section.append(heading("What is not hidden, by group"), quiet("Time in which the main stream was blocked, as the mean over all ranks."),
    table(["group", "exposed", "waiting", "of the iteration"], exposed), heading("Calls of one rank in an iteration"),
    quiet("The mean over the ranks that make them. Solid: data move. Striped: ready, but others have not arrived (also where that is hidden). Bytes are messages as nccl-tests counts them; the rate is bytes over the time in which they move."),
    table(["call", "group", "ranks", "calls", "bytes", "", "moves", "waits", "rate", "times are"], rows, [1, 5]));
}

function links(section) {
  const rows = F.links.map((one) => {
    const owner = F.classes.find((each) => each.index === one.owner);
    return [`${one.network ? "NIC" : "NVLinks"} ${one.into ? "into" : "out of"}`, owner ? owner.name : `class ${one.owner}`,
      meters([one.shared, "var(--dp)"], [one.busy - one.shared, "var(--other)"]), percent(one.busy), percent(one.shared)];
  });
  section.append(heading("Busy links"),
    quiet("The part of the iteration in which a link of one rank of each class moves data, alone or for several calls at once, which slow each other."),
    legend([["one call", "var(--other)"], ["several calls", "var(--dp)"]]), table(["link", "class", "", "busy", "shared"], rows, [1, 2]));
}

function sources() {
  const busy = F.sources.reduce((all, source) => all + source.busy_ns, 0) || 1, about = Object.entries(F.source);
  const rows = [...F.sources].sort((a, b) => b.path_ns - a.path_ns || b.busy_ns - a.busy_ns)
    .map((source) => [badge(source.text), source.text.replace(/^\w+: /, ""), percent(source.path_ns / TOTAL), percent(source.busy_ns / busy)]);
  const shown = (DATA.merged ? `spans below ${formatNs(DATA.merged)} are merged` : "every span is drawn") + (DATA.missing ? `, and ${DATA.missing} classes are not: those least on the critical path` : "");
  return [["Where the times are from", ["", "source", "of the critical path", "of all busy time"], rows],
    ["Where the programs are from", ["", ""], about.length ? about : [["unknown", "the programs do not say"]]],
    ["What is assumed", ["", ""], [["links", F.links.length ? "calls share the links that are named under Links" : "not contended (network=rails)"],
      ["ranks of a class", "are equally fast"], ["iteration", `${F.iterations} of ${F.iterations}; in the diagram ${shown}`]]]];
}

// ---- two replays side by side
function comparison(section) {
  const two = [DATA, DATA.other];
  const facts = [["iteration", (f) => f.iteration_ns, formatNs], ["computing", (f) => f.computing, percent], ["exposed", (f) => f.exposed, percent],
    ["bubble", (f) => f.bubble, percent], ["idle", (f) => f.idle, percent], ["tokens per second", (f) => f.tokens_per_s.value, (v) => round(v, 6)], ["MFU", (f) => f.mfu.value, percent],
    ["most memory of a rank", (f) => f.memory_bytes, formatBytes]];
  const rows = facts.map(([what, read, write]) => {
    const [a, b] = two.map((one) => read(one.figures));
    return [what, or(a, write), or(b, write), a === null || b === null || !a ? "" : write === percent ? signed(100 * (b - a), (v) => `${v.toFixed(1)} points`) : signed(b / a - 1, percent)];
  });
  section.append(heading("Both jobs"), table(["", ...two.map((one) => one.name), "difference"], [["job", ...two.map((one) => one.title), ""], ...rows], [1, 2]),
    ...DATA.notes.map((note) => element("p", "", note)), heading("The same time axis"));
  diagrams(section, two.map((one) => [`${one.name}: ${formatNs(one.figures.iteration_ns)}`, one]), Math.max(...two.map((one) => one.figures.iteration_ns)));
  section.append(heading("Where the difference is"));
  pair(section, two.map((one) => ({ name: one.name, ns: one.figures.iteration_ns, parts: one.parts })));
  for (const [title, head, cells] of DATA.tables) section.append(heading(title), table(head, cells));
}

figures();
let drawn;  // in the first tab
const pipeline = (section) => {
  if (drawn) for (const one of drawn) one.draw();
  else drawn = diagrams(section, [["", DATA]], F.iteration_ns);
};
tabs([...(DATA.other ? [["compare", "Two replays", anew(comparison)]] : []),
  ["pipeline", "Pipeline", pipeline], ["breakdown", "Breakdown", once(breakdown)], ["critical", "Critical path", once(critical)],
  ["collectives", "Communication", once(collectives)], ...(F.links.length ? [["links", "Links", once(links)]] : []), ["memory", "Memory", memory], provenance(...sources()),
  reading("pipeline", "class", "computing, exposed, waiting, idle", "bubble", "critical path", "least slack", "allocated, reserved, device", "categories of memory", "measured, modelled")], () => {
  const [, start, end] = /@(\d+)-(\d+)$/.exec(location.hash) || [];
  if (drawn && end && Number(end) > Number(start)) drawn[0].show(Number(start), Number(end));
});
