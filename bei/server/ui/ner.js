// Named entities: spans of a text, with their labels.

import { ROUTES } from './api.js'
import { h, plural, scrolling } from './dom.js'

const HUES = 6 // of style.css

export const ner = {
  id: 'entities',
  title: 'Entities',
  lead: 'Find names of people, places and whatever else the model has labels for.',
  button: 'Find entities',
  verb: 'find entities',
  needs: 'a model for token classification',
  example: 'dslim/bert-base-NER',
  can: (model) => model.tasks.includes('classify_tokens'),
  fields: [
    {
      name: 'text',
      kind: 'text',
      label: 'Text',
      value: 'Ada Lovelace wrote to Charles Babbage in London about the Analytical Engine. The Royal Society published it.',
    },
    {
      name: 'strategy',
      kind: 'choice',
      label: 'Joining of tokens',
      options: () => [
        ['simple', 'simple: neighbours with the same label'],
        ['first', 'first: a word has the label of its first token'],
        ['average', 'average: of the scores of a word’s tokens'],
        ['max', 'max: of the token with the highest score'],
      ],
    },
  ],
  request: ({ text, strategy }, model) => ({
    route: ROUTES.entities,
    body: { model: model.id, inputs: [[text]], aggregation_strategy: strategy },
    use: ['for entity in response.json()[0]:', '    print(entity["token"], entity["results"], entity["start"], entity["end"])'],
  }),
  counted: () => 'One text',
  show(content, { text }) {
    const entities = content[0].map(entityOf).filter(({ label }) => label !== 'O')
    if (!entities.length) return h('p', { class: 'note' }, 'The model finds no entity in this text.')
    const hueOf = hues(entities)
    const count = h('p', {}, plural(entities.length, 'entity', 'entities'))
    return h('div', {}, count, marked(text, entities, hueOf), spansTable(entities, hueOf, 'Entities'))
  },
}

function entityOf({ token, start, end, results }) {
  const [[label, score]] = Object.entries(results)
  return { token, start, end, label, score }
}

// A hue for each label.
export function hues(entities) {
  const labels = [...new Set(entities.map(({ label }) => label))].sort()
  return (label) => `hue-${(labels.indexOf(label) % HUES) + 1}`
}

// Places are counted in code points, and strings here in UTF-16.
export function marked(text, entities, hueOf) {
  const characters = Array.from(text)
  const parts = []
  let place = 0
  for (const { start, end, label } of entities) {
    if (start < place) continue // lies in the one before
    parts.push(characters.slice(place, start).join(''))
    parts.push(
      h('mark', { class: `entity ${hueOf(label)}` }, characters.slice(start, end).join(''), h('span', { class: 'entity-label' }, ` ${label}`)),
    )
    place = end
  }
  parts.push(characters.slice(place).join(''))
  return h('p', { class: 'marked' }, h('bdi', {}, parts))
}

export function spansTable(entities, hueOf, title) {
  const rows = entities.map(({ token, label, score, start, end }) =>
    h(
      'tr',
      {},
      h('th', { scope: 'row' }, h('bdi', {}, token)),
      h('td', {}, h('span', { class: `entity-label alone ${hueOf(label)}` }, label)),
      h('td', { class: 'number' }, score.toFixed(4)),
      h('td', { class: 'number' }, `${start} – ${end}`),
    ),
  )
  const heads = [[title === 'Entities' ? 'Entity' : 'Span'], ['Label'], ['Score', 'number'], ['Characters', 'number']]
  return scrolling(
    `${title} as a table`,
    h(
      'table',
      {},
      h('caption', {}, 'In the order of the text'),
      h('thead', {}, h('tr', {}, heads.map(([name, kind]) => h('th', { scope: 'col', class: kind ?? null }, name)))),
      h('tbody', {}, rows),
    ),
  )
}
