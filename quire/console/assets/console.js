// The console of a quire server: a chat, and the engine at work.
//
// Text from models, users and the server becomes text nodes, never HTML: the page's policy forbids the latter.
// Sections: elements, server, markdown, conversation, chat, settings, attachments, engine, map, metrics, pages.
"use strict";
(() => {
const BASE = new URL("..", document.currentScript.src);  // with the prefix of a proxy

// Elements

const byId = (id) => document.getElementById(id);

/** Makes an element. Functions among the attributes are listeners; null, undefined and false leave an attribute out. */
function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const button = (text, title, onClick) => el("button", { type: "button", class: "plain", title, click: onClick }, text);

function notify(text, action = null) {
  const notice = byId("notice");
  notice.replaceChildren(text, ...(action ? [button(action[0], action[0], action[1])] : []));
  notice.hidden = !text;
}

function fold(title, body, isOpen) {
  return el("details", { class: "fold", open: isOpen }, el("summary", {}, title), body);
}

/** A store that works where the browser forbids it, too. */
function stored(storage, name, fallback) {
  try {
    return JSON.parse(storage.getItem(`quire.${name}`)) ?? fallback;
  } catch { return fallback; }
}

function store(storage, name, value) {
  try {
    storage.setItem(`quire.${name}`, JSON.stringify(value));
    return true;
  } catch { return false; }
}

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const percent = (part) => `${(100 * part).toFixed(part < 0.1 ? 1 : 0)} %`;
const count = (number) => number.toLocaleString("en", { maximumFractionDigits: 0 });

function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 1) return `${(1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  if (seconds < 100) return `${seconds.toFixed(1)} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

// Server

const keys = stored(sessionStorage, "keys", { api: "", admin: "" });

class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Sends a request with the key; throws a ServerError with the server's own message. */
async function call(path, { isAdmin = false, body = null, signal = null } = {}) {
  const key = isAdmin ? keys.admin || keys.api : keys.api || keys.admin;
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  if (body) headers["content-type"] = "application/json";
  const options = { method: body ? "POST" : "GET", headers, signal, body: body && JSON.stringify(body) };
  const response = await fetch(new URL(path, BASE), options);
  if (response.ok) return response;
  throw new ServerError(response.status, await errorText(response));
}

async function errorText(response) {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    return typeof error === "string" ? error : error.message;
  } catch { return `${response.status} ${response.statusText} ${text.slice(0, 200)}`; }
}

/** Yields the JSON of each event of a stream, up to [DONE]. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue;
      if (part === "data: [DONE]") return;
      yield JSON.parse(part.slice(6));
    }
  }
}

function askForKeys(message) {
  notify(message, ["Enter a key", openKeys]);
}

function openKeys() {
  byId("api-key").value = keys.api;
  byId("admin-key").value = keys.admin;
  byId("keys").showModal();
}

function useKeys() {
  if (byId("keys").returnValue !== "ok") return;
  keys.api = byId("api-key").value.trim();
  keys.admin = byId("admin-key").value.trim();
  store(sessionStorage, "keys", keys);
  notify("");
  loadModels();
  engine.restart();
}

// Markdown: a text's blocks and spans as DOM nodes. Every search is bounded, so time is linear in the text.

const REACH = 4000;  // Longest span.
const MAX_DEPTH = 12;  // Of nested blocks and spans; deeper ones stay text.
const IMAGE = /^data:image\/(?:png|jpeg|gif|webp);base64,[A-Za-z0-9+/]+=*$/;
const FENCE = /^ {0,3}(`{3,}|~{3,}) *([^`\s]*)/;
const HEADING = /^ {0,3}(#{1,6})(?: +(.*))?$/;
const RULE = /^ {0,3}(?:(?:\* *){3,}|(?:- *){3,}|(?:_ *){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +|$)/;
const DELIMITERS = /^ *\|?(?: *:?-+:? *\|)+(?: *:?-+:? *)?$/;

function renderMarkdown(text) {
  const fragment = document.createDocumentFragment();
  fragment.append(...blocks(text.replace(/\r\n?/g, "\n").split("\n"), 0));
  return fragment;
}

function blocks(lines, depth) {
  const nodes = [];
  for (let i = 0; i < lines.length;) {
    if (!lines[i].trim()) { i++; continue; }
    const read = depth < MAX_DEPTH ? READERS.find((reader) => reader.starts(lines, i)) : null;
    const [node, next] = (read ? read.read : paragraph)(lines, i, depth);
    nodes.push(node);
    i = next;
  }
  return nodes;
}

function paragraph(lines, start, depth) {
  let end = start + 1;
  const goesOn = () => lines[end].trim() && (depth >= MAX_DEPTH || !READERS.some((reader) => reader.starts(lines, end)));
  while (end < lines.length && goesOn()) end++;
  return [el("p", {}, ...spans(lines.slice(start, end).join("\n").trim())), end];
}

function fencedCode(lines, start) {
  const [, fence, language] = FENCE.exec(lines[start]);
  let end = start + 1;
  const closes = (line) => line.trim().startsWith(fence) && !line.trim().replaceAll(fence[0], "");
  while (end < lines.length && !closes(lines[end])) end++;
  return [codeBlock(lines.slice(start + 1, end).join("\n"), language), end + 1];
}

function codeBlock(code, language) {
  const bar = el("div", { class: "bar" }, language.slice(0, 40) || "text", el("span", { class: "grow" }), copyButton(() => code));
  return el("div", { class: "code" }, bar, el("pre", {}, el("code", {}, code)));
}

function copyButton(text) {
  return button("Copy", "Copy", async (event) => {
    const { target } = event;
    try {
      await navigator.clipboard.writeText(text());
      target.textContent = "Copied";
    } catch { target.textContent = "Not allowed"; }
    setTimeout(() => { target.textContent = "Copy"; }, 1500);
  });
}

function heading(lines, start) {
  const [, marks, text = ""] = HEADING.exec(lines[start]);
  return [el(`h${marks.length}`, {}, ...spans(text.replace(/ +#+ *$/, ""))), start + 1];
}

function quote(lines, start, depth) {
  let end = start;
  while (end < lines.length && QUOTE.test(lines[end])) end++;
  const inner = lines.slice(start, end).map((line) => line.replace(QUOTE, ""));
  return [el("blockquote", {}, ...blocks(inner, depth + 1)), end];
}

function list(lines, start, depth) {
  const [, indent, mark] = ITEM.exec(lines[start]);
  const isOrdered = /\d/.test(mark);
  const node = el(isOrdered ? "ol" : "ul", { start: isOrdered && parseInt(mark, 10) !== 1 ? parseInt(mark, 10) : null });
  let i = start;
  while (i < lines.length) {
    const item = ITEM.exec(lines[i]);
    if (!item || item[1].length > indent.length + 1 || /\d/.test(item[2]) !== isOrdered || RULE.test(lines[i])) break;
    const end = itemEnd(lines, i, item);
    node.append(listItem(lines.slice(i, end), item[0].length, depth));
    i = end;
    while (i < lines.length && !lines[i].trim() && ITEM.test(lines[i + 1] ?? "")) i++;
  }
  return [node, Math.max(i, start + 1)];
}

/** Index of the first line behind an item: its lines are indented, or go on with its paragraph. */
function itemEnd(lines, start, item) {
  const depth = item[1].length + 2;
  let end = start + 1;
  for (; end < lines.length; end++) {
    const indent = lines[end].search(/\S/);
    if (indent >= depth) continue;
    if (indent < 0) {
      if ((lines[end + 1] ?? "").search(/\S/) >= depth) continue;
      break;
    }
    if (!lines[end - 1].trim() || READERS.some((reader) => reader.starts(lines, end))) break;
  }
  return end;
}

function listItem(lines, width, depth) {
  const rest = lines.slice(1).map((line) => line.slice(Math.min(width, Math.max(line.search(/\S/), 0))));
  const nodes = blocks([lines[0].slice(width), ...rest], depth + 1);
  const isTight = nodes.length && nodes[0].tagName === "P" && nodes.filter((node) => node.tagName === "P").length === 1;
  return el("li", {}, ...(isTight ? [...nodes[0].childNodes, ...nodes.slice(1)] : nodes));
}

