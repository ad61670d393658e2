// A verdict on a layout: the first difference, how near each kind of value came to it, what was shrunk.

const FIRST = DATA.difference, VERDICT = DATA.same === null ? "not decided" : DATA.same ? "the same" : "another job";

cards([["verdict", VERDICT, DATA.why || DATA.run || `compared with ${DATA.other}`],
  ["first difference", FIRST ? FIRST.what : "none", FIRST ? `iteration ${FIRST.iteration}, ${FIRST.where}` : ""],
  ["gone without", DATA.culprits.join(", ") || (DATA.tried.length ? null : "not asked"), DATA.tried.length ? `tried: ${DATA.tried.join(", ")}` : ""]]);
tabs([["verdict", "Verdict", once((section) => section.append(element("pre", "", DATA.text)))],
  ["values", "Values", once((section) => section.append(
    quiet("How much of its tolerance the largest error of each kind took, in the order of execution; above 100 % is a difference."),
    table(["value", "largest error"], Object.entries(DATA.worst).map(([kind, share]) => [kind, percent(share)]), [0])))],
  ["copy", "The small copy", once((section) => section.append(
    table(["argument", "job", "copy", "why"], DATA.changes, [0, 1, 2, 3]), heading("Not checked"), quiet(DATA.not_checked)))]]);
