// A verdict on a hang: who stopped the job, who waits for whom, the evidence, all victims.

const [CULPRITS, DIRECT, OTHERS] = DATA.counts, FOLDED = 6, HEALTHY = DATA.verdict === "healthy";
const rest = (rows, most) => rows.length > most ? [quiet(`… and ${count(rows.length - most)} calls more`)] : [];

function figures() {
  const who = DATA.culprits.map((one) => one.ranks).join(", ") || (HEALTHY ? "nobody" : DATA.candidates ? `one of ${DATA.candidates}` : null);
  cards([[CULPRITS ? "stopped the job" : HEALTHY ? "waits in vain" : "not named for sure", who, DATA.culprits.map((one) => one.kind).join(", ") || DATA.verdict],
    ["direct victims", count(DIRECT), "in the call that cannot end, or waiting for a culprit"],
    ["other victims", count(OTHERS), "wait for ranks that wait themselves"],
    ["confidence", DATA.confidence, DATA.confirmed === null ? "" : DATA.confirmed ? "confirmed on the programs" : "not confirmed on the programs"]]);
}

// ---- culprits <- direct victims <- the others
function picture(section) {
  const box = (className, title, ...lines) => element("div", `who ${className}`, element("b", "", title), ...lines.map((line) => element("div", "", line)));
  const waiting = (column) => element("div", "waiting", element("div", "quiet", "← wait for"), column);
  const victims = (rows, most) => [...rows.slice(0, most).map(([ranks, call]) => box("", short(ranks), call)), ...rest(rows, most)];
  const columns = [element("div", "column", ...DATA.culprits.map((one) => box("culprit", one.ranks, one.kind)))];
  if (DATA.direct.length) columns.push(waiting(element("div", "column", ...victims(DATA.direct, FOLDED))));
  if (DATA.others.length) {
    const folded = element("details", "who", element("summary", "", element("b", "", `${count(OTHERS)} ranks more`), ` in ${count(DATA.others.length)} calls`));
    folded.append(...victims(DATA.others, 24));
    columns.push(waiting(element("div", "column", folded)));
  }
  section.append(element("div", "chain", ...columns));
}

// a list of ranks that fits in a box
const short = (ranks) => `${/[,-]/.test(ranks) ? "ranks" : "rank"} ${ranks.length > 60 ? `${ranks.slice(0, 58)} …` : ranks}`;
const lines = (all) => element("pre", "", all.join("\n"));

function waits(section) {
  if (HEALTHY) section.append(quiet("Every call in which a rank waits can end."));
  if (DATA.call) section.append(element("p", "", "The call: ", element("code", "", DATA.call), DATA.site ? " at " : "", element("code", "", DATA.site)));
  if (DATA.culprits.length) picture(section);
  if (DATA.evidence.length) section.append(heading("Evidence"), lines(DATA.evidence));
  if (!DATA.culprits.length && DIRECT + OTHERS) section.append(heading("Who waits"), list([...DATA.direct, ...DATA.others]));
}

const list = (rows) => table(["ranks", "wait in", "for"], rows, [0, 1, 2]);
function victims(section) {
  for (const [title, rows] of [["Direct victims", DATA.direct], ["Other victims", DATA.others]])
    if (rows.length) section.append(heading(title), list(rows));
}

function more(section) {
  for (const [title, all] of DATA.sections) section.append(heading(title), lines(all));
}

figures();
tabs([["waits", "Who waits for whom", once(waits)], ...(DIRECT + OTHERS ? [["victims", "All victims", once(victims)]] : []),
  ...(DATA.sections.length ? [["more", "More evidence, and next time", once(more)]] : []),
  reading("culprit", "direct and other victims", "#3 of a group", "confidence", "watchdog")]);