function table(lines, start) {
  let end = start + 2;
  while (end < lines.length && lines[end].includes("|")) end++;
  const row = (line, tag) => el("tr", {}, ...cells(line).map((text) => el(tag, {}, ...spans(text))));
  const body = lines.slice(start + 2, end).map((line) => row(line, "td"));
  return [el("table", {}, el("thead", {}, row(lines[start], "th")), el("tbody", {}, ...body)), end];
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((text) => text.trim());

const READERS = [
  { starts: (lines, i) => FENCE.test(lines[i]), read: fencedCode },
  { starts: (lines, i) => HEADING.test(lines[i]), read: heading },
  { starts: (lines, i) => RULE.test(lines[i]), read: (lines, i) => [el("hr"), i + 1] },
  { starts: (lines, i) => QUOTE.test(lines[i]), read: quote },
  { starts: (lines, i) => ITEM.test(lines[i]), read: list },
  { starts: (lines, i) => lines[i].includes("|") && DELIMITERS.test(lines[i + 1] ?? ""), read: table },
];

/** Nodes of a paragraph's text. */
function spans(text, depth = 0) {
  const nodes = [];
  let plain = "";
  for (let i = 0; i < text.length;) {
    const found = depth < MAX_DEPTH ? SPANS[text[i]]?.(text, i, depth) : null;
    if (found) {
      if (plain) nodes.push(plain);
      plain = "";
      nodes.push(...found[0]);
      i = found[1];
    } else plain += text[i++];
  }
  if (plain) nodes.push(plain);
  return nodes;
}

/** Index of `mark` after `from`, at most REACH away; -1 if there is none. */
function find(text, mark, from) {
  const place = text.slice(from, from + REACH).indexOf(mark);
  return place < 0 ? -1 : from + place;
}

function codeSpan(text, i) {
  const marks = /^`+/.exec(text.slice(i, i + 16))[0];
  const end = find(text, marks, i + marks.length);
  if (end < 0) return [[marks], i + marks.length];
  return [[el("code", {}, text.slice(i + marks.length, end).trim() || " ")], end + marks.length];
}

function emphasis(text, i, depth) {
  const mark = text[i + 1] === text[i] ? text[i] + text[i] : text[i];
  const from = i + mark.length;
  const isWord = text[i] === "_" && /\w/.test(text[i - 1] ?? "");
  const end = isWord || /[\s]|^$/.test(text[from] ?? "") ? -1 : find(text, mark, from + 1);
  if (end < 0 || /\s/.test(text[end - 1])) return [[mark], from];
  return [[el(mark.length === 2 ? "strong" : "em", {}, ...spans(text.slice(from, end), depth + 1))], end + mark.length];
}

function strike(text, i, depth) {
  const end = text[i + 1] === "~" ? find(text, "~~", i + 2) : -1;
  return end < 0 ? null : [[el("s", {}, ...spans(text.slice(i + 2, end), depth + 1))], end + 2];
}

/** Link or image: [label, target, index behind it]. */
function bracketed(text, i) {
  const middle = find(text, "](", i + 1);
  if (middle < 0) return null;
  const isImage = text.startsWith("data:image/", middle + 2);
  const end = isImage ? text.indexOf(")", middle) : find(text, ")", middle);
  return end < 0 ? null : [text.slice(i + 1, middle), text.slice(middle + 2, end).trim().split(/\s/)[0], end + 1];
}

function link(text, i, depth) {
  const found = bracketed(text, i);
  return found && [[anchor(found[1], spans(found[0], depth + 1))], found[2]];
}

/** Images come from the text itself: one from elsewhere would tell its server what was said. */
function image(text, i) {
  const found = text[i + 1] === "[" ? bracketed(text, i + 1) : null;
  if (!found) return null;
  const [label, source, end] = found;
  return [[IMAGE.test(source) ? el("img", { src: source, alt: label }) : anchor(source, [`[image: ${label || source}]`])], end];
}

function anchor(target, children) {
  const href = safeUrl(target);
  if (!href) return el("span", {}, ...children, target ? ` (${target})` : "");
  return el("a", { href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}

/** The URL, if it is absolute and of a scheme that runs nothing. */
function safeUrl(text) {
  try {
    const url = new URL(text);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch { return null; }
}

function bareLink(text, i) {
  const match = /\w/.test(text[i - 1] ?? "") ? null : /^https?:\/\/[^\s<>"'`]+/.exec(text.slice(i, i + REACH));
  if (!match) return null;
  const url = match[0].replace(/[).,;:!?\]*_]+$/, "");
  return [[anchor(url, [url])], i + url.length];
}

function angle(text, i) {
  const match = /^<(?:(br *\/?)|(https?:\/\/[^\s<>]+))>/i.exec(text.slice(i, i + REACH));
  return match && [[match[1] ? el("br") : anchor(match[2], [match[2]])], i + match[0].length];
}

const SPANS = {
  "`": codeSpan, "*": emphasis, "_": emphasis, "~": strike, "[": link, "!": image, "<": angle, h: bareLink,
  "\n": (text, i) => [[el("br")], i + 1],
  "\\": (text, i) => (/[!-/:-@[-`{-~]/.test(text[i + 1] ?? "") ? [[text[i + 1]], i + 2] : null),
};

// Conversation: a tree of messages. A node's `picked` child is on the path that is shown and sent.

let nodes = new Map();

const newRoot = () => ({ id: 0, parent: null, role: "root", children: [], picked: -1 });

function addNode(parent, fields) {
  const id = Math.max(...nodes.keys()) + 1;
  const node = { id, parent: parent.id, children: [], picked: -1, text: "", ...fields };
  nodes.set(id, node);
  parent.picked = parent.children.push(id) - 1;
  return node;
}

/** Nodes from the first message to the last of the branch that is shown. */
function path(until = null) {
  const found = [];
  let node = nodes.get(0);
  while (node !== until && node.children.length) {
    node = nodes.get(node.children[node.picked]);
    found.push(node);
  }
  return found;
}

const lastNode = () => path().at(-1) ?? nodes.get(0);

function pathTo(node) {
  const found = [];
  for (let one = node; one.id !== 0; one = nodes.get(one.parent)) found.unshift(one);
  return found;
}

/** A message as the API takes it. */
function asMessage(node) {
  if (node.role === "tool") return { role: "tool", tool_call_id: node.callId, content: node.text };
  if (node.role === "assistant") {
    const calls = (node.calls ?? []).map(({ id, name, input }) => ({ id, type: "function", function: { name, arguments: input } }));
    return { role: "assistant", content: node.text, ...(calls.length ? { tool_calls: calls } : {}) };
  }
  const parts = (node.files ?? []).map(asPart);
  if (!parts.length) return { role: node.role, content: node.text };
  return { role: node.role, content: [...parts, ...(node.text ? [{ type: "text", text: node.text }] : [])] };
}

function saveConversation() {
  const all = { version: 1, nodes: [...nodes.values()] };
  if (!store(sessionStorage, "chat", all)) {  // too large with its files
    all.nodes = all.nodes.map((node) => ({ ...node, files: (node.files ?? []).map((file) => ({ ...file, data: "" })) }));
    store(sessionStorage, "chat", all);
  }
}

/** Takes a saved conversation; throws if it is none. */
function takeConversation(saved) {
  const taken = new Map();
  for (const one of saved.nodes) taken.set(Number(one.id), cleanNode(one));
  if (taken.get(0)?.role !== "root") throw new Error("no root");
  for (const node of taken.values()) {
    node.children = node.children.filter((id) => taken.get(id)?.parent === node.id && id > node.id);
    node.picked = clamp(node.picked, -1, node.children.length - 1);
    if (node.children.length && node.picked < 0) node.picked = 0;
  }
  nodes = taken;
}

function cleanNode(one) {
  const role = ["root", "user", "assistant", "tool", "system"].includes(one.role) ? one.role : "user";
  const texts = Object.fromEntries(["text", "reasoning", "callId", "error", "finish"].filter((name) => one[name]).map((name) => [name, String(one[name])]));
  const calls = (one.calls ?? []).map((each) => ({ id: String(each.id), name: String(each.name), input: String(each.input) }));
  const files = (one.files ?? []).map((each) => ({ kind: String(each.kind), name: String(each.name), type: String(each.type), data: String(each.data) }));
  const parent = one.parent === null ? null : Number(one.parent);
  return { text: "", ...texts, id: Number(one.id), parent, role, calls, files, children: (one.children ?? []).map(Number), picked: Number(one.picked ?? -1) };
}

function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

function asMarkdown() {
  const title = { user: "You", assistant: "Assistant", tool: "Tool", system: "System" };
  return path().map((node) => {
    const files = (node.files ?? []).map((file) => `*${file.name}*\n\n`).join("");
    const calls = (node.calls ?? []).map((one) => `\n\n\`${one.name}(${one.input})\``).join("");
    return `## ${title[node.role]}\n\n${files}${node.text}${calls}\n`;
  }).join("\n");
}

// Chat

let running = null;  // AbortController of the answer that is being written
let models = new Map();
const modelName = () => byId("model").value;
const contextLength = () => models.get(modelName())?.max_model_len ?? 0;
const takes = (kind) => (models.get(modelName())?.architecture?.input_modalities ?? ["text"]).includes(kind);

async function loadModels() {
  try {
    const { data } = await (await call("v1/models")).json();
    models = new Map(data.map((model) => [model.id, model]));
    const picked = stored(sessionStorage, "model", data[0]?.id);
    byId("model").replaceChildren(...data.map((model) => modelOption(model, picked)));
    byId("composer-status").textContent = "";
  } catch (error) {
    if (error.status === 401) return askForKeys("This server needs an API key.");
    byId("composer-status").textContent = describe(error);
    setTimeout(loadModels, 2000);
  }
  return undefined;
}

function modelOption(model, picked) {
  const state = model.status?.value;
  const shown = model.id.split("/").at(-1) + (state && state !== "loaded" ? ` (${state})` : "");
  return el("option", { value: model.id, selected: model.id === picked, title: model.id }, shown);
}

const describe = (error) => (error instanceof TypeError ? "The server does not answer." : error.message);

function renderChat() {
  const shown = path();
  byId("messages").replaceChildren(...(shown.length ? shown.map(messageElement) : [emptyChat()]));
  showUsage(shown.findLast((node) => node.usage));
  byId("stop").hidden = !running;
  byId("send").hidden = Boolean(running);
}

function emptyChat() {
  const tries = ["What can you do?", "What is the capital of France?", "What is 12 + 30?"];
  const buttons = tries.map((text) => el("button", { type: "button", click: () => send(text) }, text));
  return el("div", { class: "empty" }, el("h1", {}, "What shall it be?"),
    "The conversation stays in this tab.", el("div", { class: "bar" }, ...buttons));
}

