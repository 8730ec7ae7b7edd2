// Bars beside their names and numbers: scores of documents, of labels, of words.

import { h } from './dom.js'

// An ordered list. Rows are `{ name, value, text, note }`: `value` is drawn, `text` is its number, `note` stands behind.
export function barList(rows, { label, isNumbered = false, className = '' }) {
  const place = scaleOf(rows.map((row) => row.value))
  return h(
    'ol',
    { class: `bars ${isNumbered ? 'numbered' : ''} ${className}`, 'aria-label': label },
    rows.map((row) =>
      h(
        'li',
        { class: row.className ?? null },
        h('div', { class: 'bar-row' }, h('span', { class: 'bar-name' }, row.name), h('span', { class: 'bar-value' }, row.text)),
        h('div', { class: 'bar-track', 'aria-hidden': 'true' }, h('div', { class: 'bar-fill', style: { '--share': place(row.value) } })),
        row.note ? h('p', { class: 'quiet bar-note' }, row.note) : null,
      ),
    ),
  )
}

// From a value to the share of the track that its bar takes. Scores from 0 to 1 are as they are; others, logits and
// weights, are set against the largest and, where some are negative, the smallest.
function scaleOf(values) {
  const least = Math.min(0, ...values)
  const most = values.every((value) => value >= 0 && value <= 1) ? 1 : Math.max(0, ...values)
  return (value) => (most > least ? (value - least) / (most - least) : 0)
}
