// Snapshots of processes beside the slices of their job, or beside earlier ones: DATA.answers by process.

const ANSWERS = Object.entries(DATA.answers), GROWTH = "grown" in ANSWERS[0][1];
const bytes = (value) => signed(value, formatBytes);
const whole = (part, all) => percent(part / Math.max(1, all));
const off = ([, one]) => GROWTH ? one.leaking : one.real - one.common;
const [WORST, FOUND] = ANSWERS.reduce((a, b) => off(b) > off(a) ? b : a), OF = WORST ? ` of ${WORST}` : "";

function growth(section) {
  const head = ["category", "module", "line", "tensors", ...FOUND.by[0]?.steps.map((_, i) => `step ${i + 1}`) ?? [], "together", "an iteration"];
  section.append(heading(`What the process${OF} holds more`), quiet(FOUND.iterations.length ? `Iterations ${FOUND.iterations.join(", ")}.` : "The iterations are not known."),
    table(head, FOUND.by.map((one) => [category(one.kind), one.module, one.site, signed(one.count, count), ...one.steps.map(bytes), bytes(one.num_bytes),
      one.per_iteration === null ? "" : bytes(one.per_iteration)]), [0, 1, 2]));
}

function alignment(section) {
  const rows = Object.entries(FOUND.by_category).filter(([, [a, b]]) => a || b).map(([kind, pair]) => [category(kind), ...pair]);
  section.append(heading(`The peak${OF}`), quiet(`Beside the slices of rank ${FOUND.rank}.`), table(["category", "real", "slices", "slices − real"],
    [...rows, ["all", FOUND.real, FOUND.emulated]].map(([name, a, b]) => [name, formatBytes(a), formatBytes(b), bytes(b - a)]), [0]), heading("The first difference"));
  const only = [["real", FOUND.only_real], ["slices", FOUND.only_emulated]].flatMap(([whose, all]) => all.map((one) => [whose, one.step, one.site || "no Python frame", formatBytes(one.num_bytes)]));
  section.append(only.length ? table(["only in", "step", "line", "bytes"], only, [0, 1, 2]) : quiet("Every large request comes in the same order."));
}

function processes(section) {
  section.append(GROWTH ? table(["process", "holds more", "of it lines that grow each time"], ANSWERS.map(([name, one]) => [name, bytes(one.grown), bytes(one.leaking)]), [0])
    : table(["process", "real", "slices", "of rank", "in both", "in order"], ANSWERS.map(([name, one]) =>
      [name, formatBytes(one.real), formatBytes(one.emulated), String(one.rank), whole(one.common, one.real), whole(one.aligned, one.asked)]), [0]));
}

cards(GROWTH ? [["holds more", bytes(FOUND.grown), WORST], ["lines that grow each time", bytes(FOUND.leaking), "a leak, if it goes on"]]
  : [["real peak", formatBytes(FOUND.real), WORST], ["peak of the slices", formatBytes(FOUND.emulated), `of rank ${FOUND.rank}`],
    ["in both", whole(FOUND.common, FOUND.real), "of the bytes at the real peak"], ["in order", whole(FOUND.aligned, FOUND.asked), "of what the iteration asks for"]]);
tabs([["compared", GROWTH ? "Growth" : "The peak", once(GROWTH ? growth : alignment)],
  ...(ANSWERS.length > 1 ? [["processes", "All processes", once(processes)]] : []), reading("categories of memory")]);