function messageElement(node) {
  const name = { user: "You", assistant: "Assistant", tool: "Tool result", system: "System" }[node.role];
  const element = el("article", { class: `message ${node.role}`, "data-id": node.id, "aria-label": name });
  element.append(el("div", { class: "role" }, name), el("div", { class: "content" }), el("div", { class: "tools" }));
  fillContent(element, node);
  element.lastChild.append(...messageTools(node));
  return element;
}

function fillContent(element, node) {
  const parts = [];
  if (node.files?.length) parts.push(el("div", { class: "attachments" }, ...node.files.map((file) => fileElement(file))));
  if (node.reasoning) parts.push(fold("Reasoning", el("div", {}, node.reasoning), node.isReasoning || isOpen(element, "Reasoning")));
  if (node.text || node.isWriting) parts.push(bodyElement(node));
  for (const one of node.calls ?? []) parts.push(fold(`Tool call: ${one.name}`, el("pre", {}, prettyJson(one.input)), isOpen(element, `Tool call: ${one.name}`)));
  if (node.error) parts.push(el("div", { class: "error", role: "alert" }, node.error));
  if (needsResults(node)) parts.push(resultForm(node));
  element.children[1].replaceChildren(...parts);
}

function isOpen(element, title) {
  return [...element.querySelectorAll("details[open] > summary")].some((summary) => summary.textContent === title);
}

function bodyElement(node) {
  const body = el("div", { class: `body${node.isWriting ? " cursor" : ""}` });
  if (node.role === "assistant" && node.text.length < 200_000) body.append(renderMarkdown(node.text));
  else body.append(...node.text.split("\n").flatMap((line, i) => (i ? [el("br"), line] : [line])));
  return body;
}

function prettyJson(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}

function messageTools(node) {
  if (node.isWriting) return [];
  const tools = [...branchTools(node), copyButton(() => node.text)];
  if (node.role === "user") tools.push(button("Edit", "Edit, as a new branch", () => editMessage(node)));
  if (node.role === "assistant") tools.push(button("Retry", "Another answer, as a new branch (Alt+R)", () => answer(nodes.get(node.parent))));
  if (node.speed || node.finish) tools.push(el("span", { class: "muted" }, answerFacts(node)));
  return tools;
}

function branchTools(node) {
  const { children, picked } = nodes.get(node.parent);
  if (children.length < 2) return [];
  const step = (by) => button(by < 0 ? "‹" : "›", by < 0 ? "Previous branch" : "Next branch", () => pick(node.parent, picked + by));
  return [step(-1), el("span", { class: "muted" }, `${picked + 1} / ${children.length}`), step(1)];
}

function pick(parentId, place) {
  const parent = nodes.get(parentId);
  if (running) return;
  parent.picked = (place + parent.children.length) % parent.children.length;
  saveConversation();
  renderChat();
}

function answerFacts(node) {
  const facts = [];
  if (node.usage) facts.push(`${count(node.usage.completion_tokens)} tokens`);
  if (node.speed) facts.push(`${node.speed.toFixed(1)} tokens/s`);
  if (node.firstMs) facts.push(`first after ${duration(node.firstMs / 1000)}`);
  if (node.finish && node.finish !== "stop") facts.push({ length: "cut: token limit", stopped: "stopped", tool_calls: "calls a tool" }[node.finish] ?? node.finish);
  return facts.join(" · ");
}

function showUsage(node) {
  const usage = node?.usage, length = contextLength(), line = byId("usage");
  if (!usage) return line.replaceChildren();
  const share = length ? usage.total_tokens / length : 0;
  const bar = el("i", { class: share > 0.9 ? "full" : "" });
  bar.style.width = percent(clamp(share, 0, 1)).replace(" ", "");
  const text = length ? `${count(usage.total_tokens)} of ${count(length)} tokens` : `${count(usage.total_tokens)} tokens`;
  return line.replaceChildren(el("span", { class: "meter", title: "Context used" }, bar), text, node.speed ? ` ${node.speed.toFixed(0)}/s` : "");
}

function editMessage(node) {
  if (running) return;
  const element = byId("messages").querySelector(`[data-id="${node.id}"]`);
  const area = el("textarea", { "aria-label": "Edit the message" });
  area.value = node.text;
  const apply = () => {
    const edited = addNode(nodes.get(node.parent), { role: "user", text: area.value, files: node.files });
    answer(edited);
  };
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { event.stopPropagation(); renderChat(); }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); apply(); }
  });
  element.children[1].replaceChildren(area);
  element.lastChild.replaceChildren(button("Send", "Send", apply), button("Cancel", "Cancel", renderChat));
  area.focus();
}

const needsResults = (node) => node.calls?.length && !node.isWriting && !node.children.length && lastNode() === node;

/** Form for what the called tools return: the page runs nothing itself. */
function resultForm(node) {
  const areas = node.calls.map((one) => el("textarea", { placeholder: `Result of ${one.name}`, "aria-label": `Result of ${one.name}` }));
  const submit = () => {
    let last = node;
    node.calls.forEach((one, i) => { last = addNode(last, { role: "tool", callId: one.id, text: areas[i].value }); });
    answer(last);
  };
  return el("div", {}, ...areas, el("button", { type: "button", click: submit }, "Send results"));
}

function send(text) {
  if (running || (!text.trim() && !pending.length)) return;
  const node = addNode(lastNode(), { role: "user", text, files: pending });
  pending = [];
  showPending();
  byId("draft").value = "";
  fitDraft();
  answer(node);
}

/** Lets the model answer the branch that ends with `parent`. */
async function answer(parent) {
  if (running) return;
  const body = requestBody(parent);
  if (!body) return;
  const node = addNode(parent, { role: "assistant", isWriting: true, calls: [] });
  running = new AbortController();
  renderChat();
  scrollDown(true);
  const clock = { began: performance.now(), first: 0 };
  try {
    const response = await call("v1/chat/completions", { body, signal: running.signal });
    for await (const event of events(response)) takeEvent(node, event, clock);
  } catch (error) { takeFailure(node, error); }
  running = null;
  node.isWriting = node.isReasoning = false;
  saveConversation();
  renderChat();
  scrollDown();
}

