"use strict";
// The shell of every page: numbers, elements, colours, details, cards, tabs and search.  Labels are
// hostile: they only ever become text nodes.

const DATA = JSON.parse(document.getElementById("data").textContent);

function round(value, digits = 4) {
  const places = Math.max(0, digits - Math.max(1, Math.ceil(Math.log10(Math.abs(value) || 1))));
  return value.toLocaleString("en-US", { maximumFractionDigits: places });
}

function formatNs(ns) {
  const units = [[1e9, "s"], [1e6, "ms"], [1e3, "us"], [1, "ns"]];
  const [scale, name] = units.find(([scale]) => Math.abs(ns) >= scale) || units[3];
  return `${round(ns / scale)} ${name}`;
}

function formatBytes(bytes) {
  const names = ["B", "KiB", "MiB", "GiB", "TiB"];
  const place = bytes < 1 ? 0 : Math.min(4, Math.floor(Math.log2(bytes) / 10));
  return `${round(bytes / 1024 ** place)} ${names[place]}`;
}

function signed(value, write) {  // what is written as zero has no sign
  const text = write(Math.abs(value));
  return `${/[1-9]/.test(text) ? value > 0 ? "+" : "−" : ""}${text}`;
}

const count = (number) => number.toLocaleString("en-US");
const or = (value, write) => value === null || value === undefined ? "unknown" : write(value);
const percent = (part) => `${(100 * part).toFixed(1)} %`;

// element("td", "text", "words", child, …): strings become text, never markup
function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const at = (id) => document.getElementById(id);
const quiet = (text) => element("p", "quiet", text);
const heading = (text) => element("h2", "", text);
function button(text, act, title = "") {
  const made = element("button", "", text);
  made.title = title;
  made.addEventListener("click", act);
  return made;
}

// where a figure is from: measured, modelled, …
const kindOf = (source) => source.split(":")[0];
function badge(source) {
  return element("span", `badge ${["measured", "modelled"].find((k) => k === kindOf(source)) || ""}`, kindOf(source));
}

// ---- colours: one of each kind on all pages (page.css); DATA.groups: Megatron's name -> [short name, kind]
const PHASES = ["forward", "backward", "weight", "optimizer"];
const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const group = (name) => (DATA.groups || {})[name] || [name, "other"];
const groupName = (name) => group(name)[0];
const groupColour = (name) => `var(--${group(name)[1]})`;
const phaseColour = (phase) => `var(--${PHASES.includes(phase) ? phase : "other"})`;
const paint = (colour) => variable(colour.slice(6, -1));  // of var(--name), for a canvas
// "waiting TENSOR_MODEL_PARALLEL_GROUP" -> ["waiting tp", its colour, "waits"]
function partStyle(what) {
  const [kind, ...name] = what.split(" ");
  if (!name.length) return [what, `var(--${kind === "compute" ? "forward" : kind === "idle" ? "waiting" : "other"})`, ""];
  return [`${kind} ${groupName(name.join(" "))}`, groupColour(name.join(" ")), kind === "waiting" ? "waits" : ""];
}

// ---- details of what is pointed at, in a strip that covers nothing; a click pins them
const DETAILS = at("details");
let pinned = false;
function showDetails(title, ...lines) {
  if (pinned) return;
  const words = lines.filter(Boolean).map((line) => element("span", "", line));
  DETAILS.replaceChildren(element("b", "", title), ...words, element("i", "", "click: pin"));
  DETAILS.hidden = false;
}
function hideDetails() { if (!pinned) DETAILS.hidden = true; }
function pinDetails(...found) {
  pinned = false;
  hideDetails();
  if (!found.length) return;
  showDetails(...found);
  DETAILS.lastChild.replaceWith(button("×", () => pinDetails(), "let go (Esc)"));
  pinned = true;
}
addEventListener("keydown", (event) => { if (event.key === "Escape") pinDetails(); });
function tipOn(target, ...found) {
  target.addEventListener("pointerenter", () => showDetails(...found));
  target.addEventListener("pointerleave", hideDetails);
  target.addEventListener("click", () => pinDetails(...found));
  return target;
}

// ---- cards: [[what, number or null, note]] in rows of about the same length
function cards(all) {
  at("cards").style.setProperty("--wide", all.length > 9 ? Math.ceil(all.length / 2) : all.length);
  at("cards").style.setProperty("--row", all.length > 5 ? Math.ceil(all.length / 2) : all.length);
  for (const [what, number, note] of all) {
    const [, digits, unit] = /^(.*?)( \D+)?$/.exec(number === null ? "unknown" : number);
    at("cards").append(element("div", "card", element("div", "what", what),
      element("div", number === null ? "number unknown" : "number", digits, unit ? element("small", "", unit) : null),
      element("div", "basis", note)));
  }
}

// ---- tabs: [[key, title, draw]]; draw(section) whenever it is shown, or its width or colours change.
// #/key in the address shows a tab.  SEARCHED hear what is typed into the search field.
const SEARCHED = [];
function tabs(entries, shown = () => null) {
  let current = "";
  const search = element("input", "");
  Object.assign(search, { type: "search", placeholder: "search", ariaLabel: "search" });
  const filter = () => {
    const words = search.value.trim().toLowerCase();
    for (const row of at(current).querySelectorAll("tbody tr")) row.hidden = !row.textContent.toLowerCase().includes(words);
    for (const hear of SEARCHED) hear(words);
  };
  search.addEventListener("input", filter);
  search.addEventListener("keydown", (event) => { if (event.key === "Enter") for (const hear of SEARCHED) hear(search.value.trim().toLowerCase(), true); });
  const choose = (name) => {
    if (name !== current) pinDetails();
    current = entries.some(([key]) => key === name) ? name : entries[0][0];
    for (const [key] of entries) {
      at(key).hidden = key !== current;
      at(`tab-${key}`).setAttribute("aria-selected", String(key === current));
    }
    entries.find(([key]) => key === current)[2](at(current));
    for (const one of at(current).querySelectorAll("table")) {  // a table that is too wide is a list
      one.className = "";
      const box = one.parentNode, room = box.clientWidth - 2 * parseFloat(getComputedStyle(box).paddingLeft);
      if (one.offsetWidth > room + 1) one.className = "listed";
    }
    filter();
  };
  const fromAddress = () => { choose((/^#\/(\w+)/.exec(location.hash) || [])[1]); shown(); };
  for (const [key, title] of entries) {
    const section = element("section", "panel");
    section.id = key;
    section.setAttribute("role", "tabpanel");
    at("sections").append(section);
    const tab = button(title, () => { history.replaceState(null, "", `#/${key}`); choose(key); });
    tab.id = `tab-${key}`;
    tab.setAttribute("role", "tab");
    tab.setAttribute("aria-controls", key);
    at("tabs").append(tab);
  }
  at("tabs").append(search);
  fromAddress();
  addEventListener("hashchange", fromAddress);
  addEventListener("resize", () => choose(current));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => choose(current));
}
// a section that is made anew when it is drawn, and one that is made once
const anew = (make) => (section) => { section.replaceChildren(); make(section); };
const once = (make) => (section) => { if (!section.children.length) make(section); };
// the last two tabs: what figures rest on ([[what, where from]]), and what words mean
const provenance = (...tables) => ["provenance", "Provenance", once((section) => {
  for (const [title, head, rows] of tables) section.append(heading(title), table(head, rows, head.map((_, i) => i)));
})];
const reading = (...terms) => ["reading", "How to read this", once((section) => {
  section.append(element("dl", "prose", ...[...terms, "unknown"].flatMap((term) => [element("dt", "", term), element("dd", "", TERMS[term])])));
})];
