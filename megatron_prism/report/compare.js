// An iteration predicted and real: timelines above each other, and where they differ.

cards([["predicted", formatNs(DATA.predicted), ""], ["real", formatNs(DATA.real), "mean of the iterations in the traces"],
  ["difference", signed(DATA.error, percent), "predicted against real"],
  ["variation", signed(DATA.replayed - DATA.real, formatNs), "the traces with every time at its mean, against themselves"]]);

function timelines(section) {
  const to = Math.max(DATA.predicted, DATA.replayed);
  for (const one of DATA.ranks) {
    section.append(heading(`Rank ${one.rank}`));
    const plot = new Plot(section, `rank ${one.rank}: predicted and real`, { height: 240,
      x: { from: 0, to, write: formatNs, title: "time" }, y: { from: 0, to: 4, ticks: [3, 1], write: (row) => row > 2 ? "predicted" : "real" } });
    const bar = (from, until, row, fill, opacity) => plot.add(svg("rect", { x: plot.X(from), y: plot.Y(row + 0.4),
      width: Math.max(0.4, plot.X(until) - plot.X(from)), height: plot.Y(row) - plot.Y(row + 0.4), fill, opacity }));
    for (const [row, spans] of [[3, one.predicted], [1, one.real]]) {
      for (const [computes, ready, start, end] of spans) {
        const low = computes ? row : row - 0.45, fill = computes ? "var(--forward)" : "var(--tp)";
        if (ready < start) bar(ready, start, low, fill, 0.3);
        bar(start, end, low, fill, 1);
      }
    }
  }
  section.append(legend([["computing", "var(--forward)"], ["calls", "var(--tp)"], ["waiting for others", "var(--tp)", "pale"]]));
}

function differences(section) {
  for (const [title, head, rows] of DATA.tables) section.append(heading(title), table(head, rows));
  for (const note of DATA.notes) section.append(quiet(`Note: ${note}`));
}

tabs([["timelines", "Timelines", anew(timelines)], ["differences", "Where they differ", once(differences)],
  reading("predicted and real", "variation")]);