function requestBody(parent) {
  const options = settingsBody();
  if (!options) return null;
  const { system, ...rest } = options;
  const messages = pathTo(parent).map(asMessage);
  if (system) messages.unshift({ role: "system", content: system });
  return { model: modelName(), messages, ...rest, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
}

function takeEvent(node, event, clock) {
  if (event.error) throw new ServerError(event.error.code, event.error.message);
  if (event.usage) node.usage = event.usage;
  const [choice] = event.choices ?? [];
  if (choice) takeDelta(node, choice.delta ?? {}, choice.finish_reason);
  const now = performance.now();
  if (!clock.first && (node.text || node.reasoning || node.calls.length)) {
    clock.first = now;
    clock.tokens = node.usage?.completion_tokens ?? 1;
    node.firstMs = now - clock.began;
  }
  const seconds = (now - clock.first) / 1000;
  if (clock.first && seconds > 0.05) node.speed = ((node.usage?.completion_tokens ?? 0) - clock.tokens) / seconds;
  if (event.timings) node.speed = event.timings.tokens_per_s || node.speed;
  if (event.ignored?.length) node.error = `The server ignored: ${event.ignored.join(", ")}`;
  showWriting(node);
}

function takeDelta(node, delta, finish) {
  const thought = delta.reasoning ?? delta.reasoning_content;
  if (thought) node.reasoning = (node.reasoning ?? "") + thought;
  if (delta.content) node.text += delta.content;
  node.isReasoning = Boolean(node.reasoning && !node.text);
  for (const part of delta.tool_calls ?? []) {
    const one = (node.calls[part.index ?? node.calls.length] ??= { id: "", name: "", input: "" });
    one.id = part.id ?? one.id;
    one.name += part.function?.name ?? part.custom?.name ?? "";
    one.input += part.function?.arguments ?? part.custom?.input ?? "";
  }
  if (finish) node.finish = finish;
}

function takeFailure(node, error) {
  if (error.name === "AbortError") node.finish = "stopped";
  else {
    node.error = describe(error);
    if (error.status === 401) askForKeys("This server needs an API key.");
  }
}

let isDue = false;

/** Shows an answer that is being written: once per animation frame, and less often once it is long. */
function showWriting(node) {
  if (isDue) return;
  isDue = true;
  const show = () => {
    isDue = false;
    const element = byId("messages").querySelector(`[data-id="${node.id}"]`);
    if (!element || !node.isWriting) return;
    fillContent(element, node);
    showUsage(node);
    scrollDown();
  };
  if (node.text.length > 8000) setTimeout(show, node.text.length / 40);
  else requestAnimationFrame(show);
}

function scrollDown(always = false) {
  const list = byId("messages");
  if (always || list.scrollHeight - list.scrollTop - list.clientHeight < 160) list.scrollTop = list.scrollHeight;
}

function fitDraft() {
  const draft = byId("draft");
  draft.style.height = "auto";
  draft.style.height = `${Math.min(draft.scrollHeight, window.innerHeight * 0.4)}px`;
}

function newChat() {
  running?.abort();
  nodes = new Map([[0, newRoot()]]);
  saveConversation();
  renderChat();
  byId("draft").focus();
}

function retryLast() {
  const last = lastNode();
  if (last.id) answer(last.role === "assistant" ? nodes.get(last.parent) : last);
}

async function openSaved(file) {
  try {
    takeConversation(JSON.parse(await file.text()));
    saveConversation();
    renderChat();
  } catch { notify(`${file.name} is no conversation that was saved here.`, ["Close", () => notify("")]); }
}

// Settings: what is empty is left to the server.

const NUMBERS = [
  ["temperature", "Temperature", { min: 0, max: 5, step: 0.1 }],
  ["top_p", "Top-p", { min: 0, max: 1, step: 0.05 }],
  ["top_k", "Top-k", { min: -1, step: 1 }],
  ["min_p", "Min-p", { min: 0, max: 1, step: 0.05 }],
  ["max_tokens", "Most tokens", { min: 1, step: 1 }],
  ["seed", "Seed", { step: 1 }],
  ["presence_penalty", "Presence penalty", { min: -2, max: 2, step: 0.1 }],
  ["frequency_penalty", "Frequency penalty", { min: -2, max: 2, step: 0.1 }],
  ["repetition_penalty", "Repetition penalty", { min: 0.1, max: 2, step: 0.05 }],
  ["min_tokens", "Fewest tokens", { min: 0, step: 1 }],
  ["typical_p", "Typical-p", { min: 0, max: 1, step: 0.05 }],
  ["top_n_sigma", "Top-n-sigma", { step: 0.1 }],
  ["xtc_probability", "XTC probability", { min: 0, max: 1, step: 0.1 }],
  ["xtc_threshold", "XTC threshold", { min: 0, max: 0.5, step: 0.05 }],
  ["dry_multiplier", "DRY multiplier", { min: 0, step: 0.1 }],
  ["thinking_token_budget", "Thinking tokens", { min: 0, step: 1 }],
];
const JSONS = [
  ["tools", "Tools (JSON list)", '[{"type": "function", "function": {"name": …}}]'],
  ["response_format", "Response format (JSON)", '{"type": "json_object"}'],
  ["extra", "Other fields (JSON object)", '{"logit_bias": {"42": -100}}'],
];
const settings = stored(localStorage, "settings", {});

function setting(name, value) {
  if (value === "" || value === null) delete settings[name];
  else settings[name] = value;
  store(localStorage, "settings", settings);
}

/** Fields of a request; null if a field is malformed, which is shown. */
function settingsBody() {
  const body = {};
  for (const [name] of NUMBERS) if (settings[name] !== undefined) body[name] = Number(settings[name]);
  if (settings.system) body.system = settings.system;
  if (settings.stop) body.stop = settings.stop.split("\n").filter(Boolean);
  if (settings.thinking) body.enable_thinking = settings.thinking === "on";
  if (settings.effort) body.reasoning_effort = settings.effort;
  for (const [name] of JSONS) {
    const value = readJson(name);
    if (value === null) {
      showSettings(true);
      return null;
    }
    if (value !== undefined) Object.assign(body, name === "extra" ? value : { [name]: value });
  }
  return body;
}

/** The value of a JSON field: undefined if empty, null if malformed. */
function readJson(name) {
  if (!settings[name]?.trim()) return undefined;
  try {
    const value = JSON.parse(settings[name]);
    return (name === "tools") === Array.isArray(value) && typeof value === "object" ? value : null;
  } catch { return null; }
}

function field(label, control, isWide = false) {
  const id = `field-${control.name}`;
  control.id = id;
  return el("div", { class: isWide ? "field wide" : "field" }, el("label", { for: id }, label), control);
}

function renderSettings() {
  const number = ([name, label, limits]) => {
    const input = el("input", { name, type: "number", placeholder: "default", ...limits, input: () => setting(name, input.value) });
    input.value = settings[name] ?? "";
    return field(label, input);
  };
  const fields = [
    textField("system", "System prompt", "", false),
    group("Sampling", ...NUMBERS.slice(0, 9).map(number)),
    textField("stop", "Stop texts, one a line", "", false),
    group("Reasoning", choice("thinking", "Thinking", ["", "on", "off"]), choice("effort", "Effort", ["", "low", "medium", "high"])),
    group("More samplers", ...NUMBERS.slice(9).map(number)),
    ...JSONS.map(([name, label, example]) => textField(name, label, example, true)),
  ];
  byId("fields").replaceChildren(...fields);
}

const group = (title, ...fields) => el("fieldset", {}, el("legend", {}, title), ...fields);

function textField(name, label, placeholder, isJson) {
  const error = el("span", { class: "error", role: "alert" });
  const check = () => { error.textContent = isJson && readJson(name) === null ? `This must be a JSON ${name === "tools" ? "list" : "object"}.` : ""; };
  const area = el("textarea", { name, placeholder, class: isJson ? "code" : "", spellcheck: isJson ? "false" : null, input: () => { setting(name, area.value); check(); } });
  area.value = settings[name] ?? "";
  const whole = field(label, area, true);
  whole.append(error);
  check();
  return whole;
}

function choice(name, label, values) {
  const select = el("select", { name, change: () => setting(name, select.value) }, ...values.map((value) => el("option", { value }, value || "default")));
  select.value = settings[name] ?? "";
  return field(label, select);
}

function showSettings(isShown) {
  byId("settings").hidden = !isShown;
  byId("toggle-settings").setAttribute("aria-expanded", String(isShown));
  if (isShown) renderSettings();
}

// Attachments

const MAX_FILE_BYTES = 8 << 20;
const MAX_TEXT_BYTES = 256 << 10;
let pending = [];

function asPart(file) {
  if (file.kind === "image") return { type: "image_url", image_url: { url: `data:${file.type};base64,${file.data}` } };
  if (file.kind === "audio") return { type: "input_audio", input_audio: { data: file.data, format: audioFormat(file) } };
  return { type: "text", text: `File ${file.name}:\n\n${file.data}\n` };
}

const audioFormat = (file) => ({ "audio/mpeg": "mp3", "audio/x-wav": "wav", "audio/wave": "wav" })[file.type] ?? file.type.split("/")[1];

function fileElement(file, remove = null) {
  const element = el("span", { class: "file" });
  const source = `data:${file.type};base64,${file.data}`;
  if (file.kind === "image" && IMAGE.test(source)) element.append(el("img", { src: source, alt: file.name }));
  else if (file.kind === "audio" && /^data:audio\/[\w.+-]+;base64,[\w+/=]*$/.test(source)) element.append(el("audio", { src: source, controls: true }));
  else element.append(file.name);
  if (remove) element.append(button("✕", `Remove ${file.name}`, remove));
  return element;
}

async function attachFiles(files) {
  for (const file of files) {
    try { pending.push(await readFile(file)); } catch (error) { notify(error.message, ["Close", () => notify("")]); }
  }
  showPending();
}

async function readFile(file) {
  const kind = ["image", "audio"].find((one) => file.type.startsWith(`${one}/`)) ?? "text";
  if (kind !== "text" && !takes(kind)) throw new Error(`${modelName()} takes no ${kind} (${file.name}).`);
  const most = kind === "text" ? MAX_TEXT_BYTES : MAX_FILE_BYTES;
  if (file.size > most) throw new Error(`${file.name} has ${count(file.size)} bytes; ${count(most)} are the most.`);
  const data = kind === "text" ? await readText(file) : await readBase64(file);
  return { kind, name: file.name, type: file.type, data };
}

async function readText(file) {
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch { throw new Error(`${file.name} is no text (UTF-8), image or sound.`); }
}

async function readBase64(file) {
  const bytes = new Uint8Array(await file.arrayBuffer());
  let text = "";
  for (let i = 0; i < bytes.length; i += 8192) text += String.fromCharCode(...bytes.subarray(i, i + 8192));
  return btoa(text);
}

function showPending() {
  const remove = (file) => () => { pending = pending.filter((one) => one !== file); showPending(); };
  byId("attachments").replaceChildren(...pending.map((file) => fileElement(file, remove(file))));
}

// Engine: frames of the cores, polled while a page that shows them is open and visible.

const POLL_MS = 500;
const MAX_STEPS = 6000;
const REPLAY_BYTES = 48 << 20;
const REPLAY_MS = 5 * 60_000;
const MAX_STORE_CELLS = 4000;
const HELD = 1, SHARED = 2, CACHED = 4;  // Bits of a block's state.

function bytesOf(base64) {
  const text = atob(base64);
  return Uint8Array.from(text, (char) => char.charCodeAt(0));
}

const idsOf = (base64) => new Uint32Array(bytesOf(base64).buffer);

/** Numbers of requests, so that a block's holder is one number; the oldest are forgotten. */
const requestNumbers = {
  byId: new Map(), byNumber: new Map(), next: 1,
  of(row) {
    let number = this.byId.get(row.request_id);
    if (!number) {
      number = this.next++ % 65535 || this.next++ % 65535;
      this.byId.delete(this.byNumber.get(number)?.id);
      this.byId.set(row.request_id, number);
      this.byNumber.set(number, { id: row.request_id, tenant: row.tenant });
    }
    return number;
  },
};

/** Blocks of one tier of one core. */
class Tier {
  constructor() {
    this.states = new Uint8Array(0);
    this.owners = new Uint16Array(0);  // number of the last of its holders
    this.changed = new Float64Array(0);  // when the state last changed, ms
    this.ids = new Map();  // request id -> its blocks
    this.numFree = 0;
  }

  take(part, requests, field, now) {
    if (part.num_blocks !== this.states.length) {
      this.states = new Uint8Array(part.num_blocks);
      this.owners = new Uint16Array(part.num_blocks);
      this.changed = new Float64Array(part.num_blocks);
    }
    this.numFree = part.num_free;
    this.takeOwners(requests, field);
    bytesOf(part.states).forEach((state, i) => {
      const id = part.first + i;
      if (this.states[id] !== state) this.changed[id] = now;
      this.states[id] = state;
    });
  }

  takeOwners(requests, field) {
    const before = this.ids;
    this.ids = new Map(requests.map((row) => [row.request_id, row[field] === null ? before.get(row.request_id) ?? [] : idsOf(row[field])]));
    this.owners.fill(0);
    for (const row of requests) {
      const number = requestNumbers.of(row);
      for (const id of this.ids.get(row.request_id)) this.owners[id] = number;
    }
  }

  holders(id) {
    return [...this.ids].filter(([, ids]) => ids.includes(id)).map(([name, ids]) => ({ name, position: ids.indexOf(id) }));
  }
}

class Core {
  constructor() {
    this.device = new Tier();
    this.host = new Tier();
    this.frame = null;
    this.steps = [];
    this.moments = [];  // for the replay, oldest first
  }

  get lastStep() { return this.steps.at(-1)?.step_id ?? 0; }

  take(frame) {
    if (frame.number < this.frame?.number) this.steps = [];  // of a core that has been replaced
    this.steps.push(...frame.steps);
    this.steps.splice(0, this.steps.length - MAX_STEPS);
    const isNew = frame.number !== this.frame?.number;
    this.frame = frame;
    if (!isNew) return;
    const now = Date.now();
    this.device.take(frame.device, frame.requests, "device_blocks", now);
    this.host.take(frame.host, frame.requests, "host_blocks", now);
    this.remember(now);
  }

  remember(now) {
    const { states, owners, changed } = this.device;
    this.moments.push({ now, states: states.slice(), owners: owners.slice(), changed: states.length > 50_000 ? changed : Float32Array.from(changed, (one) => now - one) });
    const most = Math.max(2, Math.floor(REPLAY_BYTES / (7 * states.length || 1)));
    const tooOld = this.moments.findIndex((one) => now - one.now < REPLAY_MS);
    this.moments.splice(0, Math.max(tooOld, this.moments.length - most));
  }

  /** Sum of a field over the steps of the last seconds, per second. */
  rate(field, seconds = 3) {
    if (!this.frame) return 0;
    const since = this.frame.now - seconds;
    let sum = 0;
    for (let i = this.steps.length - 1; i >= 0 && this.steps[i].ended_s > since; i--) sum += field ? this.steps[i][field] : 1;
    return sum / seconds;
  }
}

const engine = {
  cores: [], timer: 0, isAsking: false,
  get core() { return this.cores[Number(byId("core").value || 0)] ?? this.cores[0]; },
  get isWanted() { return PAGES.includes(shownPage) && shownPage !== "chat" && !document.hidden; },

  restart() {
    clearTimeout(this.timer);
    this.timer = 0;
    if (this.isWanted && !this.isAsking) this.poll();
  },

  async poll() {
    this.isAsking = true;
    let waitMs = POLL_MS;
    try {
      const query = this.cores.map((core) => `after=${core.lastStep}`).join("&");
      const { cores } = await (await call(`console/frame?${query}`, { isAdmin: true })).json();
      waitMs = Math.max(POLL_MS, 1000 * Math.max(...cores.map((one) => one.next_s)));
      this.take(cores);
    } catch (error) {
      waitMs = 3000;
      this.fail(error);
    }
    this.isAsking = false;
    if (this.isWanted && !this.isRefused) this.timer = setTimeout(() => this.poll(), waitMs);
  },

  take(frames) {
    this.isRefused = false;
    notify("");
    while (this.cores.length < frames.length) {
      byId("core").append(el("option", {}, String(this.cores.length)));
      this.cores.push(new Core());
    }
    byId("core-label").hidden = frames.length < 2;
    frames.forEach((frame, i) => this.cores[i].take(frame));
    SHOWS[shownPage]?.();
    samples.add();
  },

  fail(error) {
    this.isRefused = error.status === 401 || error.status === 404;
    if (error.status === 401) askForKeys("This page needs the admin key.");
    else if (error.status === 404) notify("This server has no admin routes: start it with --admin-api-key to see the engine.");
    else notify(describe(error));
  },
};

const rows = () => engine.cores.flatMap((core) => core.frame?.requests ?? []);
const total = (name) => engine.cores.reduce((sum, core) => sum + (core.frame?.stats[name] ?? 0), 0);
const rate = (field) => engine.cores.reduce((sum, core) => sum + core.rate(field), 0);

function cacheShare() {
  const free = engine.cores.reduce((sum, core) => sum + core.device.numFree, 0);
  const all = engine.cores.reduce((sum, core) => sum + Math.max(core.device.states.length - 1, 0), 0);
  return all ? 1 - free / all : 0;
}

function showRequests() {
  const tiles = [
    ["Running", count(total("num_running"))], ["Waiting", count(total("num_waiting"))],
    ["Cache held", percent(cacheShare())], ["Tokens/s", count(rate("num_sampled_tokens"))],
    ["Prefill tokens/s", count(rate("num_prefill_tokens"))], ["Steps/s", count(rate(""))],
    ["Preemptions", count(total("num_preemptions"))], ["Prefix hits", percent(total("prefix_cache_hits") / (total("prefix_cache_queries") || 1))],
  ];
  byId("tiles").replaceChildren(...tiles.map(([name, value]) => el("div", { class: "tile" }, el("b", {}, value), el("span", {}, name))));
  drawTimeline();
  showRequestTable();
}

function showRequestTable() {
  const all = rows(), body = byId("request-table").tBodies[0];
  if (body.matches(":active")) return;  // a click is under way
  const open = new Set([...body.querySelectorAll("details[open]")].map((one) => one.closest("tr").dataset.id));
  const focused = document.activeElement, focusedRow = focused.closest("tr")?.dataset.id;
  const most = engine.cores.reduce((sum, core) => sum + (core.frame?.num_requests ?? 0), 0);
  byId("shown").textContent = all.length < most ? `the first ${all.length} of ${count(most)}` : "";
  const none = el("tr", {}, el("td", { colspan: 9, class: "muted" }, "No request is in flight."));
  body.replaceChildren(...(all.length ? all.map((row) => requestRow(row, open.has(row.request_id))) : [none]));
  if (focusedRow) body.querySelector(`tr[data-id="${CSS.escape(focusedRow)}"] ${focused.tagName}`)?.focus();
}

function requestRow(row, isOpen) {
  const done = clamp(row.num_computed_tokens / row.num_prompt_tokens, 0, 1);
  const bar = el("i");
  bar.style.width = `${100 * done}%`;
  const cached = row.num_cached_tokens ? `, ${count(row.num_cached_tokens)} cached` : "";
  const blocks = engine.cores.reduce((sum, core) => sum + (core.device.ids.get(row.request_id)?.length ?? 0), 0);
  return el("tr", { "data-id": row.request_id },
    el("td", { class: "name", title: row.request_id }, swatch(requestColor(requestNumbers.of(row))), shortName(row.request_id)),
    el("td", {}, row.tenant || "–"), el("td", {}, el("span", { class: `state ${row.status}` }, row.status)),
    el("td", { class: "number" }, duration(row.age_s)),
    el("td", { title: `${count(row.num_computed_tokens)} tokens computed${cached}` }, el("span", { class: "progress" }, bar), count(row.num_prompt_tokens)),
    el("td", { class: "number" }, count(row.num_output_tokens)), el("td", { class: "number" }, count(blocks)),
    el("td", { class: "why" }, waits(row, isOpen)), el("td", {}, button("Abort", "Abort this request", () => abortRequest(row))));
}

/** What a request waits for now, and in all. */
function waits(row, isOpen) {
  const now = row.shares.find((share) => share.cause === row.cause);
  const all = row.shares.reduce((sum, share) => sum + share.duration_ns, 0) / 1e9;
  const shares = row.shares.map((share) => el("li", {}, el("b", {}, duration(share.duration_ns / 1e9)), share.text));
  const title = now ? `${now.text} (${duration(now.duration_ns / 1e9)})` : `waited ${duration(all)}`;
  if (!shares.length) return "–";
  return el("details", { open: isOpen }, el("summary", {}, title), el("ul", {}, ...shares));
}

const shortName = (id) => (id.length > 22 ? `${id.slice(0, 14)}…${id.slice(-6)}` : id);
const apiName = (id) => id.replace(/-\d+-[0-9a-f]+(?:\.\d+)?$/, "");

async function abortRequest(row) {
  try {
    await call("abort_requests", { isAdmin: true, body: { request_ids: [apiName(row.request_id)] } });
  } catch (error) { notify(describe(error)); }
}

// Drawing

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** Readies a canvas for its size on the screen; returns its context, width and height in CSS pixels. */
function surface(canvas, width = canvas.clientWidth, height = canvas.clientHeight) {
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  return [context, width, height];
}

const LABELS = 92;  // Width of the lanes' labels.
const LANES = [
  ["num_prefill_tokens", "Prefill", "tokens", "prefill"], ["num_sampled_tokens", "Sampled", "tokens", "decode"],
  ["num_draft_tokens", "Drafts", "tokens", "draft"], ["swaps", "Moves", "blocks", "swap"], ["ms", "Step", "ms", "step"],
];

function laneValue(step, name) {
  if (name === "swaps") return step.num_swapped_out + step.num_swapped_in + step.num_copied;
  return name === "ms" ? 1000 * (step.ended_s - step.planned_s) : step[name];
}

/** Lanes over time: a bar for each step, as wide as it took and as high as its number. */
function drawTimeline() {
  const core = engine.core, seconds = Number(byId("window").value);
  const [context, width, height] = surface(byId("timeline"));
  const left = LABELS, lane = height / LANES.length, end = core.frame.now;
  const shown = core.steps.filter((step) => step.ended_s > end - seconds);
  const x = (time) => left + (width - left - 8) * (1 - (end - time) / seconds);
  context.font = "12px system-ui, sans-serif";
  LANES.forEach(([name, title, unit, color], i) => {
    const base = lane * (i + 1) - 6;
    const most = shown.reduce((high, step) => Math.max(high, laneValue(step, name)), 0);
    context.fillStyle = css("line");
    context.fillRect(left, base, width - left - 8, 1);
    context.fillStyle = css("muted");
    context.fillText(title, 12, base - 15);
    if (most) context.fillText(`≤ ${count(Math.ceil(most))} ${unit}`, 12, base - 1);
    context.fillStyle = css(color);
    for (const step of shown) {
      const value = laneValue(step, name);
      const tall = value ? Math.max(2, (lane - 12) * value / most) : 0;
      const from = Math.max(x(step.planned_s), left);
      context.fillRect(from, base - tall, Math.max(x(step.ended_s) - from - 0.5, 1), tall);
    }
  });
}

function timelineTip(event) {
  const core = engine.core, canvas = byId("timeline"), box = canvas.getBoundingClientRect();
  if (!core?.frame) return;
  const seconds = Number(byId("window").value), left = LABELS;
  const time = core.frame.now - seconds * (1 - (event.clientX - box.left - left) / (box.width - left - 8));
  const step = core.steps.findLast((one) => one.planned_s <= time);
  if (!step || event.clientX - box.left < left) return hideTip();
  return showTip(event, [
    `Step ${step.step_id}: ${duration(step.ended_s - step.planned_s)}, ${step.num_requests} requests`,
    `${step.num_prefill_tokens} prefill, ${step.num_sampled_tokens} sampled`,
    step.num_draft_tokens ? `${step.num_accepted_tokens} of ${step.num_draft_tokens} drafts accepted` : "",
    laneValue(step, "swaps") ? `${step.num_swapped_out} out, ${step.num_swapped_in} in, ${step.num_copied} copied` : "",
  ]);
}

function showTip(event, lines) {
  const tip = byId("tip");
  tip.textContent = lines.filter(Boolean).join("\n");
  tip.hidden = false;
  tip.style.left = `${clamp(event.clientX + 14, 4, window.innerWidth - tip.offsetWidth - 4)}px`;
  tip.style.top = `${event.clientY + 18 + tip.offsetHeight > window.innerHeight ? event.clientY - tip.offsetHeight - 10 : event.clientY + 18}px`;
}

const hideTip = () => { byId("tip").hidden = true; };

// Map of the cache: a cell for each block, in the order of their ids.

const GAP_FROM = 6;  // Cells of this many pixels have gaps.
const map = { moment: -1, isPlaying: false, hovered: -1, layouts: {} };
const STATES = [
  ["Free", "free", (state) => !(state & 3) && !(state & CACHED)], ["Free, cached", "cached", (state) => state === CACHED],
  ["Held, being filled", "held", (state) => (state & 3) === HELD && !(state & CACHED)],
  ["Held, cached", "held", (state) => (state & 3) === HELD && state & CACHED], ["Shared", "shared", (state) => state & SHARED],
];

function rgb(text) {
  const hex = text.slice(1);
  const wide = hex.length === 3 ? [...hex].map((one) => one + one).join("") : hex;
  return [0, 2, 4].map((at) => parseInt(wide.slice(at, at + 2), 16));
}

const mix = (a, b, part) => a.map((one, i) => Math.round(one + (b[i] - one) * part));

function hsl(hue, saturation, light) {
  const spread = saturation * Math.min(light, 1 - light);
  return [0, 8, 4].map((n) => {
    const k = (n + hue / 30) % 12;
    return Math.round(255 * (light - spread * Math.max(-1, Math.min(k - 3, 9 - k, 1))));
  });
}

const isDark = () => document.documentElement.dataset.theme === "dark";
const requestColor = (number) => hsl((number * 137.508) % 360, 0.58, isDark() ? 0.62 : 0.5);
const tenantColor = (tenant) => hsl([...(tenant || "–")].reduce((sum, char) => (sum * 31 + char.codePointAt(0)) % 9973, 7) * 137.508 % 360, 0.5, isDark() ? 0.62 : 0.48);
function swatch(color) {
  const element = el("span", { class: "swatch" });
  element.style.background = typeof color === "string" ? color : `rgb(${color})`;
  return element;
}

/** What is painted: the present, or a moment of the replay. */
function shownMoment() {
  const core = engine.core;
  if (map.moment < 0) {
    const now = Date.now(), { states, owners, changed } = core.device;
    return { now, states, owners, age: (id) => (changed[id] ? now - changed[id] : Infinity) };
  }
  const one = core.moments[clamp(map.moment, 0, core.moments.length - 1)];
  return { ...one, age: (id) => one.changed[id] };
}

/** Function from a block to its color, [r, g, b]. */
function painter(moment, mode) {
  const free = rgb(css("free")), cached = rgb(css("cached")), held = rgb(css("held")), shared = rgb(css("shared")), empty = rgb(css("null"));
  const filling = mix(held, rgb(css("panel")), 0.4);
  const byState = (state) => (state & SHARED ? shared : state & HELD ? (state & CACHED ? held : filling) : state & CACHED ? cached : free);
  const colors = new Map();
  const ofOwner = (number) => {
    if (!colors.has(number)) colors.set(number, mode === "tenant" ? tenantColor(requestNumbers.byNumber.get(number)?.tenant) : requestColor(number));
    return colors.get(number);
  };
  return (id) => {
    const state = moment.states[id];
    if (!id) return empty;
    if (mode === "state" || !(state & 3)) return mode === "age" && state ? mix(held, cached, ageShare(moment.age(id))) : byState(state);
    if (mode === "age") return mix(shared, held, ageShare(moment.age(id)));
    return moment.owners[id] ? ofOwner(moment.owners[id]) : filling;
  };
}

/** 0 for blocks that have just changed, 1 after five minutes. */
const ageShare = (ms) => clamp(Math.log1p(ms / 1000) / Math.log1p(300), 0, 1);

/** Columns, rows and cell size of a map with so many blocks. */
function layoutOf(holder, numBlocks) {
  const width = Math.max(holder.clientWidth - 18, 100), wanted = Number(byId("cell").value);
  const fits = (cell) => Math.ceil(numBlocks / Math.floor(width / cell)) * cell <= 430;
  const cell = wanted || [20, 17, 14, 12, 10, 8, 7, 6, 5, 4, 3, 2].find(fits) || 2;
  const columns = Math.max(1, Math.floor(width / cell));
  return { cell, columns, rows: Math.ceil(numBlocks / columns) };
}

function paint(holder, moment, mode) {
  const canvas = holder.querySelector("canvas"), layout = layoutOf(holder, moment.states.length);
  const { cell, columns, rows: numRows } = layout;
  const small = new ImageData(columns, numRows), color = painter(moment, mode);
  for (let id = 0; id < moment.states.length; id++) small.data.set([...color(id), 255], 4 * id);
  const buffer = new OffscreenCanvas(columns, numRows);
  buffer.getContext("2d").putImageData(small, 0, 0);
  canvas.style.width = `${columns * cell}px`;
  canvas.style.height = `${numRows * cell}px`;
  const [context, width, height] = surface(canvas, columns * cell, numRows * cell);
  context.imageSmoothingEnabled = false;
  context.drawImage(buffer, 0, 0, width, height);
  if (cell >= GAP_FROM) drawGaps(context, layout);
  if (holder.id === "device-map") drawMarks(context, moment, layout);
  map.layouts[holder.id] = layout;
}

function drawGaps(context, { cell, columns, rows: numRows }) {
  context.fillStyle = css("panel");
  for (let i = 1; i <= columns; i++) context.fillRect(i * cell - 1, 0, 1, numRows * cell);
  for (let i = 1; i <= numRows; i++) context.fillRect(0, i * cell - 1, columns * cell, 1);
}

/** Frames around the block under the pointer, and around all blocks of its holder. */
function drawMarks(context, moment, { cell, columns }) {
  if (map.hovered < 1 || cell < 4) return;
  const owner = moment.owners[map.hovered];
  context.strokeStyle = css("text");
  moment.states.forEach((_, id) => {
    if (id !== map.hovered && !(owner && moment.owners[id] === owner)) return;
    context.lineWidth = id === map.hovered ? 2 : 1;
    context.strokeRect((id % columns) * cell + 0.5, Math.floor(id / columns) * cell + 0.5, cell - 2, cell - 2);
  });
}

function showCache() {
  const core = engine.core, mode = byId("color").value, moment = shownMoment();
  paint(byId("device-map"), moment, mode);
  byId("host-part").hidden = core.host.states.length < 2;
  if (!byId("host-part").hidden) {
    const { states, owners, changed } = core.host, now = Date.now();
    paint(byId("host-map"), { now, states, owners, age: (id) => now - changed[id] }, mode);
  }
  showStore(core.frame.store);
  showLegend(moment, mode);
  showReplay();
  const usable = moment.states.length - 1, used = moment.states.reduce((sum, state) => sum + Boolean(state & 3), 0);
  byId("cache-summary").textContent = `${count(used)} of ${count(usable)} blocks held, ${core.frame.block_size} tokens each`;
}

/** The KV store outside the process: cells for its room, of several blocks each if there are many. */
function showStore(store) {
  byId("store-part").hidden = !store;
  if (!store) return;
  const room = Math.max(store.max_blocks, store.num_blocks, 1), each = Math.ceil(room / MAX_STORE_CELLS);
  const states = new Uint8Array(Math.ceil(room / each) + 1).fill(CACHED, 1, Math.ceil(store.num_blocks / each) + 1);
  paint(byId("store-map"), { states, owners: [], age: () => Infinity }, "state");
  byId("store-title").textContent = store.medium === "DISK" ? "Disk" : `Store (${store.medium.toLowerCase()})`;
  const parts = [`${count(store.num_blocks)}${store.max_blocks ? ` of ${count(store.max_blocks)}` : ""} blocks, ${count(Math.round(store.num_bytes / 2 ** 20))} MiB`];
  parts.push(`${count(store.num_loaded)} loaded, ${count(store.num_saved)} saved`);
  if (each > 1) parts.push(`${count(each)} blocks a cell`);
  if (store.is_resting) parts.push("it does not work and is left alone for a while");
  byId("store-text").textContent = parts.join("; ");
}

function showLegend(moment, mode) {
  let items;
  if (mode === "age") items = [["just changed", css("shared")], ["held for minutes", css("held")], ["cached for minutes", css("cached")], ["free", css("free")]];
  else if (mode === "state") items = STATES.map(([name, color, is]) => [`${name} ${count(moment.states.reduce((sum, state, id) => sum + Boolean(id && is(state)), 0))}`, name === "Held, being filled" ? mix(rgb(css(color)), rgb(css("panel")), 0.4) : css(color)]);
  else items = ownerItems(moment, mode);
  byId("legend").replaceChildren(...items.map(([name, color]) => el("span", {}, swatch(color), name)));
}

function ownerItems(moment, mode) {
  const counts = new Map();
  moment.owners.forEach((number) => {
    if (!number) return;
    const info = requestNumbers.byNumber.get(number);
    const name = mode === "tenant" ? info?.tenant || "no tenant" : shortName(info?.id ?? "");
    const before = counts.get(name) ?? [0, mode === "tenant" ? tenantColor(info?.tenant) : requestColor(number)];
    counts.set(name, [before[0] + 1, before[1]]);
  });
  const largest = [...counts].sort((a, b) => b[1][0] - a[1][0]).slice(0, 12);
  return [...largest.map(([name, [number, color]]) => [`${name} ${count(number)}`, color]), ["cached", css("cached")], ["free", css("free")]];
}

function showReplay() {
  const { moments } = engine.core, slider = byId("moment"), last = moments.length - 1;
  slider.max = String(last);
  slider.value = String(map.moment < 0 ? last : map.moment);
  byId("live").setAttribute("aria-pressed", String(map.moment < 0));
  byId("play").textContent = map.isPlaying ? "❚❚" : "▶";
  const ago = map.moment < 0 ? 0 : (Date.now() - moments[clamp(map.moment, 0, last)].now) / 1000;
  byId("moment-text").textContent = map.moment < 0 ? "now" : `${duration(ago)} ago`;
}

function goTo(moment) {
  map.moment = moment;
  if (engine.core?.frame) showCache();
}

function play() {
  if (!map.isPlaying || shownPage !== "cache") return;
  if (map.moment >= engine.core.moments.length - 1) map.isPlaying = false;
  goTo(Math.min(map.moment + 1, engine.core.moments.length - 1));
  setTimeout(play, 120);
}

function togglePlay() {
  map.isPlaying = !map.isPlaying;
  if (map.isPlaying && map.moment < 0) map.moment = 0;
  if (map.isPlaying) play();
  else showReplay();
}

function blockAt(event, holder) {
  const layout = map.layouts[holder.id], box = holder.querySelector("canvas").getBoundingClientRect();
  const column = Math.floor((event.clientX - box.left) / layout.cell), row = Math.floor((event.clientY - box.top) / layout.cell);
  const tier = holder.id === "host-map" ? engine.core.host : engine.core.device;
  const id = row * layout.columns + column;
  return column >= 0 && column < layout.columns && id > 0 && id < tier.states.length ? id : -1;
}

function blockTip(event, holder) {
  if (!engine.core?.frame || !map.layouts[holder.id]) return;
  const id = blockAt(event, holder), onHost = holder.id === "host-map";
  if (!onHost && id !== map.hovered) {
    map.hovered = id;
    showCache();
  }
  if (id < 0) return hideTip();
  return showTip(event, blockLines(id, onHost));
}

function blockLines(id, onHost) {
  const core = engine.core, tier = onHost ? core.host : core.device;
  const moment = onHost ? { states: tier.states, owners: tier.owners, age: () => Infinity } : shownMoment();
  const state = moment.states[id], name = STATES.find(([, , is]) => is(state))[0];
  const isPast = map.moment >= 0 && !onHost;
  const holders = isPast ? [requestNumbers.byNumber.get(moment.owners[id])?.id].filter(Boolean).map((one) => ({ name: one })) : tier.holders(id);
  const shown = holders.slice(0, 6).map((one) => `${shortName(one.name)}${one.position === undefined ? "" : `, block ${one.position} of it`}`);
  const age = moment.age(id);
  return [`Block ${id}: ${name.toLowerCase()}`, Number.isFinite(age) ? `for ${duration(age / 1000)}` : "", ...shown, holders.length > 6 ? `and ${holders.length - 6} more` : ""];
}

async function showBlock(id, onHost) {
  try {
    const query = `console/block?core=${engine.cores.indexOf(engine.core)}&tier=${onHost ? "host" : "device"}&id=${id}`;
    const block = await (await call(query, { isAdmin: true })).json();
    const facts = [
      ["Holders", block.holders.length ? block.holders.map((one) => `${one.request_id}: entry ${one.position} of group ${one.group}`).join("; ") : "none"],
      ["References", String(block.num_holders)],
      ["Content", block.content ? `${block.content}…, findable by its hash` : block.is_full ? "full, not in the prefix cache" : "being filled, or empty"],
      ["Transfers", [block.is_pinned && "a planned move reads it", block.is_borrowed && "lent to the KV store"].filter(Boolean).join(", ") || "none"],
    ];
    const list = facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]);
    byId("block").replaceChildren(el("div", { class: "bar" }, el("h2", {}, `Block ${id} on the ${block.tier}`), el("span", { class: "grow" }), button("✕", "Close", () => { byId("block").hidden = true; })), el("dl", {}, ...list));
    byId("block").hidden = false;
  } catch (error) { notify(describe(error)); }
}

