"use strict";
// How numbers are written, elements are made and colours are chosen.  Labels are hostile: they only
// ever become text nodes.

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

const percent = (part) => `${(100 * part).toFixed(1)} %`;

// element("td", "text", "words", child, …): strings become text, never markup
function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
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
  const place = DATA.lanes.indexOf(group);
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
