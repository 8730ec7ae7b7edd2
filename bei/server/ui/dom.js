// Elements and numbers.

// `h('p', { class: 'note' }, 'text', child)`. Properties: `on` has listeners by event, `style` custom properties by name;
// all others are attributes, left out where they are null or false. Children may be nested lists; null is left out.
export function h(name, properties = {}, ...children) {
  return filled(document.createElement(name), properties, children)
}

// The same in SVG.
export function svg(name, properties = {}, ...children) {
  return filled(document.createElementNS('http://www.w3.org/2000/svg', name), properties, children)
}

function filled(element, { on = {}, style = {}, ...attributes }, children) {
  for (const [event, listener] of Object.entries(on)) element.addEventListener(event, listener)
  for (const [property, value] of Object.entries(style)) element.style.setProperty(property, value)
  for (const [attribute, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) {
      element.setAttribute(attribute, value === true ? '' : value)
    }
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== ''))
  return element
}

let lastId = 0

// An id that no other element of the page has.
export function newId(name) {
  lastId += 1
  return `${name}-${lastId}`
}

// A region that scrolls sideways where it is too wide, by keyboard too.
export function scrolling(label, ...children) {
  return h('div', { class: 'scroll', role: 'group', 'aria-label': label, tabindex: '0' }, ...children)
}

export function plural(count, one, many = `${one}s`) {
  return `${count.toLocaleString('en')} ${count === 1 ? one : many}`
}

// 0.0123 s as "12.3 ms".
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return '–'
  if (seconds < 1) return `${significant(seconds * 1000)} ms`
  return `${significant(seconds)} s`
}

// Three digits, with a k or M behind where there are many.
export function significant(value) {
  if (value === null || value === undefined) return '–'
  if (value >= 999_500) return `${digits(value / 1_000_000)} M`
  if (value >= 9_995) return `${digits(value / 1000)} k`
  return digits(value)
}

function digits(value) {
  if (value === 0) return '0'
  const places = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value))))
  const text = value.toFixed(Math.min(4, places))
  return text.includes('.') ? text.replace(/\.?0+$/, '') : Number(text).toLocaleString('en')
}

export function percent(share) {
  return share === null || share === undefined ? '–' : `${Number((share * 100).toFixed(1))} %`
}

// At most `most` characters.
export function shortened(text, most) {
  const characters = Array.from(text)
  return characters.length > most ? `${characters.slice(0, most - 1).join('')}…` : text
}

// The lines of a field that have something on them.
export function linesOf(text) {
  return text.split('\n').map((line) => line.trim()).filter(Boolean)
}