/** Arrow keys move over a focused map. */
function mapKey(event, holder) {
  const layout = map.layouts[holder.id];
  const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -layout?.columns, ArrowDown: layout?.columns }[event.key];
  if (!layout || (by === undefined && event.key !== "Enter")) return;
  event.preventDefault();
  if (event.key === "Enter") return void (map.hovered > 0 && showBlock(map.hovered, holder.id === "host-map"));
  map.hovered = clamp(Math.max(map.hovered, 0) + by, 1, engine.core.device.states.length - 1);
  showCache();
  const box = holder.querySelector("canvas").getBoundingClientRect();
  const at = { clientX: box.left + (map.hovered % layout.columns) * layout.cell, clientY: box.top + Math.floor(map.hovered / layout.columns) * layout.cell };
  showTip(at, blockLines(map.hovered, holder.id === "host-map"));
}

// Metrics

const MAX_SAMPLES = 600;
const SCRAPE_MS = 5000;
const CHARTS = [
  ["Tokens per second", () => rate("num_sampled_tokens"), count], ["Prefill tokens per second", () => rate("num_prefill_tokens"), count],
  ["Step, median", () => stepMedian(), duration], ["Running requests", () => total("num_running"), count],
  ["Waiting requests", () => total("num_waiting"), count], ["KV cache held", cacheShare, percent],
  ["Time to first token, p50", () => scraped.quantile("time_to_first_token_seconds", 0.5), duration],
  ["Time to first token, p95", () => scraped.quantile("time_to_first_token_seconds", 0.95), duration],
  ["Between tokens, p50", () => scraped.quantile("inter_token_latency_seconds", 0.5), duration],
  ["Between tokens, p95", () => scraped.quantile("inter_token_latency_seconds", 0.95), duration],
  ["Prefix cache hits", () => total("prefix_cache_hits") / (total("prefix_cache_queries") || NaN), percent],
  ["Preemptions per second", () => rateOfTotal("num_preemptions"), (value) => value.toFixed(1)],
];

