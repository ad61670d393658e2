"use strict";
// The shell of every page: numbers, elements, colours, tips, cards and tabs.  Labels are hostile: they
// only ever become text nodes.

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

// the next of 1, 2, 5, 10, 20, …
function niceStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((m) => m * power).find((step) => step >= rough);
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
const kindOf = (source) => source.split(":")[0];

// where a figure is from: measured, modelled, …
function badge(source) {
  return element("span", `badge ${["measured", "modelled"].find((k) => k === kindOf(source)) || ""}`, kindOf(source));
}

const GROUP_COLOURS = ["#cf4f68", "#dd8452", "#b65fa8", "#7d9440", "#4f9fb0", "#9a7355", "#c9a227",
  "#8476c4", "#d98aa0", "#5f7fa8", "#a3502f", "#5fa777", "#9aa04a", "#7a5c99"];
const PHASES = ["forward", "backward", "weight", "optimizer"];

function variable(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function palette() {
  const found = {};
  for (const name of [...PHASES, "outside", "ink", "quiet", "line", "card", "bg", "accent", "path"])
    found[name] = variable(name);
  return found;
}

const phaseColour = (colours, phase) => colours[PHASES.includes(phase) ? phase : "outside"];
function groupColour(group) {
  const place = (DATA.groups || DATA.lanes).indexOf(group);
  return GROUP_COLOURS[Math.max(0, place) % GROUP_COLOURS.length];
}

// ---- the tip that follows the pointer
const TIP = document.getElementById("tip");
function showTip(event, title, ...lines) {
  TIP.replaceChildren(element("b", "", title), ...lines.filter(Boolean).map((l) => element("div", "", l)));
  TIP.hidden = false;
  const box = TIP.getBoundingClientRect();
  TIP.style.left = `${Math.max(8, Math.min(event.clientX + 14, innerWidth - box.width - 8))}px`;
  const below = event.clientY + 18;
  TIP.style.top = `${below + box.height > innerHeight ? event.clientY - box.height - 12 : below}px`;
}
function hideTip() { TIP.hidden = true; }
function tipOn(target, title, ...lines) {
  target.addEventListener("pointermove", (event) => showTip(event, title, ...lines));
  target.addEventListener("pointerleave", hideTip);
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

// ---- tabs: [[key, title, draw, …]]; draw(section) whenever it is shown or its width or colours change.
// #/key in the address shows a tab.
function tabs(entries, shown = () => null) {
  const choose = (name) => {
    const known = entries.some(([key]) => key === name) ? name : entries[0][0];
    for (const [key, , draw] of entries) {
      at(key).hidden = key !== known;
      at(`tab-${key}`).setAttribute("aria-selected", String(key === known));
      if (key === known && draw) draw(at(key));
    }
    hideTip();
  };
  const fromAddress = () => { choose((/^#\/(\w+)/.exec(location.hash) || [])[1]); shown(); };
  const redraw = () => choose(entries.find(([key]) => !at(key).hidden)[0]);
  for (const [key, title] of entries) {
    if (!at(key)) {
      const made = element("section", "panel");
      made.id = key;
      at("sections").append(made);
    }
    at(key).setAttribute("role", "tabpanel");
    const button = element("button", "", title);
    button.id = `tab-${key}`;
    button.setAttribute("role", "tab");
    button.setAttribute("aria-controls", key);
    button.addEventListener("click", () => { history.replaceState(null, "", `#/${key}`); choose(key); });
    at("tabs").append(button);
  }
  fromAddress();
  addEventListener("hashchange", fromAddress);
  addEventListener("resize", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}
// a section that is made anew when it is drawn, and one that is made once
const anew = (make) => (section) => { section.replaceChildren(); make(section); };
const once = (make) => (section) => { if (!section.children.length) make(section); };
