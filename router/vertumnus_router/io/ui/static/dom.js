// Elements are made one by one and text is only ever text: nothing that a server or a client named
// can become markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element with a class, attributes and children (strings become text, null is left out). */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same in SVG. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null));
  return node;
}

const shown = new Map();

/** Show what `make` makes of `facts` in the element `id`; nothing moves while they are the same. */
export function show(id, facts, make) {
  const text = JSON.stringify(facts);
  if (shown.get(id) === text) return;
  shown.set(id, text);
  document.getElementById(id).replaceChildren(...[make(facts)].flat().filter((one) => one !== null));
}

/** A bar, `share` of it full. Its width is the only style that scripts set. */
export function bar(share, label, kind = "") {
  const inner = el("i", { class: "fill" });
  inner.style.width = `${100 * Math.min(1, Math.max(0, share))}%`;
  return el("span", { class: `bar ${kind}`, role: "img", "aria-label": label, title: label }, inner);
}