function stepMedian() {
  const steps = engine.cores.flatMap((core) => core.steps.slice(-100)).map((step) => step.ended_s - step.planned_s).sort((a, b) => a - b);
  return steps.length ? steps[steps.length >> 1] : NaN;
}

const totalsBefore = {};
function rateOfTotal(name) {
  const now = performance.now(), value = total(name), before = totalsBefore[name];
  totalsBefore[name] = { now, value };
  return before && now > before.now ? Math.max(0, 1000 * (value - before.value) / (now - before.now)) : 0;
}

/** Histograms of /metrics: counts by bucket, as of now and of a minute ago. */
const scraped = {
  history: [], last: 0,
  async scrape() {
    if (performance.now() - this.last < SCRAPE_MS) return;
    this.last = performance.now();
    try {
      this.history.push(histograms(await (await call("metrics", { isAdmin: true })).text()));
      this.history.splice(0, this.history.length - 12);
    } catch (error) { notify(describe(error)); }
  },
  quantile(name, share) {
    const now = this.history.at(-1)?.get(name), before = this.history.length > 1 ? this.history[0].get(name) : null;
    if (!now) return NaN;
    const counts = [...now].map(([bound, value]) => [bound, value - (before?.get(bound) ?? 0)]).sort((a, b) => a[0] - b[0]);
    const all = counts.at(-1)?.[1] ?? 0;
    const place = counts.findIndex(([, value]) => value >= share * all);
    if (!all || place < 0) return NaN;
    const [low, under] = counts[place - 1] ?? [0, 0], [high, upTo] = counts[place];
    return high === Infinity ? low : low + (high - low) * (share * all - under) / (upTo - under || 1);
  },
};

