"use strict";

// Numbers, names and elements. All text reaches the page through textContent.

const MISSING = "\u2013";
const ONE_DIGIT = { minimumFractionDigits: 1, maximumFractionDigits: 1 };

/** Reads a field as a number or null. JSON has no NaN and no infinity, so they come as words. */
const numeric = (value) => (value === undefined || value === null ? null : Number(value));
const isDrawable = (value) => value !== null && Number.isFinite(value);
const isMissing = (value) => value === null || Number.isNaN(value);

const minus = (text) => text.replace(/-/g, "\u2212");

function unusual(value) {
  if (isMissing(value)) return MISSING;
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "\u2212inf";
  return null;
}

/** Formats a number with four digits, and a power of ten if zeros would hide them. */
function formatNumber(value) {
  const text = unusual(value);
  if (text !== null) return text;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3 || size >= 1e5) return minus(value.toExponential(2));
  return minus(size < 9999.5 ? String(Number(value.toPrecision(4))) : value.toFixed(0));
}

/** Formats a number with exactly four digits, so that the numbers of a column look alike. */
function formatFigure(value) {
  const size = Math.abs(value);
  if (unusual(value) !== null || size === 0) return formatNumber(value);
  if (size >= 1e-3 && size < 9999.5) return minus(value.toPrecision(4));
  return minus(value.toExponential(3));
}

const formatDecibels = (value) => unusual(value) ?? minus(value.toFixed(1));
const withUnit = (text, unit) => (text === MISSING ? text : `${text}\u00a0${unit}`);
const formatCount = (value) => unusual(value) ?? minus(value.toLocaleString("en-US"));

function formatSize(bytes) {
  let value = bytes;
  for (const unit of ["bytes", "kB", "MB", "GB"]) {
    if (Math.abs(value) < 999.5) return `${Number(value.toPrecision(3))}\u00a0${unit}`;
    value /= 1000;
  }
  return `${formatNumber(value)}\u00a0TB`;
}

function formatDuration(seconds) {
  const text = unusual(seconds);
  if (text !== null) return text;
  if (seconds < 60) return `${Number(seconds.toPrecision(3))}\u00a0s`;
  const whole = Math.round(seconds);
  const minutes = Math.floor(whole / 60);
  if (minutes < 60) return `${minutes}\u00a0min ${whole % 60}\u00a0s`;
  return `${Math.floor(minutes / 60)}\u00a0h ${minutes % 60}\u00a0min`;
}

const formatSeconds = (value) =>
  withUnit(unusual(value) ?? value.toLocaleString("en-US", ONE_DIGIT), "s");

function formatShare(share) {
  if (share === 0) return "none";
  const percent = 100 * share;
  return percent < 0.001 ? "under 0.001\u00a0%" : `${Number(percent.toPrecision(3))}\u00a0%`;
}

const termsOf = (text) => text.toLowerCase().split(/\s+/).filter(Boolean);
const hasTerms = (text, terms) => terms.every((term) => text.includes(term));

const byId = (id) => document.getElementById(id);

/** Makes an element with a class that holds a text or other elements. */
function element(tag, className, content) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (Array.isArray(content)) made.append(...content);
  else if (content !== undefined) made.textContent = content;
  return made;
}

function fillSelect(select, choices) {
  select.replaceChildren(
    ...choices.map(([value, text]) => {
      const option = element("option", "", text);
      option.value = value;
      return option;
    }),
  );
}

const isIndex = (part) => /^\d+$/.test(part);

/** Returns the number of a module's block: the first number in its name. */
function blockOf(module) {
  const part = module.split(".").find(isIndex);
  return part === undefined ? null : Number(part);
}

/** Returns the role of a module within its block, such as self_attn.q_proj. */
function roleOf(module) {
  const parts = module.split(".");
  const last = parts.findLastIndex(isIndex);
  if (last === -1) return parts[parts.length - 1];
  if (last === parts.length - 1) return parts.map((part) => (isIndex(part) ? "*" : part)).join(".");
  return parts.slice(last + 1).join(".");
}

/** Returns the kind of every module: the last word of its role, or the role if that is unclear. */
function kindsOf(modules) {
  const roles = new Map([...modules].map((module) => [module, roleOf(module)]));
  const lastWord = (role) => role.split(".").at(-1);
  const rolesByWord = new Map();
  for (const role of roles.values()) {
    const word = lastWord(role);
    rolesByWord.set(word, (rolesByWord.get(word) ?? new Set()).add(role));
  }
  const kind = (role) => (rolesByWord.get(lastWord(role)).size === 1 ? lastWord(role) : role);
  return new Map([...roles].map(([module, role]) => [module, kind(role)]));
}
