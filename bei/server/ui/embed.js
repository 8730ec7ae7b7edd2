// Embeddings: how alike several texts are, as a map of cosines.

import { ROUTES } from './api.js'
import { h, plural, scrolling, shortened } from './dom.js'
import { openaiOf } from './snippets.js'

const MOST_TEXTS = 40 // of the map
const LABEL_CHARACTERS = 60

// From these shares on white letters have more contrast on the map's colours than black ones (light scheme), or less
// (dark scheme): 4.5 at least. results.css has the colours.
const WHITE_INK_FROM = 0.77
const BLACK_INK_FROM = 0.54

export const embed = {
  id: 'embed',
  title: 'Embed',
  lead: 'Turn texts into vectors, and see how alike they are.',
  button: 'Embed',
  verb: 'embed texts',
  needs: 'an embedding model',
  example: 'sentence-transformers/all-MiniLM-L6-v2',
  can: (model) => model.tasks.includes('embed') && model.input_modalities.includes('text'),
  fields: [
    {
      name: 'texts',
      kind: 'lines',
      label: 'Texts',
      hint: 'One text a line.',
      rows: 8,
      value: [
        'What is the capital of Australia?',
        'Canberra is the capital of Australia.',
        'Sydney is the largest city of Australia.',
        'The cat sleeps on the warm roof.',
        'A kitten naps in the sun.',
      ].join('\n'),
    },
    {
      name: 'prompt',
      kind: 'choice',
      label: 'Prompt',
      hint: 'What this model wants in front of a text, by its purpose.',
      options: (model) => [['', 'As the model says'], ...model.prompts.map((name) => [name, name])],
    },
  ],
  request: ({ texts, prompt }, model) => ({
    route: ROUTES.embed,
    body: { model: model.id, input: texts, ...(prompt ? { prompt_name: prompt } : {}) },
  }),
  python: openaiOf,
  counted: ({ texts }) => plural(texts.length, 'text'),
  show(content, { texts }) {
    const vectors = content.data.map((entry) => entry.embedding)
    const summary = h(
      'p',
      {},
      `${plural(vectors.length, 'vector')} of ${plural(vectors[0].length, 'number')}, ${plural(content.usage.total_tokens, 'token')}.`,
    )
    if (vectors.length < 2) return h('div', {}, summary, h('p', { class: 'note' }, 'Add a second text to compare the two.'))
    const cut = vectors.length > MOST_TEXTS ? h('p', { class: 'note' }, `The map has the first ${MOST_TEXTS} texts.`) : null
    return h('div', {}, summary, cut, heatMap(texts.slice(0, MOST_TEXTS), vectors.slice(0, MOST_TEXTS)))
  },
}

function heatMap(texts, vectors) {
  const lengths = vectors.map((vector) => Math.sqrt(dot(vector, vector)))
  const cosines = vectors.map((a, i) => vectors.map((b, j) => dot(a, b) / (lengths[i] * lengths[j] || 1)))
  const lowest = Math.min(...cosines.flat())
  const shareOf = (cosine) => Math.max(0, Math.min(1, (cosine - lowest) / (1 - lowest || 1)))
  const table = h(
    'table',
    { class: 'heat' },
    h('caption', {}, 'Cosine of each pair of texts'),
    h(
      'thead',
      {},
      h('tr', {}, h('th', { scope: 'col' }, 'Text'), texts.map((_, index) => h('th', { scope: 'col', class: 'number' }, String(index + 1)))),
    ),
    h(
      'tbody',
      {},
      texts.map((text, row) =>
        h(
          'tr',
          {},
          h('th', { scope: 'row', title: text }, h('span', { class: 'quiet' }, `${row + 1} `), h('bdi', {}, shortened(text, LABEL_CHARACTERS))),
          cosines[row].map((cosine) => cell(cosine, shareOf(cosine))),
        ),
      ),
    ),
  )
  return h('div', {}, scrolling('Cosine of each pair of texts', table), legend(lowest))
}

function cell(cosine, share) {
  const inks = [share >= WHITE_INK_FROM ? 'white-in-light' : '', share >= BLACK_INK_FROM ? 'black-in-dark' : '']
  return h('td', { class: `number heat-cell ${inks.join(' ')}`, style: { '--share': share.toFixed(3) } }, cosine.toFixed(2))
}

function legend(lowest) {
  return h(
    'p',
    { class: 'legend quiet' },
    h('span', {}, lowest.toFixed(2)),
    h('span', { class: 'heat-scale', 'aria-hidden': 'true' }),
    h('span', {}, '1.00'),
    h('span', {}, 'Colours reach from the least alike pair to equal texts.'),
  )
}

export function cosine(a, b) {
  return dot(a, b) / (Math.sqrt(dot(a, a) * dot(b, b)) || 1)
}

function dot(a, b) {
  let sum = 0
  for (let index = 0; index < a.length; index += 1) sum += a[index] * b[index]
  return sum
}