function histograms(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = /^\w+:(\w+)_bucket\{.*?\ble="([^"]+)".*\} (\S+)/.exec(line);
    if (!match) continue;
    const bound = match[2] === "+Inf" ? Infinity : Number(match[2]);
    if (!found.has(match[1])) found.set(match[1], new Map());
    found.get(match[1]).set(bound, (found.get(match[1]).get(bound) ?? 0) + Number(match[3]));
  }
  return found;
}

const samples = {
  values: CHARTS.map(() => []),
  add() {
    CHARTS.forEach(([, read], i) => {
      this.values[i].push(read());
      this.values[i].splice(0, this.values[i].length - MAX_SAMPLES);
    });
  },
};

function showMetrics() {
  scraped.scrape();
  const holder = byId("charts");
  if (!holder.children.length) {
    holder.append(...CHARTS.map(([name]) => el("figure", { class: "chart" }, el("div", { class: "bar" }, el("h2", {}, name), el("span", { class: "grow" }), el("b")), el("canvas", { role: "img", "aria-label": name }))));
  }
  CHARTS.forEach(([, , format], i) => {
    const values = samples.values[i], last = values.at(-1);
    holder.children[i].querySelector("b").textContent = Number.isFinite(last) ? format(last) : "–";
    drawChart(holder.children[i].querySelector("canvas"), values);
  });
}

function drawChart(canvas, values) {
  const [context, width, height] = surface(canvas);
  const most = Math.max(...values.filter(Number.isFinite), 0) || 1, step = width / Math.max(values.length - 1, 60);
  const points = values.map((value, i) => [width - (values.length - 1 - i) * step, height - 3 - (height - 8) * value / most]).filter((point) => Number.isFinite(point[1]));
  context.fillStyle = css("line");
  context.fillRect(0, height - 1, width, 1);
  if (points.length < 2) return;
  const trace = () => { context.beginPath(); points.forEach(([x, y]) => context.lineTo(x, y)); };
  trace();
  context.lineTo(points.at(-1)[0], height);
  context.lineTo(points[0][0], height);
  context.fillStyle = css("soft");
  context.fill();
  trace();
  context.strokeStyle = css("accent");
  context.lineWidth = 1.6;
  context.stroke();
}

// Pages

const PAGES = ["chat", "requests", "cache", "metrics"];
const SHOWS = { requests: showRequests, cache: showCache, metrics: showMetrics };
let shownPage = "";

function showPage(name) {
  shownPage = PAGES.includes(name) ? name : "chat";
  for (const page of PAGES) {
    const tab = byId(`tab-${page}`), isShown = page === shownPage;
    byId(page).hidden = !isShown;
    tab.setAttribute("aria-selected", String(isShown));
    tab.tabIndex = isShown ? 0 : -1;
  }
  document.title = `quire: ${shownPage}`;
  hideTip();
  notify("");
  if (engine.core?.frame) SHOWS[shownPage]?.();
  engine.isRefused = false;
  engine.restart();
  if (shownPage === "chat") renderChat();
}

const open = (page) => { location.hash = page; };

function tabKey(event) {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!by) return;
  const page = PAGES[(PAGES.indexOf(shownPage) + by + PAGES.length) % PAGES.length];
  open(page);
  byId(`tab-${page}`).focus();
}

function setTheme(name) {
  const dark = name === "dark" || (name === "system" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  byId("theme").title = `Theme: ${name}`;
  store(localStorage, "theme", name);
  if (engine.core?.frame) SHOWS[shownPage]?.();
}

function nextTheme() {
  const names = ["system", "light", "dark"];
  setTheme(names[(names.indexOf(stored(localStorage, "theme", "system")) + 1) % 3]);
}

function shortcut(event) {
  const isTyping = event.target.closest("input, textarea, select, dialog");
  const letter = event.altKey && !event.ctrlKey ? event.code.replace(/Key|Digit/, "") : "";
  const act = {
    N: newChat, R: retryLast, S: () => showSettings(byId("settings").hidden),
    1: () => open("chat"), 2: () => open("requests"), 3: () => open("cache"), 4: () => open("metrics"),
  }[letter];
  if (act) act();
  else if (event.key === "Escape" && running) running.abort();
  else if (isTyping) return;
  else if (event.key === "/" && shownPage === "chat") byId("draft").focus();
  else if (event.key === "?") byId("help").showModal();
  else return;
  event.preventDefault();
}

function draftKey(event) {
  const { target } = event;
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send(target.value);
  } else if (event.key === "ArrowUp" && !target.value) {
    const last = path().findLast((node) => node.role === "user");
    if (last) { event.preventDefault(); editMessage(last); }
  }
}

function listenToChat() {
  const on = (id, name, listener) => byId(id).addEventListener(name, listener);
  on("composer", "submit", (event) => { event.preventDefault(); send(byId("draft").value); });
  on("draft", "keydown", draftKey);
  on("draft", "input", fitDraft);
  on("draft", "paste", (event) => { if (event.clipboardData.files.length) { event.preventDefault(); attachFiles(event.clipboardData.files); } });
  on("composer", "dragover", (event) => { event.preventDefault(); byId("composer").classList.add("drop"); });
  on("composer", "dragleave", () => byId("composer").classList.remove("drop"));
  on("composer", "drop", (event) => { event.preventDefault(); byId("composer").classList.remove("drop"); attachFiles(event.dataTransfer.files); });
  on("attach", "click", () => byId("attach-file").click());
  on("attach-file", "change", (event) => { attachFiles([...event.target.files]); event.target.value = ""; });
  on("stop", "click", () => running?.abort());
  on("new-chat", "click", newChat);
  on("export-json", "click", () => download("chat.json", "application/json", JSON.stringify({ version: 1, nodes: [...nodes.values()] }, null, 1)));
  on("export-markdown", "click", () => download("chat.md", "text/markdown", asMarkdown()));
  on("import", "click", () => byId("import-file").click());
  on("import-file", "change", (event) => { if (event.target.files[0]) openSaved(event.target.files[0]); event.target.value = ""; });
  on("toggle-settings", "click", () => showSettings(byId("settings").hidden));
  on("close-settings", "click", () => showSettings(false));
  on("reset-settings", "click", () => { Object.keys(settings).forEach((name) => delete settings[name]); store(localStorage, "settings", settings); renderSettings(); });
  on("model", "change", () => { store(sessionStorage, "model", modelName()); renderChat(); });
}

function listenToEngine() {
  const again = () => { if (engine.core?.frame) SHOWS[shownPage]?.(); };
  for (const id of ["color", "cell", "window", "core"]) byId(id).addEventListener("change", again);
  byId("timeline").addEventListener("pointermove", timelineTip);
  byId("timeline").addEventListener("pointerleave", hideTip);
  for (const holder of [byId("device-map"), byId("host-map")]) {
    const canvas = holder.querySelector("canvas"), onHost = holder.id === "host-map";
    canvas.addEventListener("pointermove", (event) => blockTip(event, holder));
    canvas.addEventListener("pointerleave", () => { hideTip(); map.hovered = -1; again(); });
    canvas.addEventListener("click", (event) => { const id = blockAt(event, holder); if (id > 0) showBlock(id, onHost); });
    canvas.addEventListener("keydown", (event) => mapKey(event, holder));
  }
  byId("moment").addEventListener("input", (event) => { map.isPlaying = false; goTo(Number(event.target.value)); });
  byId("live").addEventListener("click", () => { map.isPlaying = false; goTo(-1); });
  byId("play").addEventListener("click", togglePlay);
  window.addEventListener("resize", again);
  document.addEventListener("visibilitychange", () => engine.restart());
}

function listenToPages() {
  for (const page of PAGES) byId(`tab-${page}`).addEventListener("click", () => open(page));
  byId("tabs").addEventListener("keydown", tabKey);
  byId("theme").addEventListener("click", nextTheme);
  byId("open-help").addEventListener("click", () => byId("help").showModal());
  byId("open-keys").addEventListener("click", openKeys);
  byId("keys").addEventListener("close", useKeys);
  window.addEventListener("hashchange", () => showPage(location.hash.slice(1)));
  document.addEventListener("keydown", shortcut);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(stored(localStorage, "theme", "system")));
}

function begin() {
  nodes = new Map([[0, newRoot()]]);
  try {
    takeConversation(stored(sessionStorage, "chat", null));
  } catch { /* there is none */ }
  setTheme(stored(localStorage, "theme", "system"));
  listenToChat();
  listenToEngine();
  listenToPages();
  showPage(location.hash.slice(1));
  loadModels();
}

globalThis.quireConsole = Object.freeze({ renderMarkdown });  // for tests
begin();
})();
